package tokenizer

import (
	"bytes"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func FuzzBytesRoundTrip(f *testing.F) {
	f.Add([]byte(""))
	f.Add([]byte("func main() {}\n"))
	f.Add([]byte{0, 0xff, 0x80, 0xc3, 0x28})
	f.Fuzz(func(t *testing.T, text []byte) {
		var tok Bytes
		ids := tok.Encode(text)
		for i, id := range ids {
			require.True(t, id >= 0 && id < tok.VocabSize(), "ids[%d] = %d", i, id)
		}
		back, err := tok.Decode(ids)
		require.NoError(t, err)
		require.True(t, bytes.Equal(back, text), "%q came back as %q", text, back)
	})
}

// FuzzBytesDecode decodes ids that each consist of two bytes of the input, so that about one in 256 random ids is in the
// vocabulary. Decode must reject all others.
func FuzzBytesDecode(f *testing.F) {
	f.Add([]byte{0, 65, 0, 255, 1, 0})
	f.Add([]byte{0xff, 0xff})
	f.Fuzz(func(t *testing.T, raw []byte) {
		var ids []int
		valid := true
		for ; len(raw) >= 2; raw = raw[2:] {
			id := int(int16(uint16(raw[0])<<8 | uint16(raw[1])))
			ids = append(ids, id)
			valid = valid && id >= 0 && id < 256
		}
		text, err := Bytes{}.Decode(ids)
		require.Equal(t, valid, err == nil, "%v: %v", ids, err)
		if valid {
			require.True(t, slices.Equal(Bytes{}.Encode(text), ids), ids)
		}
	})
}

// TestBytesNamesTheBadID checks that the error for ids outside the vocabulary names the first one.
func TestBytesNamesTheBadID(t *testing.T) {
	for _, c := range []struct {
		ids  []int
		want string
	}{
		{[]int{65, -1, 300}, "ids[1] is -1"},
		{[]int{256}, "ids[0] is 256"},
		{[]int{0, 255, 1 << 40}, "ids[2] is 1099511627776"},
	} {
		_, err := Bytes{}.Decode(c.ids)
		require.ErrorContains(t, err, c.want)
	}
}
