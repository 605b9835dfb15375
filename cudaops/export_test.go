package cudaops

import (
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// OpenFake is openFake for tests with packages that import this one.
func OpenFake(t testing.TB) (*Device, MachineOption) {
	device, _, option := openFake(t, fake.Config{})
	return device, option
}

// Wrap puts something around a device's context.
func Wrap(d *Device, around func(gpu.Context) gpu.Context) {
	d.ctx.Context = around(d.ctx.Context)
}
