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

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/attention"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/crossentropy"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/decode"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/embedding"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/layout"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/reduce"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/rope"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/silu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/softmax"
)

// Measurement is what a kernel takes.
type Measurement = bench.Measurement

// group is kernels that are measured together.
type group struct {
	name     string
	families []func(*bench.B)
}

var groups = []group{
	{"copy", []func(*bench.B){bench.Ceilings}},
	{"ops", []func(*bench.B){norm.Bench, silu.Bench, rope.Bench, crossentropy.Bench, embedding.Bench}},
	{"attention", []func(*bench.B){attention.Bench}},
	{"decode", []func(*bench.B){decode.Bench}},
	{"muon", []func(*bench.B){gemm.Bench}},
	{"kasmina", []func(*bench.B){kasmina.Bench}},
	{"optim", []func(*bench.B){optimizer.Bench}},
	{"stock", []func(*bench.B){elementwise.Bench, softmax.Bench, reduce.Bench, layout.Bench}},
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
	for _, n := range names {
		if !slices.Contains(Groups(), n) {
			return fmt.Errorf("there is no group %q, want some of %v", n, Groups())
		}
	}
	drv, err := driver.Open()
	if err != nil {
		return err
	}
	ctx, err := drv.Retain(d.Ordinal())
	if err != nil {
		return err
	}
	return errors.Join(measure(ctx, bench.CacheBytes, names, report), ctx.Close())
}

func measure(ctx gpu.Context, cache int, names []string, report func(Measurement) error) error {
	var chosen []func(*bench.B)
	for _, g := range groups {
		if slices.Contains(names, g.name) {
			chosen = append(chosen, g.families...)
		}
	}
	return bench.Run(ctx, cache, report, chosen...)
}
