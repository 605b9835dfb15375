package launch

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

// A Teller writes for a person. The terminal, or the program behind a pipe, may be gone: that is no
// error, or it would end a run before its checkpoint.
type Teller struct{ *os.File }

// Write writes what can be written.
func (t Teller) Write(b []byte) (int, error) {
	t.File.Write(b)
	return len(b), nil
}

// WriteString is Write.
func (t Teller) WriteString(s string) (int, error) { return t.Write([]byte(s)) }

// UntilInterrupt returns a context that ends when the user interrupts the program or closes its
// terminal: the first Ctrl-C lets a run save. It also ends when a pipe that the program writes to
// has no reader any more: Ctrl-C ends the tee behind it too. What happens now is said on w. A second
// interrupt ends the program at once.
func UntilInterrupt(w io.Writer) context.Context {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGPIPE}
	if !signal.Ignored(syscall.SIGHUP) { // as nohup has it
		signals = append(signals, syscall.SIGHUP)
	}
	ctx, stop := signal.NotifyContext(context.Background(), signals...)
	context.AfterFunc(ctx, func() {
		// A terminal that closes sends SIGHUP twice, through its shell and when that ends. Each
		// line to a pipe without a reader is a SIGPIPE.
		signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
		stop() // the next interrupt does what it does to other programs
		fmt.Fprintln(w,
			"\nstopping  a run after its step, with a checkpoint; Ctrl-C again ends at once")
	})
	return ctx
}
