package config

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// ErrNoDatabase reports that no source names a database.
var ErrNoDatabase = errors.New("no database given: use --database-url, DATABASE_URL or the PG* variables (PGHOST, PGDATABASE, …)")

// serverVariables are the variables of libpq that say where a database is. The others (PGUSER, PGPASSWORD, PGSSLMODE, …)
// only complete a connection string.
var serverVariables = []string{"PGHOST", "PGPORT", "PGDATABASE", "PGSERVICE"}

// Database turns the value of a database flag into the configuration of a pool. What the connection string leaves out
// comes from the PG* variables of the process, as in libpq.
//
// The PG* variables rank above the configuration file like every variable: when one of them says where the database is,
// a connection string from the file is not used at all, rather than mixed with them. Errors never show any part of the
// connection string.
func (s *Settings) Database(flag, url string) (*pgxpool.Config, error) {
	byEnv := false
	for _, name := range serverVariables {
		byEnv = byEnv || s.env[name] != ""
	}
	switch {
	case byEnv && s.origin[flag].file:
		url = ""
	case url == "" && !byEnv:
		return nil, ErrNoDatabase
	}
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, maskedParseError(err)
	}
	return cfg, checkHost(cfg.ConnConfig)
}

// Connection reads a connection string, and shows no part of it in errors.
func Connection(text string) (*pgx.ConnConfig, error) {
	cfg, err := pgx.ParseConfig(text)
	if err != nil {
		return nil, maskedParseError(err)
	}
	return cfg, checkHost(cfg)
}

// checkHost refuses what is left of a password with an @ in it.
func checkHost(cfg *pgx.ConnConfig) error {
	if strings.HasPrefix(cfg.Host, "/") || strings.Index(cfg.Host, "@") < 1 {
		return nil
	}
	return errors.New("the connection string of the database cannot be used: the name of the host has an @ in it, " +
		"so it may hold a part of the password (write an @ of the password as %40)")
}

// maskedParseError keeps what is wrong with a connection string and drops the string. The driver masks passwords too, but
// has to guess where they are in a string that it could not parse.
func maskedParseError(err error) error {
	var parse *pgconn.ParseConfigError
	if !errors.As(err, &parse) {
		return errors.New("the connection string of the database cannot be used")
	}
	text := parse.Error()
	if cause := parse.Unwrap(); cause != nil {
		text = strings.TrimSuffix(text, " ("+cause.Error()+")")
	}
	reason := text[strings.LastIndex(text, "`: ")+len("`: "):]
	return fmt.Errorf("the connection string of the database cannot be used: %s "+
		"(the form is postgres://user:password@host:port/database; percent-encode special characters)", reason)
}

// Target names the database of a configuration for messages and logs: database, server and user, and no secret.
func Target(cfg *pgconn.Config) string {
	where := cfg.Host
	if !strings.HasPrefix(where, "/") {
		where = net.JoinHostPort(cfg.Host, strconv.Itoa(int(cfg.Port)))
	}
	database := cfg.Database
	if database == "" {
		database = cfg.User // what the server falls back to
	}
	return fmt.Sprintf("database %q on %s as user %q", database, where, cfg.User)
}
