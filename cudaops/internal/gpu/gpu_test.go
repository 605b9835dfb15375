package gpu

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestArgs(t *testing.T) {
	var a Args
	Add(&a, int32(-2))
	Add(&a, Ptr(0x1122334455667788))
	Add(&a, float32(1))
	a.Struct([]byte{1, 2, 3}, 1)
	Add(&a, uint64(7))
	a.Struct([]byte(append([]byte{9}, make([]byte, 127)...)), 64)
	Add(&a, int64(-1))
	want := []Param{{0, 4, Integer}, {8, 8, Integer}, {16, 4, Float}, {20, 3, Structure},
		{24, 8, UnknownKind}, {64, 128, Structure}, {192, 8, Integer}}
	f := &Function{Name: "k", Params: want}
	require.NoError(t, f.Check(&a))
	b := a.Packed()
	if len(b) != 200 || b[0] != 0xFE || b[3] != 0xFF || b[8] != 0x88 || b[15] != 0x11 ||
		b[20] != 1 || b[24] != 7 || b[64] != 9 {
		t.Errorf("packed % x", b)
	}

	f.Params = append([]Param(nil), want...)
	f.Params[2].Size = 8
	err := f.Check(&a)
	require.ErrorIs(t, err, InvalidValue)
	require.ErrorContains(t, err, "cuLaunchKernel(k): CUDA_ERROR_INVALID_VALUE (1): arguments [")
	require.ErrorContains(t, err, "{Offset:16 Size:4 Kind:f}")
	require.ErrorContains(t, err, "{Offset:16 Size:8 Kind:f}")

	f.Params = append([]Param(nil), want...)
	f.Params[2].Kind = Integer
	require.ErrorContains(t, f.Check(&a), "{Offset:16 Size:4 Kind:i}")
	f.Params = []Param{}
	require.ErrorContains(t, f.Check(&a), "the kernel takes []")
	require.NoError(t, f.Check(new(Args)))
}

// memory is a global variable because, like pinned memory, it must not move. A slice that doesn't escape
// would move when its stack grows.
var memory = make([]byte, 100)

func TestPinned(t *testing.T) {
	var p Pinned
	a, b := memory[10:20], memory[20:50]
	p.Add(b)
	p.Add(a)
	for _, c := range []struct {
		b    []byte
		want bool
	}{{a, true}, {b, true}, {b[3:7], true}, {memory[9:12], false}, {memory[49:51], false},
		{memory[50:60], false}, {memory[:5], false}, {memory[15:25], false}} {
		require.Equal(t, c.want, p.Has(c.b), cap(memory)-cap(c.b))
	}

	require.ErrorIs(t, p.Remove(b[1:]), InvalidValue, "Remove takes exactly what Add got")
	require.NoError(t, p.Remove(b))
	require.ErrorIs(t, p.Remove(b), InvalidValue)
	require.ErrorIs(t, p.Remove(nil), InvalidValue)
	require.False(t, p.Has(b))
	require.True(t, p.Has(a))
}

func TestErrors(t *testing.T) {
	if got, want := NewOutOfMemory(3<<30, 1<<20, 1<<40).Error(),
		"cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory: 3.00 GiB requested, 1.00 MiB "+
			"of 1.00 TiB free"; got != want {
		t.Errorf("%q, want %q", got, want)
	}

	for s, want := range map[Status]string{12345: "CUresult 12345",
		IllegalAddress: "CUDA_ERROR_ILLEGAL_ADDRESS"} {
		require.Equal(t, want, s.Error(), int32(s))
	}

	err := error(NewError("cublasLtCreate", BlasNotSupported, "", ""))
	require.Equal(t, "cublasLtCreate: CUBLAS_STATUS_NOT_SUPPORTED (15)", err.Error())
	require.ErrorIs(t, err, BlasNotSupported)
	require.False(t, errors.Is(err, InvalidValue))
	for _, s := range []Status{InvalidValue, OutOfMemory, 701,
		NotReady, CaptureUnmatched} {
		require.False(t, s.Sticky())
	}

	for n, want := range map[uint64]string{0: "0 bytes", 1023: "1023 bytes", 1536: "1.50 KiB",
		1 << 60: "1.00 EiB"} {
		require.Equal(t, want, Size(n))
	}
}
