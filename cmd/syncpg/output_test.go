package main

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestTableColumnsLineUp(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	require.NoError(t, table(&b, "  ", [][]string{{"A", "B", "C"}, {"long cell ✓", "x", ""}, {"", "y", "z"}}))
	require.Equal(t, "  A            B  C\n  long cell ✓  x\n               y  z\n", b.String())
}

func TestDurationsHaveAboutThreeDigits(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		0: "0.0 ms", 1234 * time.Microsecond: "1.2 ms", 9999 * time.Microsecond: "10.0 ms", 12 * time.Millisecond: "12 ms",
		999 * time.Millisecond: "999 ms", 1234 * time.Millisecond: "1.2 s", 61 * time.Second: "61.0 s",
	} {
		require.Equal(t, want, duration(d))
	}
}
