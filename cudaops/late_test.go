package cudaops

import (
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
)

// lateKernels counts what is updated late, and by how much.
type lateKernels struct {
	kernelSet
	late, left *int
}

func (k lateKernels) AdamWLate(s driver.Stream, control driver.Ptr, t *kernels.Table, from, to int) error {
	*k.late++
	return k.kernelSet.AdamWLate(s, control, t, from, to)
}

func (k lateKernels) Leave(n int) {
	*k.left += n
	k.kernelSet.Leave(n)
}

// updatesLate has machines leave for later what they can of an update, however little it is.
func updatesLate(late *int) MachineOption {
	return func(c *machineConfig) error {
		c.late = lateRule{least: 1, group: 1, bandwidth: 1e30}
		c.rules = append(c.rules, wayRule{op: productOp, way: "hopper-*"})
		inner := c.kernels
		c.kernels = func(ctx driver.Context) (kernelSet, error) {
			k, err := inner(ctx)
			return lateKernels{k, late, new(int)}, err
		}
		return nil
	}
}

func TestUpdateLate(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	var late, plain, adding int
	testUpdate(t, device, newAdamW, fakeOption, withOwnProducts(&plain, &adding), updatesLate(&late))
	if late == 0 {
		t.Error("nothing was updated late")
	}
}
