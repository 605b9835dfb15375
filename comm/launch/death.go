package launch

import (
	"fmt"
	"os"
	"strings"
	"syscall"

	"github.com/kasmina-go/kasmina/comm"
)

// Error says that a run did not end well.
type Error struct {
	// Deaths are the processes that did not end well, the one that is to blame first.
	Deaths []Death
	// Well is the number of processes that did.
	Well int
	// Cause is what ended the run from outside: the context's cause, or a second signal.
	Cause error
}

// Death is the end of a process.
type Death struct {
	Rank, PID int
	// Code is the exit code, or −1 where a signal ended the process.
	Code   int
	Signal os.Signal
	// Asked says that it ended after it was asked to.
	Asked bool
	// Last is what it wrote last to standard error.
	Last []string

	ended bool
}

// guilt orders deaths by how likely they are the first cause. Which process is seen to end first is
// no measure: those that miss another may end while the system still clears away that one.
func (d Death) guilt() int {
	switch {
	case d.Signal != nil && !d.Asked:
		return 0 // from elsewhere
	case d.Signal == nil && d.Code != comm.ExitPeer && !d.Asked:
		return 1
	case d.Signal == nil && d.Code != comm.ExitPeer:
		return 2
	case d.Signal == nil:
		return 3 // another rank failed, it says
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

// Unwrap is the cause from outside.
func (e *Error) Unwrap() error { return e.Cause }
