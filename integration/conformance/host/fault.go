package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg/ssp2"
)

// serveSync serves POST /sync. While the fault is armed, the first commit of the
// request finds a stored outcome that cannot be read (§6.3). The server under
// test is not changed for that: the unreadable record lies in its table for as
// long as the request runs.
func (i *instance) serveSync(w http.ResponseWriter, r *http.Request) {
	if !i.unreadable.Load() {
		i.protocol.ServeHTTP(w, r)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		writeError(w, badRequest("read the request: %v", err))
		return
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	request, err := ssp2.DecodeRequest(body)
	if err != nil || len(request.Commits) == 0 {
		i.protocol.ServeHTTP(w, r)
		return
	}
	i.unreadable.Store(false)
	restore, err := i.spoilOutcome(r.Context(), request.Header.ClientID, request.Commits[0].ClientCommitID)
	if err != nil {
		writeError(w, err)
		return
	}
	// Once the answer has begun an error can only end the connection.
	i.protocol.ServeHTTP(w, r)
	if err := restore(context.WithoutCancel(r.Context())); err != nil {
		panic(http.ErrAbortHandler)
	}
}

// spoilOutcome puts an unreadable outcome in place of the one of this commit, or
// of none. restore takes it away again.
func (i *instance) spoilOutcome(ctx context.Context, clientID, commitID string) (restore func(context.Context) error, err error) {
	key := []any{i.partition, clientID, commitID}
	var stored []byte
	err = i.pool.QueryRow(ctx, `
		select results from syncpg.sync_push_results
		where partition = $1 and client_id = $2 and client_commit_id = $3`, key...).Scan(&stored)
	existed := err == nil
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return nil, fmt.Errorf("read the stored outcome: %w", err)
	}
	_, err = i.pool.Exec(ctx, `
		insert into syncpg.sync_push_results (partition, client_id, client_commit_id,
		       status, commit_seq, results, recorded_at_ms, outcome_id, schema_version)
		values ($1, $2, $3, 1, 1, '\xff', 0, gen_random_uuid(), 1)
		on conflict (partition, client_id, client_commit_id) do update set results = excluded.results`, key...)
	if err != nil {
		return nil, fmt.Errorf("spoil the stored outcome: %w", err)
	}
	return func(ctx context.Context) error {
		var err error
		if existed {
			_, err = i.pool.Exec(ctx, `
				update syncpg.sync_push_results set results = $4
				where partition = $1 and client_id = $2 and client_commit_id = $3`, append(key, stored)...)
		} else {
			_, err = i.pool.Exec(ctx, `
				delete from syncpg.sync_push_results
				where partition = $1 and client_id = $2 and client_commit_id = $3`, key...)
		}
		if err != nil {
			return fmt.Errorf("restore the stored outcome: %w", err)
		}
		return nil
	}, nil
}
