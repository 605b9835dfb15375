package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
)

// TestUntilInterrupt wants the first interrupt to end the context and to say what happens now.
func TestUntilInterrupt(t *testing.T) {
	r, w := io.Pipe()
	ctx := UntilInterrupt(w)
	self, err := os.FindProcess(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if err := self.Signal(os.Interrupt); err != nil {
		t.Skip("this system does not let a process interrupt itself:", err)
	}
	told := make([]byte, 100)
	if n, err := r.Read(told); err != nil || !strings.Contains(string(told[:n]), "stopping") {
		t.Errorf("it says %q, %v", told[:n], err)
	}
	if !errors.Is(ctx.Err(), context.Canceled) {
		t.Errorf("the context's error is %v", ctx.Err())
	}
	// The terminal closes, too, which must not end the program.
	defer signal.Reset(syscall.SIGHUP, syscall.SIGPIPE)
	if err := self.Signal(syscall.SIGHUP); err != nil || !signal.Ignored(syscall.SIGHUP) ||
		!signal.Ignored(syscall.SIGPIPE) {
		t.Errorf("after the first signal SIGHUP or SIGPIPE still ends the program; error %v", err)
	}
}

// TestNobodyReads wants a Teller whose pipe has no reader any more to go on.
func TestNobodyReads(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	r.Close()
	if _, err := w.WriteString("x"); err == nil {
		t.Fatal("the pipe takes text without a reader")
	}
	for range 2 {
		if n, err := io.WriteString(Teller{w}, "text"); n != 4 || err != nil {
			t.Errorf("%d bytes, %v", n, err)
		}
		if n, err := fmt.Fprint(Teller{w}, "text"); n != 4 || err != nil {
			t.Errorf("%d bytes, %v", n, err)
		}
	}
}
