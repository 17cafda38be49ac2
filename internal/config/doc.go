// Package config gives the flags of the command their values: from the command line, else from the environment, else
// from one YAML file, else from the flag's default.
//
// A flag with the tag `setting:""` can be set in all three places; the others are for the command line only. The flag
// --listen-on is the variable SYNCPG_LISTEN_ON and the key listen-on of the file. A tag with a value,
// `setting:"DATABASE_URL"`, names further variables, asked after the first. An empty variable counts as not set.
//
// What nobody reads is an error, so that a misspelt key cannot pass for a default: unknown keys of the file, and unknown
// variables that begin with SYNCPG_.
//
// The package also opens connection strings ([Database]), because which source one came from matters there, and because
// a connection string must not show up in an error.
package config
