package cudaops

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/profile"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/optime"
)

// OpTime is what the nodes of one op took in a run.
type OpTime = optime.OpTime

// Table is the times of ops for people: a line each, with their shares of the whole.
func Table(times []OpTime) string { return optime.Table(times) }

// Profile is where the time of one step went: see [Machine.StartProfile].
type Profile = optime.Profile

// ProfileSteps is how many steps a profile takes.
const ProfileSteps = profile.Steps

// StartProfile makes the machine profile the [ProfileSteps] steps that follow, of which the last
// ones run with a time stamp after every kernel; all compute the same bits as ever. A step ends
// with [Machine.Update], in a machine without an optimiser with [Machine.RunAll]. The machine must
// have run before. Then [Machine.Profile] has the profile.
func (m *Machine) StartProfile() (err error) {
	defer in("StartProfile", &err)
	if err := m.runner.State.Open(); err != nil {
		return err
	}
	if !m.runner.State.Ran() {
		return errors.New("the machine has not run: profile it after a few steps")
	}
	if err := run.Joined(m.profiler.Close(), m.device.ctx.SyncStream(m.runner.Stream)); err != nil {
		return err
	}
	m.profiler = profile.NewProfiler(m.measured)
	return nil
}

// Profile returns the profile that [Machine.StartProfile] has begun, nil while steps are lacking.
// It measures the card's ceilings, which takes a fraction of a second and up to a GiB of memory
// that is free.
func (m *Machine) Profile() (_ *Profile, err error) {
	defer in("Profile", &err)
	switch p := m.profiler; {
	case m.runner.State.Closed():
		return nil, run.ErrClosed
	case p == nil:
		return nil, errors.New("no profile was begun with StartProfile")
	case !p.Done():
		return nil, nil
	}
	p := m.profiler
	m.profiler = nil
	return p.Result()
}

// WithMonitor makes the machine time its ops while it runs: one run in every so many is replayed
// with a time stamp between one call and the next, and computes the same bits; in it the passes of
// Kasmina layers that measure also run without telemetry, and end each by itself, for what the
// lattices' reports say of the layer. Where all this would take more than 0.4 % of the time, fewer
// runs have it. [Machine.Monitor] returns the times. An op that takes much longer than when it was
// tuned is logged as a warning.
func WithMonitor(every int) MachineOption {
	return func(c *machineConfig) error {
		if every < 2 {
			return fmt.Errorf("WithMonitor: every %d runs, want at least 2", every)
		}
		c.monitor = every
		return nil
	}
}

// Monitor returns what the ops of a run have taken so far on average, the longest first, with the
// ways in which they are computed, and under the name Update what the optimiser took. It is empty
// before the first sample, and without [WithMonitor].
func (m *Machine) Monitor() (_ []OpTime, err error) {
	defer in("Monitor", &err)
	if err := m.runner.State.Open(); err != nil || m.monitor == nil {
		return nil, err
	}
	return m.monitor.Times(m.optimizer.Bytes())
}
