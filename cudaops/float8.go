package cudaops

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
)

// float8Blas is the first cuBLASLt that has a factor for each row, float8Capability the first GPU,
// and float8Side the sides of a product that is tried.
const float8Blas, float8Capability, float8Side = 120900, 90, 128

// checkFloat8 returns an error where the card or its library has no products of float8 with a
// factor for each row.
func checkFloat8(m *Machine) error {
	blas, err := m.device.ctx.Blas()
	if err != nil {
		return err
	}
	info := m.device.info
	if info.Capability() >= float8Capability && blas.Version() >= float8Blas {
		const t = gpu.Float8E4M3
		plan, err := blas.Plan(gpu.MatmulSpec{M: float8Side, N: float8Side, K: float8Side,
			TransB: true, A: t, B: t,
			D: m.config.act, Scaling: gpu.ScaledRows, FastAccumulation: true},
			run.WorkspaceBytes, 1)
		if err == nil {
			return plan.Close()
		}
		if !errors.Is(err, gpu.BlasNotSupported) && !errors.Is(err, gpu.BlasInvalidValue) {
			return err
		}
	}
	return fmt.Errorf("WithPrecision(Float8): %w: it takes products of float8 with a factor for "+
		"each row, which a GPU of compute capability %d.%d and cuBLASLt 12.9 or later have; this "+
		"is %s, of %d.%d, with cuBLASLt %d.%d: use BFloat16", ErrUnsupportedPrecision,
		float8Capability/10, float8Capability%10, info.Name, info.Major, info.Minor,
		blas.Version()/10000, blas.Version()/100%100)
}
