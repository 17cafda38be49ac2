//go:build !unix

package pgtest

import (
	"context"
	"errors"
)

func attach(context.Context) (string, error) {
	return "", errors.New("on this platform set " + EnvDatabaseURL + " to a server for tests")
}
