package parallel

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/kasmina-go/kasmina/comm"
)

// Deadline is the default time after which a silent rank, or a run without progress, fails. Work
// declared with [Team.Busy] may take longer.
const Deadline = 5 * time.Minute

// Meet connects to the other processes of a run according to the environment (see comm.FromEnvironment).
// Pass os.Getenv as getenv. If this process is the only one, the world is nil.
//
// All processes must run the same program with the same facts, and a step must have at least one batch per
// process. If a process is silent for longer than the deadline, the run fails; 0 means [Deadline].
func Meet(ctx context.Context, getenv func(string) string, batches int, deadline time.Duration,
	facts ...comm.Fact) (*comm.World, error) {
	return MeetWith(ctx, getenv, batches, comm.Options{Deadline: deadline, Facts: facts})
}

// MeetWith is like [Meet] with all options of [comm.Join].
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
		return nil, fmt.Errorf("parallel: a deadline of %v: want a positive duration, such as %v", o.Deadline,
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

// First reports whether this process is responsible for files and messages, which is the case if it
// is rank 0 or the team is nil.
func (t *Team) First() bool { return t == nil || t.Rank() == 0 }

// InTurn calls f on rank 0 first and then on all other ranks, which can use the files written by rank
// 0. If f fails on rank 0, it is not called on other ranks. Without a team, InTurn just calls f.
func (t *Team) InTurn(f func() error) error {
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
