package quant

import (
	"encoding/binary"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"os"
	"regexp"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
)

// TestCodebooks compares the maps with the results of create_dynamic_map of bitsandbytes 0.50.2 and
// PyTorch 2.15.0, by a checksum of all values and by a few readable values.
func TestCodebooks(t *testing.T) {
	for _, c := range []struct {
		b    *Codebook
		sum  uint32
		some map[int]float32
	}{
		{Signed8, 0x1b137aeb, map[int]float32{0: -0.99296874, 126: -5.5000004e-07, 127: 0,
			128: 5.5000004e-07, 254: 0.99296874, 255: 1}},
		{Unsigned8, 0xe871278f, map[int]float32{0: 0, 1: 3.2500003e-07, 2: 7.7499999e-07,
			254: 0.9964844, 255: 1}},
	} {
		for i, want := range c.some {
			require.Equal(t, want, c.b.Values[i], i)
		}
		var raw []byte
		for _, v := range c.b.Values {
			raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(v))
		}
		require.Equal(t, c.sum, crc32.ChecksumIEEE(raw))
	}
}

// TestKernelHasCodebooks compares the maps with the tables of the CUDA kernel.
func TestKernelHasCodebooks(t *testing.T) {
	source, err := os.ReadFile("../../cudaops/internal/kernel/optimizer/adamw8bit.cu")
	require.NoError(t, err)
	for name, b := range map[string]*Codebook{"kSigned": Signed8, "kUnsigned": Unsigned8} {
		table := regexp.MustCompile(name + `\[kCodes\] = \{([^}]*)\}`).FindSubmatch(source)
		require.NotNil(t, table, name)
		numbers := regexp.MustCompile(`[^\s,]+f`).FindAllString(string(table[1]), -1)
		require.Len(t, numbers, 256, name)
		for i, s := range numbers {
			v, err := strconv.ParseFloat(s[:len(s)-1], 32)
			require.NoError(t, err)
			require.Equal(t, b.Values[i], float32(v), "%s[%d]", name, i)
		}
	}
}

// nearest implements [Codebook.Code] by trying all values.
func nearest(b *Codebook, x float32) int {
	best := 0
	for c := 1; c < 256; c++ {
		// Both middles are rounded to float32, as in bitsandbytes.
		switch middle := (b.Values[c-1] + b.Values[c]) / 2; {
		case x > middle, x == middle && c%2 == 0:
			best = c
		}
	}
	return best
}

// TestCode compares codes with the results of a search of all values. The inputs are at, below and above
// every value and every midpoint, at the ends of the search's tables, and random.
func TestCode(t *testing.T) {
	seed := randtest.Seed(t)
	r := rand.New(rand.NewPCG(seed, 8))
	for _, b := range []*Codebook{Signed8, Unsigned8} {
		xs := []float32{0, 1, 1e-45, 1e-38, 0x1p-126}
		around := func(x float32) {
			xs = append(xs, x, math.Nextafter32(x, -2), math.Nextafter32(x, 2))
		}
		for c, v := range b.Values {
			around(v)
			if c > 0 {
				around((b.Values[c-1] + v) / 2)
			}
		}
		for high := uint32(0); high < 0x3f80; high += 7 {
			around(math.Float32frombits(high << 16))
		}
		for range 20_000 {
			xs = append(xs, float32(math.Exp2(-30*r.Float64())))
		}

		for _, x := range xs {
			for _, x := range []float32{x, -x} {
				if x < -1 || x > 1 || x < 0 && b == Unsigned8 {
					continue
				}
				if got := int(b.Code(x)); got != nearest(b, x) {
					t.Fatalf("seed %d: the code of %v is %d, want %d", seed, x, got, nearest(b, x))
				}
			}
		}
	}
}
