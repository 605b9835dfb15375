package cpu

import (
	"sync"
)

// buffers is memory that a call needs for its own duration, kept for later calls.
type buffers[T Float] struct {
	t   []T
	f64 []float64
}

var buffers32, buffers64 sync.Pool

func bufferPool[T Float]() *sync.Pool {
	if _, ok := any(T(0)).(float32); ok {
		return &buffers32
	}
	return &buffers64
}

func getBuffers[T Float]() *buffers[T] {
	if b, ok := bufferPool[T]().Get().(*buffers[T]); ok {
		return b
	}
	return new(buffers[T])
}

func putBuffers[T Float](b *buffers[T]) { bufferPool[T]().Put(b) }

// elements returns n elements, whatever they hold.
func (b *buffers[T]) elements(n int) []T {
	if cap(b.t) < n {
		b.t = make([]T, n)
	}
	return b.t[:n]
}

// floats returns n numbers, whatever they hold.
func (b *buffers[T]) floats(n int) []float64 {
	if cap(b.f64) < n {
		b.f64 = make([]float64, n)
	}
	return b.f64[:n]
}
