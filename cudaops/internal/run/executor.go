// Package run executes the calls of programs on a device: as they are the first time, then as what
// was captured of them. It plans products, sends inputs and fetches values. What made a program is
// nothing to it.
package run

import (
	"context"
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// Launcher launches kernels: a [kernel.Set], or what stands in for it in tests.
type Launcher interface {
	// Launch enqueues what a structure such as rope.Rotate says.
	Launch(s gpu.Stream, params any) error
	// Variants lists the variants that take a launch, the one that should be fastest first and the plain
	// one, whose result counts as right, last. It is empty where there is nothing to choose.
	Variants(params any) []kernel.Variant
	// Build tells one build of the kernels from another.
	Build() string
	Close() error
}

// Executor enqueues launches on a stream.
type Executor struct {
	Ctx       gpu.Context
	Stream    gpu.Stream
	Kernels   Launcher
	Memory    *Memory
	Workspace gpu.Ptr // cuBLASLt's; taken when the first product is planned
	plans     map[gpu.MatmulSpec]*Plan
	pinned    [carriers][]byte // by way of which values travel: see carry

	// Context cancels the run under way; nil outside of runs that can be canceled.
	Context context.Context

	// Host computes on the host, and Pass a pass of a Kasmina layer. They are nil where a program
	// has no such calls.
	Host func(program.HostOp) error
	Pass func(c *program.Call, p *program.KasminaPass) error
}

// Launch enqueues the work that the parameters of a call say, whose addresses are set.
func (x *Executor) Launch(params any) error {
	switch p := params.(type) {
	case program.Matmul:
		return x.product(p)
	case program.Zero:
		return x.Ctx.Memset8(p.Ptr, 0, p.Bytes, x.Stream)
	}
	return x.Kernels.Launch(x.Stream, params)
}

// Call enqueues a call whose operands have memory.
func (x *Executor) Call(c *program.Call) (err error) {
	switch p := c.Params.(type) {
	case *program.HostOp:
		if err = x.Canceled(); err == nil {
			err = x.Host(*p)
		}
	case *program.KasminaPass:
		err = x.Pass(c, p)
	default:
		err = x.Launch(c.Bind((*program.Array).Ptr))
	}
	if err != nil {
		return fmt.Errorf("%s: %w", c.Node, err)
	}

	return nil
}

// Canceled returns the cause if the run under way has been canceled. Work on the host asks it, since
// that waits for the device; work on the device is enqueued too quickly to be worth interrupting.
func (x *Executor) Canceled() error {
	if x.Context != nil && x.Context.Err() != nil {
		return context.Cause(x.Context)
	}
	return nil
}

// Calls enqueues calls until one fails.
func (x *Executor) Calls(calls []*program.Call) error {
	for _, c := range calls {
		if err := x.Call(c); err != nil {
			return err
		}
	}
	return nil
}

// InTurn makes calls until one fails.
func InTurn(calls ...func() error) error {
	for _, call := range calls {
		if err := call(); err != nil {
			return err
		}
	}
	return nil
}

// Joined is errors.Join of calls of which a lost context fails one like the other: the first says
// it all.
func Joined(errs ...error) error {
	for _, err := range errs {
		var e *gpu.Error
		if errors.As(err, &e) && e.Sticky() {
			return err
		}
	}
	return errors.Join(errs...)
}
