package httpsync

// Negotiate is negotiate, for tests.
func Negotiate(lines []string) string { return string(negotiate(lines)) }
