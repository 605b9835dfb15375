// Package cudabench times this module's CUDA kernels one by one, on random data. For comparison it also
// measures the card's limits: a copy within device memory and a large matrix product of cuBLASLt. [Run]
// runs groups of benchmarks, and [Groups] lists them.
//
// A time is the median of several launches, each between two events. The cache is overwritten before each
// launch, because in a model other work runs after a kernel's input has been written. Triton's do_bench
// does the same, so the times can be compared with its results for other programs.
package cudabench

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

// Measurement is the time that a kernel takes. If memory bandwidth bounds the kernel, Bytes is the
// minimum amount of data to move, with each input read once and each output written once. If arithmetic
// bounds it, FLOPs is the number of operations. The other number is 0.
type Measurement struct {
	Name  string // kernel, pass and shape, such as rmsnorm_fwd_32768x4096
	Time  time.Duration
	Bytes float64
	FLOPs float64
}

// group is a set of benchmarks that run together.
type group struct {
	name       string
	benchmarks []func(*timer)
}

var groups = []group{
	{"copy", []func(*timer){ceilings}},
	{"ops", []func(*timer){norms, gates, rotations, losses, embeddings}},
	{"attention", []func(*timer){attentions}},
	{"decode", []func(*timer){decoding}},
	{"muon", []func(*timer){newtonSchulz}},
	{"kasmina", []func(*timer){layers}},
	{"stream", []func(*timer){streams}},
	{"optim", []func(*timer){updates}},
	{"stock", []func(*timer){stock}},
}

// Groups returns the names of the groups of kernels.
func Groups() []string {
	var names []string
	for _, g := range groups {
		names = append(names, g.name)
	}
	return names
}

// Run runs the given groups of benchmarks on a device, in the order of [Groups], and calls report with
// each measurement. It needs up to 10 GiB of device memory. Run stops at the first error of report or of
// the device, and returns an error for an unknown group.
func Run(d *cudaops.Device, names []string, report func(Measurement) error) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("cudabench.Run: %w", err)
		}
	}()

	benchmarks, err := selectBenchmarks(names)
	if err != nil {
		return err
	}

	drv, err := driver.Open()
	if err != nil {
		return err
	}

	ctx, err := drv.Retain(d.Ordinal())
	if err != nil {
		return err
	}

	return errors.Join(measure(ctx, cacheBytes, report, benchmarks...), ctx.Close())
}

// selectBenchmarks returns the benchmarks of the named groups.
func selectBenchmarks(names []string) (benchmarks []func(*timer), err error) {
	for _, n := range names {
		if !slices.Contains(Groups(), n) {
			return nil, fmt.Errorf("there is no group %q, want some of %v", n, Groups())
		}
	}

	for _, g := range groups {
		if slices.Contains(names, g.name) {
			benchmarks = append(benchmarks, g.benchmarks...)
		}
	}

	return benchmarks, nil
}
