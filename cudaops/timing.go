package cudaops

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/choose"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/profile"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/variantrule"
	"github.com/kasmina-go/kasmina/optime"
)

// Tuning selects how a machine finds the fastest of several variants of a computation. For a matrix
// product, cuBLASLt offers the variants; for attention or a norm, they are different kernels. Variants
// may add in a different order, so the results of two machines are bit-identical only if they use the same variants.
type Tuning = choose.Mode

// The modes of tuning. Timings are stored in the file kasmina/tune.json of the user's cache directory,
// separately for each GPU, driver, build of the kernels, version of cuBLASLt, op, shape and types.
const (
	TuneDefault = choose.Default // TuneOff with the precision Float32, otherwise TuneCached
	// time nothing: use cuBLASLt's first proposal, or a rule of thumb
	TuneOff    = choose.Off
	TuneCached = choose.Cached // use stored choices; time and store missing ones once
	TuneFull   = choose.Full   // time everything again and replace the stored choices
)

// WithTuning sets the mode of tuning. The environment variable KASMINA_TUNE (off, cached or full) takes
// precedence.
//
// Timing happens in NewMachine and [Machine.SetOptimizer]. It takes about a second for a small model, and
// ten to fifteen seconds for a model that fills the GPU.
func WithTuning(t Tuning) MachineOption {
	return func(c *machineConfig) error {
		if t > TuneFull {
			return fmt.Errorf("WithTuning: got %d, want TuneDefault, TuneOff, TuneCached or "+
				"TuneFull", t)
		}
		c.variants.Mode = t
		return nil
	}
}

// WithVariants forces or forbids variants of ops, regardless of the tuning mode. A rule has the form
// OP=VARIANT or OP!=VARIANT, with names as in [Machine.Choices] and the wildcards of [path.Match]:
//
//	cudaops.WithVariants("Attention*=mma", "RMSNorm*!=rows-*")
//
// The variant host computes one of Gorgonia's ops on the CPU. A variant that does not support a shape is
// not forced on it. The environment variable KASMINA_VARIANTS, a comma-separated list of rules, adds to
// these rules and takes precedence.
func WithVariants(rules ...string) MachineOption {
	return func(c *machineConfig) error {
		parsed, err := variantrule.Parse(rules)
		if err != nil {
			return fmt.Errorf("WithVariants: %w", err)
		}
		c.variants.Rules = append(c.variants.Rules, parsed...)
		return nil
	}
}

// WithChoices makes the machine use the choices of another machine with the same graph
// ([Machine.Choices]) instead of tuning, so that their results are bit-identical. Anything that
// the other machine has not chosen is chosen by rule. Only Op, Shape and Variant of a choice matter. NewMachine
// returns an error if the GPU does not have one of the variants.
func WithChoices(choices []optime.Choice) MachineOption {
	return setting(func(c *machineConfig) { c.variants.Given = append([]optime.Choice{}, choices...) })
}

// Choices returns the choices that the machine has made so far, in order. The Source of a choice is rule,
// stored, timed or forced.
func (m *Machine) Choices() []optime.Choice {
	return m.chooser.Choices()
}

// setVariants completes the configuration of the chooser.
func setVariants(d *Device, c *machineConfig) error {
	c.variants.Device, c.variants.Version, c.variants.Warn = d.info, d.version, c.Warn
	if c.Activation == gpu.Float32 {
		return c.variants.Complete(choose.Off)
	}
	return c.variants.Complete(choose.Cached)
}

// ProfileSteps is the number of steps that a profile takes.
const ProfileSteps = profile.Steps

// StartProfile makes the machine profile the next [ProfileSteps] steps. The last of these run with a time
// stamp after every kernel. All results are bit-identical to those without a profile. [Machine.Update]
// completes a step, or [Machine.RunAll] if the machine has no optimizer. [Machine.Profile] then returns
// the profile.
//
// The machine must have run before.
func (m *Machine) StartProfile() (err error) {
	defer annotate("Machine.StartProfile", &err)
	if err = usable(m); err != nil {
		return
	}

	if !m.runner.State.Ran() {
		return errors.New("the machine has not run: profile it after a few steps")
	}

	old := m.profiler
	m.profiler = nil // the old profiler is discarded even if closing it fails
	if err := run.Joined(old.Close(), m.device.ctx.SyncStream(m.runner.Stream)); err != nil {
		return err
	}

	m.profiler = profile.NewProfiler(m.measured)
	return nil
}

// Profile returns the profile that [Machine.StartProfile] started, or nil if it needs more steps. Profile
// also measures the GPU's ceilings, which takes a fraction of a second and up to a GiB of free memory.
func (m *Machine) Profile() (_ *optime.Profile, err error) {
	defer annotate("Machine.Profile", &err)
	if err = usable(m); err != nil {
		return
	}

	p := m.profiler
	switch {
	case p == nil:
		return nil, errors.New("no profile was started: call StartProfile")
	case p.Busy():
		return nil, nil
	}

	m.profiler = nil
	return p.Result()
}

// Ceiling measures the GPU's peak performance; call it between two runs. It takes a fraction of a second
// and up to a GiB of free memory. With the precision Float8 it measures float8 products.
func (m *Machine) Ceiling() (c optime.Ceiling, err error) {
	defer annotate("Machine.Ceiling", &err)
	if err = usable(m); err != nil {
		return
	}
	if err := m.device.ctx.SyncStream(m.runner.Stream); err != nil {
		return c, err
	}
	return m.measured.Ceilings()
}

// WithMonitor makes the machine time the ops of one run out of every given number of runs. The timed
// run is replayed with a time stamp between successive calls, and its results are bit-identical.
// [Machine.Monitor] returns the times.
//
// In a timed run, each pass of a Kasmina layer that records telemetry is also run without it, so that the
// lattice's report can state the cost of telemetry. If timing would take more than 0.4% of the time,
// fewer runs are timed.
//
// An op that takes much longer than when it was tuned is logged as a warning.
func WithMonitor(every int) MachineOption {
	return func(c *machineConfig) error {
		if every < 2 {
			return fmt.Errorf("WithMonitor: every %d runs, want at least 2", every)
		}
		c.monitor = every
		return nil
	}
}

// Monitor returns the average time that each op has taken in the runs timed so far, longest first, with
// the variants used. The optimizer's op is called Update.
//
// A timed run counts once its update is complete, which may be after [Machine.Update] has returned. The
// result is empty before the first one and without [WithMonitor].
func (m *Machine) Monitor() (_ []optime.OpTime, err error) {
	defer annotate("Machine.Monitor", &err)
	if err = usable(m); err != nil {
		return
	}
	if m.monitor == nil {
		return nil, nil
	}
	return m.monitor.Times(m.optimizer.Bytes())
}
