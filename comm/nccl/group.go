// Package nccl implements [comm.Group] for GPUs with NVIDIA's NCCL, loaded at run time without cgo,
// toolkit or build tag. Each process uses one GPU.
//
// NCCL's own sums depend on the number of ranks and on the algorithm it chooses, whereas package comm
// provides sums that do not. Work may be captured in a CUDA graph, whose replays then repeat it.
package nccl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/kasmina-go/kasmina/comm"
)

// Device provides access to the GPU of this process.
type Device interface {
	// Do runs f on a thread with the GPU's context current.
	Do(f func() error) error
}

// Group is an NCCL communicator. Its methods may be called from any goroutine.
type Group struct {
	comm.Singles

	api    *api
	world  *comm.World
	device Device

	calls sync.Mutex // held while work is enqueued

	mu      sync.Mutex
	handle  uintptr // 0 before the communicator exists
	cause   error
	aborted chan struct{} // closed when the communicator has been freed
}

var _ comm.Group = (*Group)(nil)

// New creates a communicator for the ranks of w. All ranks must call it. If ctx is done or another
// rank fails, it returns an error; anything NCCL has already started then keeps running until the
// process exits.
func New(ctx context.Context, w *comm.World, d Device) (*Group, error) {
	a, err := load()
	if err != nil {
		return nil, err
	}
	return newGroup(ctx, w, d, a)
}

// newGroup implements New with the given functions of NCCL.
func newGroup(ctx context.Context, w *comm.World, d Device, a *api) (*Group, error) {
	g := &Group{api: a, world: w, device: d, aborted: make(chan struct{})}
	g.Singles = comm.NewSingles(g.Batch)
	id, err := g.id(ctx)
	if err != nil {
		return nil, err
	}

	made := make(chan error, 1)
	go func() {
		made <- d.Do(func() error {
			c := config{Size: configSize, Magic: configMagic, Version: configVersion, Blocking: 1,
				Clusters: undefined, MinCTAs: undefined, MaxCTAs: undefined, SplitShare: undefined}
			var handle uintptr
			r := a.CommInit(&handle, int32(w.Size()), id, int32(w.Rank()), &c)
			g.mu.Lock()
			defer g.mu.Unlock()

			g.handle = handle
			return a.check("ncclCommInitRankConfig", 0, r)
		})
	}()

	select {
	case err := <-made:
		if err != nil {
			return nil, fmt.Errorf("rank %d of %d: %w", w.Rank(), w.Size(), err)
		}
		return g, nil
	case <-w.Done():
		return nil, w.Err()
	case <-ctx.Done():
		return nil, fmt.Errorf("nccl: rank %d of %d is waiting for the other ranks: %w", w.Rank(),
			w.Size(), context.Cause(ctx))
	}
}

// id returns the identifier of the communicator, which rank 0 creates.
func (g *Group) id(ctx context.Context) (id uniqueID, err error) {
	var own []byte
	if g.world.Rank() == 0 {
		if err := g.api.check("ncclGetUniqueId", 0, g.api.GetUniqueID(&id)); err != nil {
			return id, err
		}
		for _, word := range id.Bytes {
			own = binary.LittleEndian.AppendUint64(own, word)
		}
	}

	all, err := g.world.Gather(ctx, "nccl", own)
	if err != nil {
		return id, err
	}

	if len(all[0]) != 8*len(id.Bytes) {
		return id, fmt.Errorf("nccl: rank 0 sent an identifier of %d bytes, want %d",
			len(all[0]), 8*len(id.Bytes))
	}

	for i := range id.Bytes {
		id.Bytes[i] = binary.LittleEndian.Uint64(all[0][8*i:])
	}

	return id, nil
}

// Rank returns the rank of this process.
func (g *Group) Rank() int { return g.world.Rank() }

// Size returns the number of ranks.
func (g *Group) Size() int { return g.world.Size() }

// live returns the communicator, or the reason why it cannot be used.
func (g *Group) live() (uintptr, error) {
	g.mu.Lock()
	defer g.mu.Unlock()

	if g.cause != nil {
		return 0, g.cause
	}
	return g.handle, nil
}

// Batch runs the collectives that f calls as one operation.
func (g *Group) Batch(f func(c comm.Collectives) error) error {
	l := &list{g: g}
	if err := f(l); err != nil {
		return err
	}
	return g.enqueue(l.work)
}

// enqueue passes work to NCCL as one group.
func (g *Group) enqueue(work []call) error {
	handle, err := g.live()
	if err != nil || len(work) == 0 {
		return err
	}

	g.calls.Lock()
	defer g.calls.Unlock()

	err = g.device.Do(func() error {
		if err := g.api.check("ncclGroupStart", handle, g.api.GroupStart()); err != nil {
			return err
		}
		var errs error
		for _, c := range work {
			if errs = g.api.check(c.name, handle, c.do(handle)); errs != nil {
				break
			}
		}
		return errors.Join(errs, g.api.check("ncclGroupEnd", handle, g.api.GroupEnd()))
	})

	if err == nil {
		return nil
	}

	if _, cause := g.live(); cause != nil {
		return cause
	}

	return err
}

// call is a collective in a batch.
type call struct {
	name string
	do   func(handle uintptr) result
}

// list records the collectives of a batch, so that a batch that fails halfway enqueues nothing.
type list struct {
	g    *Group
	work []call
}

// add records a collective after checking its arguments.
func (l *list) add(name string, count int, t comm.Type, op comm.Op, peer int,
	do func(handle uintptr) result) error {
	if err := comm.CheckCall(name, l.g, count, t, op, peer); err != nil {
		return err
	}
	l.work = append(l.work, call{"nccl" + name, do})
	return nil
}

