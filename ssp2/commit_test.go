package ssp2_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/ssp2"
)

// appendCommit writes a commit with the builder.
func appendCommit(dst []byte, c *ssp2.Commit) ([]byte, error) {
	dst, frame := ssp2.BeginCommitFrame(dst, c.CommitSeq, c.CreatedAtMs, c.ActorID, c.Tables)
	for _, ch := range c.Changes {
		var scopes []string
		for _, variable := range sortedVariables(ch.Scopes) {
			scopes = append(scopes, variable+"="+ch.Scopes[variable])
		}
		var version int64
		if ch.RowVersion != nil {
			version = *ch.RowVersion
		}
		dst = frame.AppendChange(dst, ch.TableIndex, ch.RowID, ch.Op, version, scopes, ch.Row)
	}
	return frame.End(dst)
}

func TestCommitFrameEqualsAppendFrame(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		commit := drawCommit(t)
		want, err := ssp2.AppendFrame([]byte("before"), ssp2.WireV2, commit)
		require.NoError(t, err)
		got, err := appendCommit([]byte("before"), commit)
		require.NoError(t, err)
		require.Equal(t, want, got)
	})
}

func TestCommitFrameRefuses(t *testing.T) {
	t.Parallel()

	row := []byte{}
	type change struct {
		table   uint16
		rowID   string
		op      ssp2.Op
		version int64
		scopes  []string
		row     []byte
	}
	for rule, ch := range map[string]change{
		"tableIndex out of range":        {1, "r", ssp2.OpUpsert, 1, nil, row},
		"op 0":                           {0, "r", 0, 1, nil, row},
		"op 3":                           {0, "r", 3, 1, nil, row},
		"upsert without row":             {0, "r", ssp2.OpUpsert, 1, nil, nil},
		"delete with row":                {0, "r", ssp2.OpDelete, 0, nil, row},
		"rowVersion above 2^53−1":        {0, "r", ssp2.OpUpsert, 1 << 53, nil, row},
		"rowId not UTF-8":                {0, "\xff", ssp2.OpUpsert, 1, nil, row},
		"scope without =":                {0, "r", ssp2.OpUpsert, 1, []string{"a"}, row},
		"scope not UTF-8":                {0, "r", ssp2.OpUpsert, 1, []string{"a=\xff"}, row},
		"scope variable twice":           {0, "r", ssp2.OpUpsert, 1, []string{"a=1", "a=2"}, row},
		"scope variables out of order":   {0, "r", ssp2.OpUpsert, 1, []string{"b=1", "a=2"}, row},
		"scope variables in UTF-8 order": {0, "r", ssp2.OpUpsert, 1, []string{"\uffee=1", "\U0001F9EA=2"}, row},
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			dst, frame := ssp2.BeginCommitFrame([]byte("kept"), 1, 2, "a", []string{"t"})
			dst = frame.AppendChange(dst, 0, "fine", ssp2.OpDelete, 1<<60, []string{"a=", "a-b=x=y"}, nil)
			dst = frame.AppendChange(dst, ch.table, ch.rowID, ch.op, ch.version, ch.scopes, ch.row)
			dst = frame.AppendChange(dst, 0, "fine", ssp2.OpDelete, 0, nil, nil)
			require.Equal(t, 1, frame.Changes())
			dst, err := frame.End(dst)
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err), "%v", err)
			require.Equal(t, "kept", string(dst))
		})
	}
	for rule, begin := range map[string]func() ([]byte, ssp2.CommitFrame){
		"commitSeq above 2^53−1": func() ([]byte, ssp2.CommitFrame) {
			return ssp2.BeginCommitFrame([]byte("kept"), 1<<53, 2, "a", nil)
		},
		"createdAtMs below −(2^53−1)": func() ([]byte, ssp2.CommitFrame) {
			return ssp2.BeginCommitFrame([]byte("kept"), 1, -1<<53, "a", nil)
		},
		"actorId not UTF-8": func() ([]byte, ssp2.CommitFrame) {
			return ssp2.BeginCommitFrame([]byte("kept"), 1, 2, "\xff", nil)
		},
		"table not UTF-8": func() ([]byte, ssp2.CommitFrame) {
			return ssp2.BeginCommitFrame([]byte("kept"), 1, 2, "a", []string{"\xff"})
		},
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			dst, frame := begin()
			dst = frame.AppendChange(dst, 0, "r", ssp2.OpDelete, 0, nil, nil)
			dst, err := frame.End(dst)
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err), "%v", err)
			require.Equal(t, "kept", string(dst))
		})
	}
}

//nolint:paralleltest // counts what the process allocates
func TestCommitFrameDoesNotAllocate(t *testing.T) {
	tables, scopes, row := []string{"notes"}, []string{"project=p1", "team=t1"}, make([]byte, 100)
	buf := make([]byte, 0, 1<<20)
	var err error
	require.Zero(t, testing.AllocsPerRun(20, func() {
		dst, frame := ssp2.BeginCommitFrame(buf, 1, 2, "a", tables)
		for range 100 {
			dst = frame.AppendChange(dst, 0, "row", ssp2.OpUpsert, 3, scopes, row)
		}
		_, err = frame.End(dst)
	}))
	require.NoError(t, err)
}
