// Package cpu holds what the arithmetic of the ops on a CPU shares. That is the instruction set,
// the team of goroutines that work is spread over, and memory for a call. The families of kernels
// are in the folders below. They are plain loops over slices that read like the formulas, for
// float32 and float64, with rows or heads spread over the cores. They know nothing of graphs, nodes
// or tensors; callers check shapes, so functions index without further tests.
//
// Results do not depend on how many cores share the work. A sum is always formed by one goroutine
// in one order, or from partial sums over fixed blocks that are added in a fixed order. The same
// inputs give the same bits on every run.
package cpu

import (
	"fmt"
	"reflect"
	"runtime"
	"runtime/debug"
	"sync"
)

// Float is the element type of every kernel.
type Float interface{ float32 | float64 }

// Parallel splits [0, n) into spans of at most grain indices and calls f(lo, hi) for each, on as
// many goroutines as there are cores. It returns when all calls have. Spans begin at multiples of
// grain, whatever the number of cores. So a caller may keep one partial result a span and add them
// up in order.
//
// When a call of f panics, no further ones begin. Once those under way have ended, Parallel panics
// on the calling goroutine: with a [*Panic] if the panic was on another one. The same goes for
// [runtime.Goexit] on another one.
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

// spans is a kernel with its arguments: Span computes indices lo to hi−1.
type spans[A any] interface {
	*A
	Span(lo, hi int)
}

// call is a kernel's arguments, kept for the next call with arguments of that type.
type call[A any] struct {
	args A
	f    func(lo, hi int)
}

var calls sync.Map // *sync.Pool of *call[A], by the type A

// Spread is Parallel for a kernel's arguments a and its method Span. A function that captured them
// would be allocated anew in every call; a steady state of this one allocates nothing.
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
	c.args = *new(A) // keeps nobody's memory alive; after a panic, c is not used again
	pool.(*sync.Pool).Put(c)
}

// Panic is what a function has panicked with on a goroutine that is not its caller's, and the stack
// of that goroutine.
type Panic struct {
	Value any
	Stack []byte
}

// String returns the value and the stack.
func (p *Panic) String() string { return fmt.Sprintf("%v\n\n%s", p.Value, p.Stack) }

// AsPanic is for the deferred function that has recovered r, while the stack still shows where it
// came from. What an inner call of Parallel has passed on keeps its own stack.
func AsPanic(r any) *Panic {
	if p, ok := r.(*Panic); ok {
		return p
	}
	return &Panic{r, debug.Stack()}
}

// Grain returns how many items of the given cost (in elementary operations) make one span worth
// handing to a goroutine.
func Grain(cost int) int { return max(1, 1<<15/max(cost, 1)) }

// CeilDiv returns a/b, rounded up.
func CeilDiv(a, b int) int { return (a + b - 1) / b }

// VectorGrain is the fixed block over which vector reductions form one partial result.
const VectorGrain = 1 << 14
