package schemaddl

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg/schema"
)

// indexesSQL reads the indexes of tables. plain says that one is what "create index" makes
// of column names alone: a B-tree that is complete, over all rows, with default operators,
// order and collation.
const indexesSQL = `
select c.relname, x.relname, i.indisunique,
       exists (select 1 from pg_catalog.pg_constraint as k where k.conindid = i.indexrelid and k.contype in ('p', 'u', 'x')),
       array(select coalesce(a.attname::text, '')
               from unnest(i.indkey::smallint[]) with ordinality as k(attnum, ord)
               left join pg_catalog.pg_attribute as a on a.attrelid = c.oid and a.attnum = k.attnum
              order by k.ord),
       m.amname = 'btree' and i.indisvalid and i.indisready and i.indislive
         and i.indpred is null and i.indexprs is null and i.indnkeyatts = i.indnatts
         and coalesce((to_jsonb(i) ->> 'indnullsnotdistinct')::boolean, false) = false
         and not exists (
           select 1
             from unnest(i.indkey::smallint[], i.indclass::oid[], i.indcollation::oid[], i.indoption::smallint[]) as k(attnum, class_oid, collation_oid, options)
             join pg_catalog.pg_attribute as a on a.attrelid = c.oid and a.attnum = k.attnum
             join pg_catalog.pg_opclass as o on o.oid = k.class_oid
            where k.options <> 0 or not o.opcdefault or k.collation_oid <> a.attcollation)
  from pg_catalog.pg_class as c
  join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
  join pg_catalog.pg_index as i on i.indrelid = c.oid
  join pg_catalog.pg_class as x on x.oid = i.indexrelid
  join pg_catalog.pg_am as m on m.oid = x.relam
 where n.nspname = $1 and c.relname = any($2::text[])
 order by c.relname collate "C", x.relname collate "C"`

// catalogIndex is an index in the database.
type catalogIndex struct {
	Table, Name        string
	Unique, Constraint bool
	Columns            []string // an empty name stands for an expression
	Plain              bool
}

func readIndexes(ctx context.Context, db Querier, appSchema string, tables []string) ([]catalogIndex, error) {
	rows, err := db.Query(ctx, indexesSQL, appSchema, tables)
	if err != nil {
		return nil, fmt.Errorf("reading the indexes of the app tables: %w", err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[catalogIndex])
	if err != nil {
		return nil, fmt.Errorf("reading the indexes of the app tables: %w", err)
	}
	return found, nil
}

// indexes decides what becomes of the indexes (SEMANTICS §4). Owned are those of the
// prefix, and those that have the bare name of a declared index; never one that a
// constraint owns. They are dropped and made anew, except that one which is exactly what
// it would be made into stays, if rows of its table are not rewritten.
func (e *evolution) indexes(ctx context.Context, db Querier) error {
	wanted, err := ownedIndexes(e.next)
	if err != nil {
		e.refuse("", "", "", "%v", err)
		return nil
	}
	names, declared := []string{}, map[string]bool{}
	for _, s := range []*schema.Schema{e.old, e.next} {
		for _, t := range s.Tables {
			if !slices.Contains(names, t.Name) {
				names = append(names, t.Name)
			}
			for _, x := range t.Indexes {
				declared[x.Name] = true
			}
		}
	}
	found, err := readIndexes(ctx, db, e.o.AppSchema, names)
	if err != nil {
		return err
	}
	rewritten := map[string]bool{}
	for _, t := range e.tables {
		rewritten[t.next.Name] = t.rewrites()
	}
	had, kept := map[string]catalogIndex{}, map[string]bool{}
	for _, x := range found {
		if x.Constraint || !strings.HasPrefix(x.Name, indexPrefix) && !declared[x.Name] {
			continue
		}
		had[x.Name] = x
		if !rewritten[x.Table] && slices.ContainsFunc(wanted, x.is) {
			kept[x.Name] = true
			continue
		}
		e.drop = append(e.drop, x)
	}
	fresh := make([]string, 0, len(wanted))
	for _, x := range wanted {
		if name := IndexName(x.declared); had[name].Name == "" {
			fresh = append(fresh, name)
		}
	}
	taken, err := readRelations(ctx, db, e.o.AppSchema, fresh)
	if err != nil {
		return err
	}
	made := map[string]bool{}
	for _, x := range wanted {
		name := IndexName(x.declared)
		if kept[name] {
			continue
		}
		if slices.Contains(taken, name) {
			e.refuse(x.table, "", "rename it, or choose another name for the index",
				"the index %q would be named %s, and the database has something else of this name", x.declared, name)
		}
		made[name] = true
		then, ok := had[name]
		x.fresh = !ok || !then.is(x)
		e.create = append(e.create, x)
		if ok && then.Table == x.table {
			e.step(RebuildIndex, x.table, name, "")
		} else {
			e.step(CreateIndex, x.table, name, "")
		}
	}
	for _, x := range e.drop {
		if !made[x.Name] {
			e.step(DropIndex, x.Table, x.Name, "")
		}
	}
	return nil
}

// is says whether the index is what x would be made into.
func (c catalogIndex) is(x ownedIndex) bool {
	return c.Plain && c.Table == x.table && c.Name == IndexName(x.declared) && c.Unique == x.unique && slices.Equal(c.Columns, x.keys())
}
