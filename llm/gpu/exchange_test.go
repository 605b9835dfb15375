package gpu_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ebitengine/purego"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/comm/direct"
	"github.com/kasmina-go/kasmina/comm/nccl"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/sharedlib"
)

// TestRanksExchange measures how long the exchanges of a step take without computation, with
// gradients and weights in bfloat16. It compares the routes of package comm/direct with the same
// sends and receives through NCCL, and with NCCL's collectives.
func TestRanksExchange(t *testing.T) {
	most := gpus(t)
	if testing.Short() {
		t.Skip("measures")
	}
	for n := 2; n <= most; n *= 2 {
		output, _ := launchRanks(t, exchangeRole, n)
		t.Log(output)
	}
}

const (
	exchangeRole  = "exchange"
	exchangeTurns = 9
	bucketBytes   = 32 << 20
)

// driver holds the functions of libcuda that the test calls.
type driver struct {
	MemAlloc  func(p *uintptr, bytes uintptr) int32 `c:"cuMemAlloc_v2"`
	NewStream func(s *uintptr, flags uint32) int32  `c:"cuStreamCreate"`
	Sync      func(s uintptr) int32                 `c:"cuStreamSynchronize"`
}

func loadDriver() (*driver, error) {
	library, err := sharedlib.Open("libcuda.so.1")
	if err != nil {
		return nil, err
	}

	d := &driver{}
	for symbol, f := range sharedlib.Functions(d) {
		address, err := sharedlib.Lookup(library, symbol)
		if err != nil {
			return nil, err
		}
		purego.RegisterFunc(f, address)
	}

	return d, nil
}

// exchanger is a rank of the test.
type exchanger struct {
	world  *comm.World
	device *cudaops.Device
	driver *driver
	stream comm.Stream
}

// exchange is the program of a rank.
func exchange(ctx context.Context, w *comm.World, device *cudaops.Device) (err error) {
	x := &exchanger{world: w, device: device}
	if x.driver, err = loadDriver(); err != nil {
		return err
	}

	n, err := nccl.New(ctx, w, device)
	if err != nil {
		return err
	}

	g, why, err := direct.New(ctx, w, device, n)
	if err != nil {
		return err
	}

	if why != nil && w.Rank() == 0 {
		fmt.Println("no direct routes:", why)
	}

	if err := x.call(func() int32 {
		return x.driver.NewStream((*uintptr)(&x.stream), 1) // a stream separate from the default one
	}); err != nil {
		return err
	}

	for _, name := range []string{"124M", "350M", "925M"} {
		if err := x.model(ctx, name, n, g); err != nil {
			return err
		}
	}

	return errors.Join(g.Close(), w.Close())
}

// call calls the driver.
func (x *exchanger) call(f func() int32) error {
	return x.device.Do(func() error {
		if status := f(); status != 0 {
			return fmt.Errorf("CUDA error %d", status)
		}
		return nil
	})
}

func (x *exchanger) alloc(bytes int) (comm.Ptr, error) {
	var p uintptr
	err := x.call(func() int32 { return x.driver.MemAlloc(&p, uintptr(bytes)) })
	return comm.Ptr(p), err
}

// model measures the exchanges of a model in buckets that are divided evenly.
func (x *exchanger) model(ctx context.Context, name string, n *nccl.Group, g comm.Group) error {
	size, rank := x.world.Size(), x.world.Rank()
	params := 0
	for p := range rankRuns()[name].config.Specs() {
		params += tensor.Shape(p.Shape).TotalSize()
	}

	buckets := (2*params + bucketBytes - 1) / bucketBytes
	piece := bucketBytes / size
	whole, err := x.alloc(buckets * bucketBytes)
	if err != nil {
		return err
	}

	staging, err := x.alloc(buckets * bucketBytes)
	if err != nil {
		return err
	}

	// to returns the address of a rank's part of a bucket.
	to := func(base comm.Ptr, bucket, r int) comm.Ptr {
		return base + comm.Ptr(bucket*bucketBytes+r*piece)
	}
	routes := func(g comm.Group) (all []comm.Route, err error) {
		for home := range 2 { // gradients to their owners, then weights from them
			for b := range buckets {
				var sends, receives []comm.Leg
				for r := range size {
					if r == rank {
						continue
					}
					out, in := to(whole, b, r), to(staging, b, r)
					if home == 1 {
						out, in = to(whole, b, rank), to(whole, b, r)
					}
					sends = append(sends, comm.Leg{Rank: r, At: out, Bytes: piece})
					receives = append(receives, comm.Leg{Rank: r, At: in, Bytes: piece})
				}
				route, err := comm.NewRoute(g, home*buckets+b, sends, receives)
				if err != nil {
					return nil, err
				}
				all = append(all, route)
			}
		}
		return all, nil
	}

	byRoutes := func(all []comm.Route) func() error {
		return func() error {
			for _, r := range all {
				if err := errors.Join(r.Enqueue(x.stream), r.Release(x.stream)); err != nil {
					return err
				}
			}
			return nil
		}
	}

	collectives := func() error {
		for b := range buckets {
			if err := n.ReduceScatter(to(staging, b, rank), to(whole, b, 0), piece/2, comm.BFloat16,
				comm.Sum, x.stream); err != nil {
				return err
			}
		}
		for b := range buckets {
			if err := n.AllGather(to(whole, b, 0), to(whole, b, rank), piece/2, comm.BFloat16,
				x.stream); err != nil {
				return err
			}
		}
		return nil
	}

	ours, err := routes(g)
	if err != nil {
		return err
	}

	theirs, err := routes(n)
	if err != nil {
		return err
	}

	line := fmt.Sprintf("%s on %d GPUs, %d MB out and in, alone:", name, size,
		2*buckets*(bucketBytes>>20)*(size-1)/size)
	for _, variant := range []struct {
		name string
		run  func() error
	}{{"direct", byRoutes(ours)}, {"NCCL's sends", byRoutes(theirs)},
		{"NCCL's reduce-scatter and all-gather", collectives}, {"direct again", byRoutes(ours)}} {
		took, err := x.timed(ctx, variant.run)
		if err != nil {
			return fmt.Errorf("%s: %w", variant.name, err)
		}
		line += fmt.Sprintf(" %s %.2f ms,", variant.name, 1e3*took.Seconds())
	}

	if rank == 0 {
		fmt.Println(line[:len(line)-1])
	}

	for _, r := range ours {
		if err := r.Close(); err != nil {
			return err
		}
	}

	return nil
}

// timed returns the median time of an operation that all ranks start at the same time.
func (x *exchanger) timed(ctx context.Context, f func() error) (time.Duration, error) {
	var times []time.Duration
	for range exchangeTurns {
		if err := x.world.Barrier(ctx, "turn"); err != nil {
			return 0, err
		}
		began := time.Now()
		if err := errors.Join(f(), x.call(func() int32 {
			return x.driver.Sync(uintptr(x.stream))
		})); err != nil {
			return 0, err
		}
		times = append(times, time.Since(began))
	}

	slices.Sort(times)
	return times[len(times)/2], nil
}
