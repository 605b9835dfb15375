package fatbin

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// TestTable checks that a table survives being written and read, and that broken text is rejected.
func TestTable(t *testing.T) {
	want := Table{"b": {{8, gpu.Integer}, {4, gpu.Float}, {176, gpu.Structure}}, "a": {}}
	text, err := want.MarshalText()
	require.NoError(t, err)
	require.Equal(t, header+"a\nb 8i 4f 176s\n", string(text))

	var got Table
	require.NoError(t, got.UnmarshalText(text))
	require.Equal(t, want, got)

	require.ErrorContains(t, got.UnmarshalText([]byte("a 8i x")), `a has a parameter "x"`)
	require.ErrorContains(t, got.UnmarshalText([]byte("a 8q")), `"8q" of an unknown kind`)
}

// TestSignatureOf checks that a signature gives the parameters of a layout their kinds, and fits no
// layout with another number of parameters or other sizes.
func TestSignatureOf(t *testing.T) {
	s := Signature{{8, gpu.Integer}, {4, gpu.Float}}
	got, err := s.Of([]gpu.Param{{Offset: 0, Size: 8}, {Offset: 8, Size: 4}})
	require.NoError(t, err)
	require.Equal(t, []gpu.Param{{Offset: 0, Size: 8, Kind: gpu.Integer},
		{Offset: 8, Size: 4, Kind: gpu.Float}}, got)

	for _, layout := range [][]gpu.Param{nil, {{Size: 8}}, {{Size: 8}, {Offset: 8, Size: 8}}} {
		_, err := s.Of(layout)
		require.ErrorContains(t, err, "does not fit")
	}
}

// TestPTXParams reads parameter lists as nvcc writes them.
func TestPTXParams(t *testing.T) {
	got, err := ptxParams(`
	.param .u64 .ptr .align 1 k_param_0,
	.param .align 8 .b8 k_param_1[176],
	.param .f32 k_param_2,
	.param .u32 k_param_3
`)

	require.NoError(t, err)
	require.Equal(t, Signature{{8, gpu.Integer}, {176, gpu.Structure}, {4, gpu.Float},
		{4, gpu.Integer}}, got)

	got, err = ptxParams("\n")
	require.NoError(t, err)
	require.Empty(t, got)

	_, err = ptxParams(".param .texref k_param_0")
	require.ErrorContains(t, err, `".param .texref k_param_0" has an unknown kind`)
}

// TestBrokenBinaries checks that broken binaries give errors.
func TestBrokenBinaries(t *testing.T) {
	_, err := Signatures(nil)
	require.ErrorContains(t, err, "0 bytes are too few")
	_, err = Signatures(make([]byte, 16))
	require.ErrorContains(t, err, "no PTX")
	_, err = Layouts(make([]byte, 16), 90)
	require.ErrorContains(t, err, "no machine code for compute capability 90")

	cut := make([]byte, 16+64)
	binary.LittleEndian.PutUint32(cut[16+4:], 64)
	binary.LittleEndian.PutUint64(cut[16+8:], 100)
	_, err = Signatures(cut)
	require.ErrorContains(t, err, "an image of 100 bytes in the last 64")
}
