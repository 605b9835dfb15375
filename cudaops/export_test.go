package cudaops

import (
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
)

// OpenFake is openFake for tests with packages that import this one.
func OpenFake(t testing.TB) (*Device, MachineOption) {
	device, _, option := openFake(t, fake.Config{})
	return device, option
}
