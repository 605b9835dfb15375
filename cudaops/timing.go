package cudaops

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/choose"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/profile"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/optime"
	"github.com/kasmina-go/kasmina/internal/variantrule"
)

// Tuning says how a machine finds the fastest of several variants to compute something. They are those
// that cuBLASLt has for a matrix product, and the kernels that attention or a norm has. Another variant
// may add in another order: only with the same variants do two machines compute the same bits.
type Tuning = choose.Mode

// The kinds of tuning. What was timed is stored in the file kasmina/tune.json of the user's cache
// directory. It goes by card, driver, build of the kernels, version of cuBLASLt, op, shape and types.
const (
	TuneDefault = choose.Default // TuneOff with the precision Float32, else TuneCached
	// time nothing, take what cuBLASLt proposes first and what a rule of thumb says
	TuneOff    = choose.Off
	TuneCached = choose.Cached // take what is stored, and time, once, what is not
	TuneFull   = choose.Full   // time anew, and replace what is stored
)

// WithTuning sets the tuning. The environment variable KASMINA_TUNE (off, cached or full) has
// precedence. Timing takes about a second for a small model, and ten to fifteen for one that fills
// the card. Products are timed at NewMachine and [Machine.SetOptimizer], and so are other ops.
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

// WithVariants forces or forbids variants to compute ops, whatever the tuning. A rule is OP=VARIANT or OP!=VARIANT,
// with names as in [Machine.Choices] and with the wildcards of [path.Match]:
//
//	cudaops.WithVariants("Attention*=mma", "RMSNorm*!=rows-*")
//
// The variant host, for an op of Gorgonia's own, computes it on the CPU. What a shape cannot be
// computed in is not forced upon it. The environment variable KASMINA_VARIANTS, rules with commas
// between them, adds to these and has precedence.
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

// WithChoices takes over what another machine has chosen for the same graph ([Machine.Choices]), in
// the place of tuning, so that both compute the same bits. What the other machine has not chosen
// goes by rule. A variant that this machine's GPU has not is an error of NewMachine. Of a choice Op,
// Shape and Variant count.
func WithChoices(choices []Choice) MachineOption {
	return setting(func(c *machineConfig) { c.variants.Given = append([]Choice{}, choices...) })
}

// Choice is the variant in which a machine computes an op of some shape.
type Choice = optime.Choice

// Choices returns what the machine has chosen so far, in that order. The Source of a choice is one
// of the words rule, stored, timed and forced.
func (m *Machine) Choices() []Choice {
	if m == nil || m.runner == nil {
		return nil
	}
	return m.chooser.Made()
}

// setWays completes what the options say on the choice of variants.
func setVariants(d *Device, c *machineConfig) error {
	c.variants.Device, c.variants.Version, c.variants.Warn = d.info, d.version, c.Warn
	if c.Activation == gpu.Float32 {
		return c.variants.Complete(choose.Off)
	}
	return c.variants.Complete(choose.Cached)
}

// OpTime is what the nodes of one op took in a run.
type OpTime = optime.OpTime

// Table is the times of ops for people: a line each, with their shares of the whole.
func Table(times []OpTime) string { return optime.Table(times) }

// Profile is where the time of one step went: see [Machine.StartProfile].
type Profile = optime.Profile

// ProfileSteps is how many steps a profile takes.
const ProfileSteps = profile.Steps

// StartProfile makes the machine profile the [ProfileSteps] steps that follow, of which the last
// ones run with a time stamp after every kernel. All compute the same bits as ever. A step ends
// with [Machine.Update], in a machine without an optimiser with [Machine.RunAll]. The machine must
// have run before. Then [Machine.Profile] has the profile.
func (m *Machine) StartProfile() (err error) {
	defer in("Machine.StartProfile", &err)
	if err = usable(m); err != nil {
		return
	}

	if !m.runner.State.Ran() {
		return errors.New("the machine has not run: profile it after a few steps")
	}

	old := m.profiler
	m.profiler = nil // one that is closed is none, whatever comes of that
	if err := run.Joined(old.Close(), m.device.ctx.SyncStream(m.runner.Stream)); err != nil {
		return err
	}

	m.profiler = profile.NewProfiler(m.measured)
	return nil
}

// Profile returns the profile that [Machine.StartProfile] has begun, nil while steps are lacking.
// It measures the card's ceilings, which takes a fraction of a second and up to a GiB of memory
// that is free.
func (m *Machine) Profile() (_ *Profile, err error) {
	defer in("Machine.Profile", &err)
	if err = usable(m); err != nil {
		return
	}

	p := m.profiler
	switch {
	case p == nil:
		return nil, errors.New("no profile was begun with StartProfile")
	case p.Busy():
		return nil, nil
	}

	m.profiler = nil
	return p.Result()
}

// Ceiling is what the card reaches at best, as measured.
type Ceiling = optime.Ceiling

// Ceiling measures what the card reaches at best, between two runs. It takes a fraction of a
// second, and up to a GiB of memory that is free. Where the machine multiplies in float8, products
// are of that.
func (m *Machine) Ceiling() (c Ceiling, err error) {
	defer in("Machine.Ceiling", &err)
	if err = usable(m); err != nil {
		return
	}
	if err := m.device.ctx.SyncStream(m.runner.Stream); err != nil {
		return c, err
	}
	return m.measured.Ceilings()
}

// WithMonitor makes the machine time its ops while it runs. One run in every so many is replayed
// with a time stamp between one call and the next, and computes the same bits. In it the passes of
// Kasmina layers that measure also run without telemetry, and end each by itself. The lattices'
// reports then say what the layer takes. Where all this would take more than 0.4 % of the time,
// fewer runs have it. [Machine.Monitor] returns the times. An op that takes much longer than when
// it was tuned is logged as a warning.
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
// variants in which they are computed. What the optimiser took has the name Update. A sample counts
// once its update is over, which may go on when [Machine.Update] has returned. Before the first
// one, and without [WithMonitor], the result is empty.
func (m *Machine) Monitor() (_ []OpTime, err error) {
	defer in("Machine.Monitor", &err)
	if err = usable(m); err != nil {
		return
	}
	if m.monitor == nil {
		return nil, nil
	}
	return m.monitor.Times(m.optimizer.Bytes())
}
