//go:build linux

package gemm

import (
	"fmt"
	"syscall"
	"testing"
	"unsafe"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/cputest"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// guarded returns n elements that end at an inaccessible page, so that accesses beyond them crash.
func guarded[T cpu.Float](t *testing.T, n int) []T {
	page := syscall.Getpagesize()
	var z T
	bytes := n * int(unsafe.Sizeof(z))
	pages := cpu.CeilDiv(bytes, page)
	mem, err := syscall.Mmap(-1, 0, (pages+1)*page, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { syscall.Munmap(mem) })
	if err := syscall.Mprotect(mem[pages*page:], syscall.PROT_NONE); err != nil {
		t.Fatal(err)
	}

	if n == 0 {
		return nil
	}

	return unsafe.Slice((*T)(unsafe.Pointer(&mem[pages*page-bytes])), n)
}

// TestGemmStaysInBounds places A, B and C at the end of mapped memory, which requires vectors that
// extend beyond an edge to be masked.
func TestGemmStaysInBounds(t *testing.T) {
	cputest.EachISA(t, func(t *testing.T) {
		t.Run("float32", testBounds[float32])
		t.Run("float64", testBounds[float64])
	})
}

func testBounds[T cpu.Float](t *testing.T) {
	r := randtest.New(t)
	for _, s := range [][3]int{{1, 5, 3}, {3, 17, 21}, {13, 31, 16}, {20, 70, 33},
		{31, 33, 257}, {30, 100, 15}} {
		for trans := range 4 {
			p := newProduct[T](r, trans&1 != 0, trans&2 != 0, s[0], s[1], s[2], 1, T(r.IntN(2)))
			t.Run(fmt.Sprintf("%v,%v,%v", s, p.transA, p.transB), func(t *testing.T) {
				a, b, c := guarded[T](t, len(p.a)), guarded[T](t, len(p.b)),
					guarded[T](t, (p.m-1)*p.ldc+p.n)
				copy(a, p.a)
				copy(b, p.b)
				copy(c, p.c)
				MulSerial(p.transA, p.transB, p.m, p.n, p.k, p.alpha, a, p.lda, b,
					p.ldb, p.beta, c, p.ldc)
				p.run(MulSerial[T])
				cputest.SameBits(t, p.c[:len(c)], c)
			})
		}
	}
}
