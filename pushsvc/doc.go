// Package pushsvc applies pushed commits (§6): admission, operations, then apply
// or reject. One commit has one outcome, durable before it is acknowledged.
//
// A push is two round trips to the database. The first begins a transaction,
// takes the partition's lock and reads everything the commits need: known
// outcomes, the serve gate, the rows named. Then Go decides, over candidate state
// in memory, what each commit does. The second writes rows, log and outcomes of
// all commits of the request and commits. A request whose outcomes are all known
// takes no lock and is answered after the first.
//
// The host may say what a row must be (Validator), what a commit must be
// (CommitValidator, which may read the rows that the commit would leave) and what work
// follows it (Planner). A hook that reads what the push does not name costs a round
// trip for each read; one that does not costs none.
//
// References that the schema declares are checked once the operations of a commit are
// staged; what a delete leads to joins the commit, at the cost of a round
// trip for each level of children. It is authorized like any other write: the delete of a
// row whose children the actor may not write is sync.forbidden.
//
// The host's own code writes with [Service.Apply], and with [Service.ApplyTx] inside a
// transaction of its own.
//
// Only a commit that the database itself refuses leaves that path: the request is
// then applied in halves, so that the refused commit is found and rejected alone
// and the rest goes on.
package pushsvc
