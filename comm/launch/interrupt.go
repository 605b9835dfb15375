package launch

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
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

// UntilInterrupt returns a context that is canceled when the user interrupts the program or closes
// its terminal, so that a run can save. It writes a line to w that says so. A second interrupt ends
// the program at once.
//
// The context is also canceled when the program writes to standard output or standard error and
// nothing reads from that pipe any more, as after Ctrl-C in "program | tee". A network connection
// that breaks has no effect, although the system raises the same signal, SIGPIPE.
func UntilInterrupt(w io.Writer) context.Context {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // as under nohup
		signals = append(signals, syscall.SIGHUP)
	}
	ctx, stop := signal.NotifyContext(context.Background(), signals...)
	ctx, cancel := context.WithCancel(ctx)
	pipes, outputs := make(chan os.Signal, 1), []*os.File{os.Stdout, os.Stderr}
	signal.Notify(pipes, syscall.SIGPIPE)
	go func() {
		defer cancel()
		for {
			select {
			case <-ctx.Done():
				return
			case <-pipes:
				if slices.ContainsFunc(outputs, brokenPipe) {
					return
				}
			}
		}
	}()

	context.AfterFunc(ctx, func() {
		// A closing terminal sends SIGHUP twice, through its shell and when the shell exits. Every
		// line written to a broken pipe raises SIGPIPE.
		signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
		signal.Stop(pipes)
		stop() // the next interrupt has its default effect
		fmt.Fprintln(w,
			"\nstopping  as soon as everything is saved; press Ctrl-C again to quit at once")
	})
	return ctx
}
