package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
)

// TestUntilInterrupt checks that the first interrupt cancels the context and announces what happens next.
func TestUntilInterrupt(t *testing.T) {
	r, w := io.Pipe()
	ctx := UntilInterrupt(w)
	self, err := os.FindProcess(os.Getpid())
	require.NoError(t, err)
	if err := self.Signal(os.Interrupt); err != nil {
		t.Skip("this system does not let a process interrupt itself:", err)
	}

	told := make([]byte, 100)
	n, err := r.Read(told)
	require.NoError(t, err)
	require.Contains(t, string(told[:n]), "stopping")
	<-ctx.Done()
	require.ErrorIs(t, ctx.Err(), context.Canceled)
	cause := context.Cause(ctx)
	require.ErrorIs(t, cause, context.Canceled)
	require.Equal(t, 130, ExitCode(fmt.Errorf("generate: %w", cause)))
	require.Equal(t, comm.ExitPeer, ExitCode(errors.Join(cause, comm.ErrPeer)))
	require.Equal(t, 1, ExitCode(context.Canceled))
	require.Equal(t, 0, ExitCode(nil))
	// Closing the terminal as well must not terminate the program.
	defer signal.Reset(syscall.SIGHUP, syscall.SIGPIPE)
	require.NoError(t, self.Signal(syscall.SIGHUP))
	require.True(t, signal.Ignored(syscall.SIGHUP) && signal.Ignored(syscall.SIGPIPE),
		"after the first signal SIGHUP or SIGPIPE still ends the program")
}

// TestTellerWithoutReader checks that a Teller continues if its pipe no longer has a reader.
func TestTellerWithoutReader(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer w.Close()
	r.Close()
	_, err = w.WriteString("x")
	require.Error(t, err, "the pipe takes text without a reader")
	for range 2 {
		n, err := io.WriteString(Teller{w}, "text")
		require.NoError(t, err)
		require.Equal(t, 4, n)
		n, err = fmt.Fprint(Teller{w}, "text")
		require.NoError(t, err)
		require.Equal(t, 4, n)
	}
}
