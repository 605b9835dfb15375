package run

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
)

// Launcher launches kernels: a [kernel.Set], or what stands in for it in tests.
type Launcher interface {
	// Launch enqueues what a structure such as rope.Rotate says.
	Launch(s gpu.Stream, params any) error
	// Ways lists the ways that take a launch, the one that should be fastest first and the plain
	// one, whose result counts as right, last. It is empty where there is nothing to choose.
	Ways(params any) []kernel.Way
	NewTable(tensors []optimizer.Tensor) (*optimizer.Table, error)
	NewScattered(tensors []optimizer.Tensor, at []int, chunks int) (*optimizer.Table, error)
	NewQuantizeTable(weights []quantize.Weight) (*quantize.Table, error)
	// Build tells one build of some units from another.
	Build(units ...string) string
	Close() error
}

type launcher struct{ *kernel.Set }

// NewLauncher returns what launches all kernels of a context.
func NewLauncher(ctx gpu.Context) Launcher { return launcher{kernel.New(ctx)} }

// NewTable is that of package optimizer.
func (l launcher) NewTable(tensors []optimizer.Tensor) (*optimizer.Table, error) {
	return optimizer.NewTable(l.Set, tensors)
}

// NewScattered is that of package optimizer.
func (l launcher) NewScattered(tensors []optimizer.Tensor, at []int,
	chunks int) (*optimizer.Table, error) {
	return optimizer.NewScattered(l.Set, tensors, at, chunks)
}

// NewQuantizeTable is NewTable of package quantize.
func (l launcher) NewQuantizeTable(weights []quantize.Weight) (*quantize.Table, error) {
	return quantize.NewTable(l.Set, weights)
}
