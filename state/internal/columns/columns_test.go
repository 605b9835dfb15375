package columns

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/half"
)

// table returns columns of all types with three rows.
func table() []Column {
	return []Column{
		{"a", &[]uint8{1, 2, 3}}, {"b", &[]uint16{0x102, 7, 8}}, {"c", &[]uint32{1 << 31, 5, 6}},
		{"d", &[]uint64{1 << 63, 1, 2}}, {"e", &[]float32{0.5, -1, float32(math.Inf(1))}},
		{"f", &[]float64{0.25, -2, math.MaxFloat64}},
	}
}

// TestFile checks that a file restores its table, and that files of a different length are rejected.
func TestFile(t *testing.T) {
	all := table()
	require.Equal(t, 1+2+4+8+4+8, RowWidth(all))
	file := AppendRows(Head([]byte("header"), 0), all, 3)
	header, rest, err := ParseHead(file)
	require.NoError(t, err)
	require.Equal(t, "header", string(header))
	read, err := Empty(Fields(all))
	require.NoError(t, err)
	require.NoError(t, ReadRows(read, 3, rest))
	require.Equal(t, all, read)
	require.ErrorContains(t, ReadRows(read, 3, rest[1:]), "3 seeds take 81 bytes, but 80 follow")
	require.ErrorContains(t, ReadRows(read, 1<<40, rest), "but 81 follow")
	_, err = Empty([]Field{{"a", "string"}})
	require.ErrorContains(t, err, `field "a" is of type "string"`)
	for want, bad := range map[string][]byte{
		"does not start with": file[1:], "is 6 bytes long, but only 5 bytes follow": file[:Prefix+5],
		"does not match its checksum": []byte(string(file[:Prefix]) + "Header"),
	} {
		_, _, err := ParseHead(bad)
		require.ErrorContains(t, err, want)
	}
}

// TestChecksums checks that every flipped bit is found and located, and that a row can be restored.
func TestChecksums(t *testing.T) {
	for _, padded := range []bool{false, true} {
		all := table()
		sums, crc := NewChecksums(all, padded), make([]uint32, 3)
		sums.Seal(0, 3, crc)
		require.Empty(t, sums.All(crc))
		for _, c := range all {
			for bit := range 8 * c.Width() {
				before := sums.Row(1)
				b := make([]byte, c.Width())
				c.Gather(b, len(b), 1, 2)
				b[bit/8] ^= 1 << (bit % 8)
				c.Scatter(b, len(b), 1, 2)
				found := sums.All(crc)
				require.Len(t, found, 1)
				require.Equal(t, 1, found[0].Row)
				require.Equal(t, fmt.Sprintf("bit %d of %s has flipped", bit, c.Name),
					sums.Locate(found[0].Syndrome))
				sums.SetRow(1, before)
			}
		}

		require.Empty(t, sums.Faults(0, 3, crc))
		require.Equal(t, "bit 9 of its checksum has flipped", sums.Locate(1<<9))
		require.Equal(t, "more than one bit has changed", sums.Locate(0b11))
	}
}

// TestColumn checks that a clone does not share memory, and that older types are converted to
// float32.
func TestColumn(t *testing.T) {
	for _, c := range table() {
		other := c.Clone()
		require.Equal(t, c, other)
		other.Scatter(make([]byte, 8), 8, 0, 1)
		require.NotEqual(t, c.Data(), other.Data())
		other.Set(c.Data())
		require.Equal(t, c, other)
	}

	to := Column{"x", &[]float32{0, 0}}
	require.True(t, to.Narrow(Column{"x", &[]float64{0.5, -3}}))
	require.Equal(t, []float32{0.5, -3}, to.Data())
	one := uint16(half.NewFloat16(1))
	require.True(t, to.Narrow(Column{"x", &[]uint16{one, 0}}))
	require.Equal(t, []float32{1, 0}, to.Data())
	require.False(t, to.Narrow(Column{"x", &[]uint8{1, 2}}))
	require.False(t, Column{"x", &[]uint8{1, 2}}.Narrow(to))
}
