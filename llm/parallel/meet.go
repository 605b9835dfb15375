package parallel

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kasmina-go/kasmina/comm"
)

// Deadline is the default time after which a silent rank, or a run without progress, fails. Work
// declared with [Team.Busy] may take longer.
const Deadline = 5 * time.Minute

// Meet meets the other processes of a run, as the environment says (comm.FromEnvironment, getenv
// being os.Getenv). The world is nil where this process is alone. All must have the same program
// and the same facts, and a step of so many batches must leave something to do for each. One that
// is silent for longer than the deadline ends the run of all; 0 stands for [Deadline].
func Meet(ctx context.Context, getenv func(string) string, batches int, deadline time.Duration,
	facts ...comm.Fact) (*comm.World, error) {
	return MeetWith(ctx, getenv, batches, comm.Options{Deadline: deadline, Facts: facts})
}

// MeetWith is [Meet] with all options that [comm.Join] takes.
func MeetWith(ctx context.Context, getenv func(string) string, batches int, o comm.Options) (*comm.World,
	error) {
	place, err := comm.FromEnvironment(getenv)
	if err != nil || place.Size == 1 {
		return nil, err
	}
	if batches < place.Size {
		return nil, fmt.Errorf("parallel: a step of %d batches leaves nothing to do for some of "+
			"%d processes: give --accumulate %d, or a multiple of it", batches,
			place.Size, place.Size)
	}
	if o.Deadline < 0 {
		return nil, fmt.Errorf("parallel: a deadline of %v: want some time, such as %v", o.Deadline,
			Deadline)
	}
	binary, err := comm.Binary()
	if err != nil {
		return nil, err
	}
	o.Deadline = cmp.Or(o.Deadline, Deadline)
	o.Facts = append([]comm.Fact{binary}, o.Facts...)
	return comm.Join(ctx, place, o)
}

// First reports whether this process writes files and tells the user: the only one, whose team is
// nil, or rank 0.
func (t *Team) First() bool { return t == nil || t.Rank() == 0 }

// InTurn calls f at rank 0 first, and then at the others, which find what it has left on the disk.
// Where f fails at rank 0 it is not called elsewhere. Without a team it calls f.
func (t *Team) InTurn(f func() error) error {
	if f == nil {
		return errors.New("parallel: InTurn: the function is nil")
	}
	if t == nil {
		return f()
	}
	var err error
	if t.First() {
		err = f()
	}
	if err := t.Agree(err); err != nil || t.First() {
		return err
	}
	return f()
}
