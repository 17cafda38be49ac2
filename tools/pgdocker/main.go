// Command pgdocker runs a PostgreSQL server for tests in a container and prints its URL on one line. It removes the
// container when its standard input is closed. The tests of the main module run it where the machine has no server
// binaries; it is in this module so that the main one does not depend on Docker's libraries.
package main

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver of the readiness check
	"github.com/ory/dockertest/v3"
	"github.com/ory/dockertest/v3/docker"
)

const (
	image        = "postgres"
	tag          = "17-alpine"
	password     = "test" // the port is bound to the loopback interface
	readyTimeout = 2 * time.Minute
	// maxAge bounds the life of a container whose owner was killed together with this command, in seconds.
	maxAge = 3600
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "pgdocker:", err)
		os.Exit(1)
	}
}

func run() (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	pool, err := dockertest.NewPool("")
	if err != nil {
		return fmt.Errorf("find Docker: %w", err)
	}
	if err := pool.Client.Ping(); err != nil {
		return fmt.Errorf("reach Docker: %w", err)
	}
	container, err := pool.RunWithOptions(&dockertest.RunOptions{
		Repository:   image,
		Tag:          tag,
		Env:          []string{"POSTGRES_PASSWORD=" + password},
		Cmd:          []string{"postgres", "-c", "fsync=off", "-c", "full_page_writes=off", "-c", "autovacuum=off", "-c", "max_connections=200"},
		PortBindings: map[docker.Port][]docker.PortBinding{"5432/tcp": {{HostIP: "127.0.0.1", HostPort: "0"}}},
	}, func(hc *docker.HostConfig) { hc.AutoRemove = true })
	if err != nil {
		return fmt.Errorf("start a container of %s:%s: %w", image, tag, err)
	}
	defer func() {
		if purgeErr := pool.Purge(container); err == nil && purgeErr != nil {
			err = fmt.Errorf("remove the container: %w", purgeErr)
		}
	}()
	if err := container.Expire(maxAge); err != nil {
		return fmt.Errorf("bound the life of the container: %w", err)
	}

	dsn := fmt.Sprintf("postgres://postgres:%s@%s/postgres?sslmode=disable", password, container.GetHostPort("5432/tcp"))
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		return fmt.Errorf("read the URL of the server: %w", err)
	}
	pool.MaxWait = readyTimeout
	if err := pool.Retry(func() error { return db.PingContext(ctx) }); err != nil {
		return fmt.Errorf("wait for the server: %w", err)
	}
	if err := db.Close(); err != nil {
		return fmt.Errorf("close the connection of the readiness check: %w", err)
	}
	fmt.Println(dsn)

	closed := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, os.Stdin)
		closed <- err
	}()
	select {
	case err := <-closed:
		return err
	case <-ctx.Done():
		return nil
	}
}
