// Package cpu provides the common basis of the ops' CPU kernels: the detection of the instruction
// set, the team of goroutines over which work is spread, and temporary memory.
//
// The kernels themselves are in subdirectories, one for each family. They are plain loops over slices
// that read like the formulas, for float32 and float64, with rows or heads spread over the cores.
// They know nothing of graphs, nodes or tensors, and rely on their callers to check shapes.
//
// Results do not depend on the number of cores, because every sum is formed either by one goroutine
// in a fixed order or from partial sums over fixed blocks, added in a fixed order. Equal inputs
// therefore give bit-identical results on every run.
package cpu

import (
	"fmt"
	"reflect"
	"runtime"
	"runtime/debug"
	"sync"
)

// Float is the constraint of the element types of kernels.
type Float interface{ float32 | float64 }

// Parallel splits [0, n) into spans of at most grain indices, calls f(lo, hi) for each on as many
// goroutines as there are cores, and returns when all calls have returned. Spans start at multiples
// of grain regardless of the number of cores, so a caller can keep one partial result per span and
// add these in order.
//
// If a call of f panics, no further calls start. Once the running calls have returned, Parallel
// panics on the calling goroutine, with a [*Panic] if the panic happened on another one. A
// [runtime.Goexit] on another goroutine has the same effect.
func Parallel(n, grain int, f func(lo, hi int)) {
	if n <= 0 {
		return
	}

	grain = max(grain, 1)
	workers := min(runtime.GOMAXPROCS(0), (n+grain-1)/grain)
	if workers == 1 {
		for lo := 0; lo < n; lo += grain {
			f(lo, min(lo+grain, n))
		}
		return
	}

	t := teams.Get().(*team)
	t.divide(n, grain, workers, f)
	for range workers - 1 {
		t.recruit()
	}

	t.lead()
	if p := t.panicked.Load(); p != nil {
		panic(p)
	}

	t.f = nil
	teams.Put(t)
}

// spans is implemented by the arguments of a kernel: Span computes indices [lo, hi).
type spans[A any] interface {
	*A
	Span(lo, hi int)
}

// call holds the arguments of a kernel, and is reused by later calls with arguments of the same
// type.
type call[A any] struct {
	args A
	f    func(lo, hi int)
}

var calls sync.Map // *sync.Pool of *call[A], by the type A

// Spread calls Parallel with the method Span of a kernel's arguments a. Unlike a closure over the
// arguments, it does not allocate in the steady state.
func Spread[A any, P spans[A]](n, grain int, a A) {
	key := reflect.TypeFor[A]()
	pool, ok := calls.Load(key)
	if !ok {
		pool, _ = calls.LoadOrStore(key, &sync.Pool{New: func() any {
			c := new(call[A])
			c.f = P(&c.args).Span
			return c
		}})
	}

	c := pool.(*sync.Pool).Get().(*call[A])
	c.args = a
	Parallel(n, grain, c.f)
	c.args = *new(A) // release the caller's memory; after a panic, c is not used again
	pool.(*sync.Pool).Put(c)
}

// Panic holds the value of a panic on a goroutine other than the caller's, and that goroutine's
// stack.
type Panic struct {
	Value any
	Stack []byte
}

// String returns the value and the stack.
func (p *Panic) String() string { return fmt.Sprintf("%v\n\n%s", p.Value, p.Stack) }

// AsPanic converts the recovered value r to a Panic. It must be called by the deferred function
// that recovered r, while the stack still shows the origin. A Panic passed on by an inner call of
// Parallel keeps its stack.
func AsPanic(r any) *Panic {
	if p, ok := r.(*Panic); ok {
		return p
	}
	return &Panic{r, debug.Stack()}
}

// Grain returns the number of items of the given cost, in elementary operations, that make a span
// worth handing to a goroutine.
func Grain(cost int) int { return max(1, 1<<15/max(cost, 1)) }

// CeilDiv returns a/b, rounded up.
func CeilDiv(a, b int) int { return (a + b - 1) / b }

// VectorGrain is the size of the fixed blocks over which vector reductions form partial results.
const VectorGrain = 1 << 14
