// Package run executes the calls of programs on a device. It also plans matrix products, sends inputs and
// fetches values. The first run enqueues the calls one by one; later runs replay a captured graph. The
// package doesn't depend on how a program was created.
package run

import (
	"context"
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// Launcher launches kernels. It is a [kernel.Set] except in tests.
type Launcher interface {
	// Launch enqueues the launch described by params, a structure such as rope.Rotate.
	Launch(s gpu.Stream, params any) error
	// Variants lists the variants that support a launch, with the one expected to be fastest first and
	// the plain one, which serves as the reference, last. The list is empty if there is nothing to
	// choose.
	Variants(params any) []kernel.Variant
	// Build identifies the build of the kernels.
	Build() string
	Close() error
}

// Executor enqueues launches on a stream.
type Executor struct {
	Ctx       gpu.Context
	Stream    gpu.Stream
	Kernels   Launcher
	Memory    *Memory
	Workspace gpu.Ptr // cuBLASLt's workspace; allocated when the first product is planned
	plans     map[gpu.MatmulSpec]*Plan
	pinned    [transferWorkers][]byte // buffers for transfers: see transfer

	// Context cancels the current run. It is nil outside of runs that can be canceled.
	Context context.Context

	// Host computes a node on the host, and Pass a pass of a Kasmina layer. They may be nil if the
	// program has no such calls.
	Host func(program.HostOp) error
	Pass func(c *program.Call, p *program.KasminaPass) error
}

// Launch enqueues a launch with its addresses set.
func (x *Executor) Launch(params any) error {
	switch p := params.(type) {
	case program.Matmul:
		return x.product(p)
	case program.Zero:
		return x.Ctx.Memset8(p.Ptr, 0, p.Bytes, x.Stream)
	}
	return x.Kernels.Launch(x.Stream, params)
}

// Call enqueues a call after binding the addresses of its operands.
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

// Canceled returns the cause if the current run has been canceled. Only work on the host checks it, since
// that work waits for the device. Work on the device is enqueued too quickly to be worth interrupting.
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

// InOrder calls functions in order until one fails, and returns its error.
func InOrder(calls ...func() error) error {
	for _, call := range calls {
		if err := call(); err != nil {
			return err
		}
	}
	return nil
}

// Joined is errors.Join, except that it returns a sticky CUDA error alone: once the context is lost,
// every later call fails with the same error.
func Joined(errs ...error) error {
	for _, err := range errs {
		var e *gpu.Error
		if errors.As(err, &e) && e.Sticky() {
			return err
		}
	}
	return errors.Join(errs...)
}
