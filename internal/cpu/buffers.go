package cpu

import "sync"

// buffers is a call's working memory, which later calls reuse.
type buffers[T Float] struct {
	t   []T
	f64 []float64
}

var buffers32, buffers64 sync.Pool

// bufferPool returns the pool of buffers for T.
func bufferPool[T Float]() *sync.Pool {
	if _, ok := any(T(0)).(float32); ok {
		return &buffers32
	}
	return &buffers64
}

// GetBuffers returns working memory, to be returned with PutBuffers.
func GetBuffers[T Float]() *buffers[T] {
	if b, ok := bufferPool[T]().Get().(*buffers[T]); ok {
		return b
	}
	return new(buffers[T])
}

// PutBuffers returns working memory for later use.
func PutBuffers[T Float](b *buffers[T]) { bufferPool[T]().Put(b) }

// Elements returns n elements with undefined contents.
func (b *buffers[T]) Elements(n int) []T {
	if cap(b.t) < n {
		b.t = make([]T, n)
	}
	return b.t[:n]
}

// Floats returns n numbers with undefined contents.
func (b *buffers[T]) Floats(n int) []float64 {
	if cap(b.f64) < n {
		b.f64 = make([]float64, n)
	}
	return b.f64[:n]
}
