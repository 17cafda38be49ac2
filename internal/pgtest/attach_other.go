//go:build !unix

package pgtest

import (
	"context"
	"errors"
	"os"
)

func attach(context.Context) (string, *os.File, error) {
	return "", nil, errors.New("on this platform set " + EnvDatabaseURL + " to a server for tests")
}