// AllReduce implements [comm.Collectives].
func (l *list) AllReduce(dst, src comm.Ptr, count int, t comm.Type, op comm.Op,
	s comm.Stream) error {
	return l.add("AllReduce", count, t, op, 0, func(h uintptr) result {
		return l.g.api.AllReduce(uintptr(src), uintptr(dst), uintptr(count), dataTypes[t],
			redOps[op], h, uintptr(s))
	})
}

// ReduceScatter implements [comm.Collectives].
func (l *list) ReduceScatter(dst, src comm.Ptr, count int, t comm.Type, op comm.Op,
	s comm.Stream) error {
	return l.add("ReduceScatter", count, t, op, 0, func(h uintptr) result {
		return l.g.api.ReduceScatter(uintptr(src), uintptr(dst), uintptr(count), dataTypes[t],
			redOps[op], h, uintptr(s))
	})
}

// AllGather implements [comm.Collectives].
func (l *list) AllGather(dst, src comm.Ptr, count int, t comm.Type, s comm.Stream) error {
	return l.add("AllGather", count, t, 0, 0, func(h uintptr) result {
		return l.g.api.AllGather(uintptr(src), uintptr(dst), uintptr(count),
			dataTypes[t], h, uintptr(s))
	})
}

// Broadcast implements [comm.Collectives].
func (l *list) Broadcast(buffer comm.Ptr, count int, t comm.Type, root int, s comm.Stream) error {
	return l.add("Broadcast", count, t, 0, root, func(h uintptr) result {
		return l.g.api.Broadcast(uintptr(buffer), uintptr(buffer), uintptr(count), dataTypes[t],
			int32(root), h, uintptr(s))
	})
}

// Send implements [comm.Collectives].
func (l *list) Send(src comm.Ptr, count int, t comm.Type, to int, s comm.Stream) error {
	return l.add("Send", count, t, 0, to, func(h uintptr) result {
		return l.g.api.Send(uintptr(src), uintptr(count), dataTypes[t], int32(to), h, uintptr(s))
	})
}

// Recv implements [comm.Collectives].
func (l *list) Recv(dst comm.Ptr, count int, t comm.Type, from int, s comm.Stream) error {
	return l.add("Recv", count, t, 0, from, func(h uintptr) result {
		return l.g.api.Recv(uintptr(dst), uintptr(count), dataTypes[t], int32(from), h, uintptr(s))
	})
}

// Alloc returns memory that NCCL can send to other GPUs without copying it first.
func (g *Group) Alloc(bytes int) (comm.Ptr, error) {
	if bytes < 1 {
		return 0, fmt.Errorf("nccl: allocation of %d bytes: want at least 1", bytes)
	}

	var p uintptr
	err := g.device.Do(func() error {
		return g.api.check(fmt.Sprintf("ncclMemAlloc of %d bytes", bytes), 0,
			g.api.MemAlloc(&p, uintptr(bytes)))
	})
	return comm.Ptr(p), err
}

// Free frees memory.
func (g *Group) Free(p comm.Ptr) error {
	return g.device.Do(func() error {
		return g.api.check("ncclMemFree", 0, g.api.MemFree(uintptr(p)))
	})
}

// Register registers memory with NCCL.
func (g *Group) Register(p comm.Ptr, bytes int) (comm.Registration, error) {
	handle, err := g.live()
	if err != nil {
		return 0, err
	}
	var r uintptr
	err = g.device.Do(func() error {
		return g.api.check("ncclCommRegister", handle,
			g.api.CommRegister(handle, uintptr(p), uintptr(bytes), &r))
	})
	return comm.Registration(r), err
}

// Deregister reverses Register.
func (g *Group) Deregister(r comm.Registration) error {
	handle, err := g.live()
	if err != nil {
		return err
	}
	return g.device.Do(func() error {
		return g.api.check("ncclCommDeregister", handle, g.api.CommDeregister(handle, uintptr(r)))
	})
}

// Err returns the error of failed work, or nil.
func (g *Group) Err() error {
	g.mu.Lock()
	defer g.mu.Unlock()

	if g.cause != nil || g.handle == 0 {
		return g.cause
	}

	var r result
	if err := g.api.check("ncclCommGetAsyncError", 0,
		g.api.CommAsyncError(g.handle, &r)); err != nil {
		return err
	}

	return g.api.check("work of the communicator", g.handle, r)
}

// Abort terminates all work.
func (g *Group) Abort(cause error) {
	if g.api != nil {
		g.end(cause, g.api.CommAbort)
	}
}

// errLeft is the cause after Close.
var errLeft = fmt.Errorf("nccl: %w", comm.ErrClosed)

// end frees the communicator with the given function, unless that has already happened.
func (g *Group) end(cause error, free func(uintptr) result) error {
	g.mu.Lock()
	handle := g.handle
	if g.cause != nil {
		g.mu.Unlock()
		<-g.aborted
		return nil
	}

	g.cause = cause
	g.mu.Unlock()
	defer close(g.aborted)
	return g.device.Do(func() error {
		return g.api.check("freeing the communicator", 0, free(handle))
	})
}

// Close frees the group.
func (g *Group) Close() error {
	err := g.end(errLeft, g.api.CommDestroy)
	g.mu.Lock()
	defer g.mu.Unlock()

	if !errors.Is(g.cause, comm.ErrClosed) {
		return g.cause
	}

	return err
}
