package cudaops

import (
	"math"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/op"
)

// updateEarly has machines update in runs what they can, however little there is of it.
func updateEarly(c *machineConfig) error {
	c.late = lateRule{least: 1, group: 1, early: math.Inf(1)}
	return WithEarlyUpdates()(c)
}

// newEarlyTwins are twins of which the one that begins runs early also updates parameters in them, since it takes steps by StepWhile.
func newEarlyTwins(t *testing.T, device *Device, opts ...MachineOption) *twins {
	t.Helper()
	w := &twins{t: t, plain: newWideLifetime(t), ahead: newWideLifetime(t), gather: 1, norms: 1e-6}
	w.open(device, func(*op.KasminaOp) {}, func(l *lifetime) []MachineOption { return append(slices.Clip(opts), updateEarly) })
	return w
}

// TestEarlyBits wants a machine that updates in its runs to compute the same bits as one that does not, in steps that follow one
// another and whatever happens between two.
func TestEarlyBits(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	check := func(t *testing.T, device *Device, opts ...MachineOption) {
		w := newEarlyTwins(t, device, opts...)
		for i := range 5 {
			w.steps("a step", i > 0)
		}
		if !w.ahead.machine.optimizer.early.looked || w.plain.machine.optimizer.early.looked {
			t.Error("updated early was nothing, or too much")
		}
		w.ahead.machine.lost = 0
		w.batch += 1000 // of which the run that has begun knows nothing
		w.steps("a step with another batch", false)
		w.same("several steps")
		newEarlyTwins(t, device, opts...).testStart()
	}
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		check(t, device, fakeOption)
		check(t, device, fakeOption, narrowGradients)
	})
	t.Run("GPU", func(t *testing.T) {
		device := openGPU(t)
		if device.info.Capability() != 90 {
			t.Skip("compute capability 9.0 has it")
		}
		check(t, device, WithPrecision(BFloat16), WithTuning(TuneOff))
		check(t, device, WithPrecision(BFloat16), WithGradientPrecision(BFloat16), WithTuning(TuneOff))
	})
}

