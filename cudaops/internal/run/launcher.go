package run

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Launcher launches kernels: a [kernel.Set], or what stands in for it in tests.
type Launcher interface {
	// Launch enqueues what a structure such as rope.Rotate says.
	Launch(s gpu.Stream, params any) error
	// Ways lists the ways that take a launch, the one that should be fastest first and the plain
	// one, whose result counts as right, last. It is empty where there is nothing to choose.
	Ways(params any) []kernel.Way
	// Build tells one build of some units from another.
	Build(units ...string) string
	Close() error
}
