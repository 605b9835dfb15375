package launch

import (
	"fmt"
	"os"
	"strings"
	"syscall"

	"github.com/kasmina-go/kasmina/comm"
)

// Error reports that a run did not succeed.
type Error struct {
	// Deaths lists the processes that failed, starting with the one to blame.
	Deaths []Death
	// Well is the number of successful processes.
	Well int
	// Cause is the external reason for terminating the run, if any: the context's cause, or a second
	// signal.
	Cause error
}

// Death describes how a process failed.
type Death struct {
	Rank, PID int
	// Code is the exit code, or −1 if a signal terminated the process.
	Code   int
	Signal os.Signal
	// Asked reports whether the process exited because the launcher asked it to.
	Asked bool
	// Last holds the last lines that the process wrote to standard error.
	Last []string

	ended bool
}

// guilt orders deaths by how likely they are to be the original failure. The order of the exits is no
// indication, because processes that lose their connection to another one may exit while the system
// is still cleaning up after it.
func (d Death) guilt() int {
	switch {
	case d.Signal != nil && !d.Asked:
		return 0 // killed from outside
	case d.Signal == nil && d.Code != comm.ExitPeer && !d.Asked:
		return 1
	case d.Signal == nil && d.Code != comm.ExitPeer:
		return 2
	case d.Signal == nil:
		return 3 // according to the process, another rank failed
	}

	return 4
}

func (d Death) String() string {
	s := fmt.Sprintf("rank %d (process %d) ended with exit code %d", d.Rank, d.PID, d.Code)
	if d.Signal != nil {
		s = fmt.Sprintf("rank %d (process %d) was killed by a signal: %v", d.Rank, d.PID, d.Signal)
	}
	if d.Signal == syscall.SIGKILL && !d.Asked {
		s += " (by a person, or by the kernel because memory ran out: see the kernel's log)"
	}
	return s
}

func (e *Error) Error() string {
	var b strings.Builder
	if e.Cause != nil {
		fmt.Fprintf(&b, "launch: the run was ended: %v", e.Cause)
	}

	if len(e.Deaths) == 0 || e.Deaths[0].Asked && e.Cause != nil {
		return b.String()
	}

	if e.Cause != nil {
		b.WriteString("\n")
	}

	first := e.Deaths[0]
	fmt.Fprintf(&b, "launch: %v", first)
	switch n := len(e.Deaths) - 1; {
	case n == 1:
		b.WriteString("; another rank stopped after it")
	case n > 1:
		fmt.Fprintf(&b, "; %d other ranks stopped after it", n)
	}

	if len(first.Last) > 0 {
		fmt.Fprintf(&b, ". Its last lines:\n  %s", strings.Join(first.Last, "\n  "))
	}

	return b.String()
}

// Unwrap returns the external cause.
func (e *Error) Unwrap() error { return e.Cause }
