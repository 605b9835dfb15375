package kernels

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Launcher launches kernels: [Kernels], or what stands in for it in tests.
type Launcher interface {
	// Launch enqueues what a structure of this package says.
	Launch(s gpu.Stream, params any) error
	// Ways lists the ways that take a launch, the one that should be fastest first and the plain one,
	// whose result counts as right, last. It is empty where there is nothing to choose.
	Ways(params any) []Way
	NewTable(tensors []OptimTensor) (*Table, error)
	NewQuantizeTable(weights []QuantizeWeight) (*QuantizeTable, error)
	// Build tells one build of some units from another.
	Build(units ...string) string
	Close() error
}

type launcher struct{ *Kernels }

// New returns what launches all kernels of a context.
func NewLauncher(ctx gpu.Context) Launcher { return launcher{New(ctx)} }

// NewTable is that of package optimizer.
func (l launcher) NewTable(tensors []OptimTensor) (*Table, error) {
	return l.Kernels.NewTable(tensors)
}

// NewQuantizeTable is NewTable of package quantize.
func (l launcher) NewQuantizeTable(weights []QuantizeWeight) (*QuantizeTable, error) {
	return l.Kernels.NewQuantizeTable(weights)
}
