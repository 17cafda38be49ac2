package pushsvc

import (
	"errors"

	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/ssp2"
)

// SQLSTATEs raised by the functions of migration 003.
const (
	sqlStateWriterFence = "SY001"
	sqlStateLogMoved    = "SY002"
	sqlStateClientBound = "SY003"
)

// sqlStateUnique is a violated unique index.
const sqlStateUnique = "23505"

// errRowFailed says that the database failed over what one of the requests writes, a
// host's trigger for example: the others may be fine without it.
var errRowFailed = errors.New("a write failed")

// errOversized says that admission would have had to read too much at once: the
// requests, or the commits of one, need transactions of their own.
var errOversized = errors.New("the push names too much data")

// errOutcomeStands says that an outcome was recorded that admission did not find,
// although the partition lock was held. The next attempt finds it.
var errOutcomeStands = errors.New("another outcome of the commit stands")

// impossibleRow says that the same row would meet this database error on every
// retry: a constraint (class 23), a value the database cannot hold (class 22), or
// one too large or too deep for it (class 54). Such a commit is rejected; it would
// otherwise be pushed for ever.
func impossibleRow(err error) bool {
	state := pgtx.SQLState(err)
	if len(state) != 5 {
		return false
	}
	switch state[:2] {
	case "22", "23", "54":
		return true
	}
	return false
}

// internal says what failed over the server's own data. The code of a codec's error
// would blame the client.
func internal(what string, err error) error { return errors.New(what + ": " + err.Error()) }

// requestError turns the database error that concerns requests as a whole into a
// protocol error; others stay what they are.
func requestError(err error) error {
	if pgtx.SQLState(err) != sqlStateWriterFence {
		return err
	}
	return &ssp2.Error{
		Code:    ssp2.CodeStorageWriterFenceRejected,
		Message: "this server runs an older schema version than the partition requires", Err: err,
	}
}
