package realtime_test

import (
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"testing"

	"go.uber.org/goleak"
)

// crowdVariable makes the test binary a process that connects to the address in it, see
// crowdElsewhere.
const crowdVariable = "SYNCPG_TEST_CROWD"

func TestMain(m *testing.M) {
	if address := os.Getenv(crowdVariable); address != "" {
		n, err := strconv.Atoi(os.Getenv(crowdVariable + "_SIZE"))
		if err == nil {
			err = beCrowd(address, n)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// beCrowd connects clients, says so on stdout, and throws away what they get until stdin
// ends.
func beCrowd(address string, n int) error {
	for i := range n {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			err = upgradeBare(conn, fmt.Sprintf("c%d", i))
		}
		if err != nil {
			return fmt.Errorf("connection %d: %w", i, err)
		}
		go func() { _, _ = io.Copy(io.Discard, conn) }()
	}
	if _, err := fmt.Println("connected"); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}
