package gate

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/syncpg/syncpg/ssp2"
)

// MaxIDBytes bounds partitions and client and commit ids, which are parts of index
// keys.
const MaxIDBytes = 512

// reservedClientPrefix marks clients of server commands (§1.5).
const reservedClientPrefix = `["remote-command",`

// CheckClientID checks the form of a client id (§1.5). The error is
// sync.invalid_client_id.
func CheckClientID(id string) error {
	switch {
	case strings.HasPrefix(id, reservedClientPrefix):
		return ssp2.Errorf(ssp2.CodeInvalidClientID, "this client id is reserved for server commands")
	case !StorableID(id):
		return ssp2.Errorf(ssp2.CodeInvalidClientID, "a client id has 1 to %d bytes and no U+0000", MaxIDBytes)
	}
	return nil
}

// CheckIdentity checks what the host says of a request: its partition and actor. An
// error is a fault of the host, not of the client.
func CheckIdentity(partition, actor string) error {
	for _, s := range []string{actor, partition} {
		if s == "" || strings.ContainsRune(s, 0) || !utf8.ValidString(s) {
			return fmt.Errorf("the actor %.64q in partition %.64q is not usable: both are UTF-8, not empty and without U+0000", actor, partition)
		}
	}
	if n := len(partition); n > MaxIDBytes {
		return fmt.Errorf("the name of a partition has %d bytes, at most %d are possible", n, MaxIDBytes)
	}
	return nil
}

// StorableID says whether a client or commit id can be part of a key.
func StorableID(id string) bool {
	return id != "" && len(id) <= MaxIDBytes && strings.IndexByte(id, 0) < 0
}
