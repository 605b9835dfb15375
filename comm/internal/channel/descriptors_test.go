//go:build unix

package channel

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// fewVariable makes the test binary run acceptWithFew.
const fewVariable = "KASMINA_CHANNEL_FEW"

func TestMain(m *testing.M) {
	if os.Getenv(fewVariable) != "" {
		if err := acceptWithFew(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// TestNoDescriptors checks that a listener recovers after strangers have exhausted the process's file
// descriptors.
func TestNoDescriptors(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	c := exec.CommandContext(t.Context(), self)
	c.Env = append(os.Environ(), fewVariable+"=1")
	out, err := c.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

func acceptWithFew() error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}

	id, err := New(secret)
	if err != nil {
		return err
	}

	l, err := id.Listen("127.0.0.1:0")
	if err != nil {
		return err
	}

	conns := accept(l)

	// The strangers' ends of the connections count too, since they are in the same process.
	limit.Cur = 60
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}

	var strangers []net.Conn
	for range 100 {
		conn, err := net.DialTimeout("tcp", l.Addrs()[0].String(), patience)
		if err != nil {
			break
		}
		strangers = append(strangers, conn)
	}

	if len(strangers) < 10 || len(strangers) == 100 {
		return fmt.Errorf("%d connections did not exhaust the file descriptors",
			len(strangers))
	}

	time.Sleep(200 * time.Millisecond) // let Accept fail
	for _, conn := range strangers {
		conn.Close()
	}

	// Connections from the attack may still be queued in the kernel.
	deadline := time.Now().Add(patience)
	for {
		var conn net.Conn
		if conn, err = id.Dial(context.Background(), l.Addrs()[0].String()); err == nil {
			defer conn.Close()
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the listener no longer accepts connections: %w", err)
		}
		time.Sleep(10 * time.Millisecond)
	}

	select {
	case <-conns:
		return nil
	case <-time.After(patience):
		return fmt.Errorf("the listener did not accept the rank")
	}
}
