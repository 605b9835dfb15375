package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/kasmina-go/kasmina/comm"
)

// A Teller writes messages for the user to a terminal or a pipe and never fails. If the terminal was
// closed or nothing reads from the pipe any longer, the messages are lost and the run continues until
// it has saved its checkpoint.
type Teller struct{ *os.File }

// Write writes as much of b as possible and reports that it wrote everything.
func (t Teller) Write(b []byte) (int, error) {
	t.File.Write(b)
	return len(b), nil
}

// WriteString is like Write.
func (t Teller) WriteString(s string) (int, error) { return t.Write([]byte(s)) }

// An Interruption is the cause of a context canceled by a signal. It wraps context.Canceled.
type Interruption struct{ Signal os.Signal }

func (i Interruption) Error() string { return fmt.Sprintf("signal %v", i.Signal) }

// Unwrap returns context.Canceled.
func (i Interruption) Unwrap() error { return context.Canceled }

// ExitCode returns the exit code for a program's error. If the user interrupted the program, it is
// 128 plus the signal number, as in shells; otherwise it is the result of [comm.ExitCode].
func ExitCode(err error) int {
	code := comm.ExitCode(err)
	var i Interruption
	if code != comm.ExitPeer && errors.As(err, &i) {
		if number, ok := i.Signal.(syscall.Signal); ok {
			return 128 + int(number)
		}
	}
	return code
}

// UntilInterrupt returns a context that is canceled when the user interrupts the program or closes
// its terminal, so that a run can save. Its cause is an [Interruption], which UntilInterrupt
// announces by writing a line to w. A second interrupt terminates the program at once.
//
// The context is also canceled when the program writes to standard output or standard error after the
// reader of the pipe has exited, as after Ctrl-C in "program | tee". A network connection that breaks
// has no effect, although the system raises the same signal, SIGPIPE.
func UntilInterrupt(w io.Writer) context.Context {
	ending := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // as under nohup
		ending = append(ending, syscall.SIGHUP)
	}

	ctx, cancel := context.WithCancelCause(context.Background())
	signals, outputs := make(chan os.Signal, 1), []*os.File{os.Stdout, os.Stderr}
	signal.Notify(signals, append(ending, syscall.SIGPIPE)...)
	go func() {
		for {
			s := <-signals
			if s == syscall.SIGPIPE && !slices.ContainsFunc(outputs, brokenPipe) {
				continue
			}

			// A closing terminal sends SIGHUP twice, through its shell and when the shell exits. Every
			// line written to a broken pipe raises SIGPIPE.
			signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
			signal.Stop(signals) // the next interrupt has its default effect
			fmt.Fprintln(w,
				"\nstopping  as soon as everything is saved; press Ctrl-C again to quit at once")
			cancel(Interruption{s})
			return
		}
	}()

	return ctx
}
