// Package cudabench times this module's CUDA kernels one by one, on random data. Beside them it
// times what bounds them on the same card: a copy in device memory and a large matrix product of
// cuBLASLt.
//
// A time is the median of launches between two events. The cache is overwritten before each, since
// in a model other work stands between a kernel and what it reads. Triton's do_bench does the same,
// so the times compare with those that it takes of other programs.
package cudabench

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

// Measurement is what a kernel takes. Where memory bounds it, Bytes is what it has to move: each
// input read once, each output written once. Where arithmetic does, FLOPs is what it has to
// compute. The other is 0.
type Measurement struct {
	Name  string // of kernel, pass and shape, as in rmsnorm_fwd_32768x4096
	Time  time.Duration
	Bytes float64
	FLOPs float64
}

// group is benchmarks that run together.
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

// Run measures the kernels of some groups on a device, in the order of [Groups], and calls report
// with each measurement. It takes up to 10 GiB of device memory. An error of report, an unknown
// group or a fault of the device ends it.
func Run(d *cudaops.Device, names []string, report func(Measurement) error) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("cudabench.Run: %w", err)
		}
	}()

	if d == nil || report == nil {
		return errors.New("the device or report is nil")
	}

	benchmarks, err := chosen(names)
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

// chosen is the benchmarks of some groups.
func chosen(names []string) (benchmarks []func(*timer), err error) {
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
