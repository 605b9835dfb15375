package cpu

import "sync"

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

func GetBuffers[T Float]() *buffers[T] {
	if b, ok := bufferPool[T]().Get().(*buffers[T]); ok {
		return b
	}
	return new(buffers[T])
}

func PutBuffers[T Float](b *buffers[T]) { bufferPool[T]().Put(b) }

// Elements returns n elements, whatever they hold.
func (b *buffers[T]) Elements(n int) []T {
	if cap(b.t) < n {
		b.t = make([]T, n)
	}
	return b.t[:n]
}

// Floats returns n numbers, whatever they hold.
func (b *buffers[T]) Floats(n int) []float64 {
	if cap(b.f64) < n {
		b.f64 = make([]float64, n)
	}
	return b.f64[:n]
}
