package safetensors

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// loadBytes uses a file in every way: it opens it, verifies it and reads every tensor.
func loadBytes(b []byte) error {
	f, err := NewFile("file", bytes.NewReader(b), int64(len(b)))
	if err != nil {
		return err
	}

	for _, name := range f.Names() {
		t, err := f.Tensor(context.Background(), name)
		if err != nil {
			return err
		}
		if err := t.check(); err != nil {
			return fmt.Errorf("Tensor returned an unsound tensor: %v", err)
		}
	}

	return f.Verify(context.Background(), f.Names()...)
}

// small returns the bytes of a small file with a bit of everything.
func small(t testing.TB) []byte {
	path := filepath.Join(t.(interface{ TempDir() string }).TempDir(), "small")
	err := Save(path, []Tensor{
		{"w", F32, []int{2, 1}, []float32{1, float32(math.NaN())}},
		{"b", Bool, []int{3}, []bool{true, false, true}},
		{"empty", I64, []int{0}, []int64{}},
	}, map[string]string{"k": "v"})
	if err != nil {
		t.Fatal(err)
	}

	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}

	return b
}

func TestEveryAlteredByteIsRefused(t *testing.T) {
	b := small(t)
	if err := loadBytes(b); err != nil {
		t.Fatal(err)
	}

	for i := range b {
		for x := 1; x < 256; x++ {
			b[i] ^= byte(x)
			if err := loadBytes(b); !errors.Is(err, ErrCorrupt) {
				t.Errorf("byte %d of %d altered from %#x to %#x: error %v", i, len(b),
					b[i]^byte(x), b[i], err)
			}
			b[i] ^= byte(x)
		}
	}
}

func TestEveryTruncationIsRefused(t *testing.T) {
	b := small(t)
	for n := range b {
		if err := loadBytes(b[:n]); !errors.Is(err, ErrCorrupt) ||
			!strings.Contains(err.Error(), "cut short") {
			t.Errorf("truncated to %d of %d bytes: error %v", n, len(b), err)
		}
	}
	if err := loadBytes(append(b, 0)); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a byte appended: error %v", err)
	}
}

// TestShrunk truncates the file after its header has been read.
func TestShrunk(t *testing.T) {
	b := small(t)
	f, err := NewFile("file", bytes.NewReader(b[:len(b)-1]), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Verify(t.Context(), f.Names()...); !errors.Is(err, ErrCorrupt) {
		t.Errorf("error %v", err)
	}
}

// TestDamageIsLocated checks that an error names the file and the tensor.
func TestDamageIsLocated(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model")
	b := mustSave(t, path, []Tensor{
		{"first", F32, []int{4}, make([]float32, 4)},
		{"second", F32, []int{4}, make([]float32, 4)},
	}, nil)
	b[len(b)-1] ^= 0x40
	if err := os.WriteFile(path, b, 0o666); err != nil {
		t.Fatal(err)
	}

	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}

	defer f.Close()

	if _, err := f.Tensor(context.Background(), "first"); err != nil {
		t.Errorf("the intact tensor: %v", err)
	}

	_, errTensor := f.Tensor(context.Background(), "second")
	_, _, errLoad := Load(path)
	for _, err := range []error{errTensor, errLoad, f.Verify(t.Context(), f.Names()...)} {
		if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), `"second"`) ||
			!strings.Contains(err.Error(), path) {
			t.Errorf("error %v, expected one that names the file and the tensor", err)
		}
	}
}

// file returns a header followed by n bytes of data.
func file(header string, n int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), make([]byte, n)...)
}

// plain is a header without checksums, as other programs write it.
const plain = `{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},` +
	`"b":{"shape":[],"data_offsets":[8,9],"dtype":"BOOL"}}   `

func TestForeignFile(t *testing.T) {
	b := file(plain, 9)
	f, err := NewFile("file", bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}

	if err := f.Verify(t.Context(), f.Names()...); err != nil || f.HasDigest() {
		t.Errorf("Verify: %v, HasDigest %v", err, f.HasDigest())
	}

	if err := loadBytes(b); err != nil {
		t.Error(err)
	}

	if err := loadBytes(file("{}", 0)); err != nil {
		t.Errorf("no tensors: %v", err)
	}
}

func TestHostileFiles(t *testing.T) {
	one := func(info string) string { return `{"a":` + info + `}` }
	f32 := func(shape, offsets string) string {
		return one(fmt.Sprintf(`{"dtype":"F32","shape":%s,"data_offsets":%s}`, shape, offsets))
	}
	two := func(a, b string) string {
		return fmt.Sprintf(`{"a":{"dtype":"U8","shape":[4],"data_offsets":%s},"b":{"dtype":"U8","shape":[4],"data_offsets":%s}}`, a, b)
	}
	tests := []struct {
		name   string
		file   []byte
		faults string
	}{
		{"empty", nil, "too short"},
		{"only a length", file("", 0), "does not start with {"},
		{"length past the end", file(plain, 0)[:20], "only 12 follow"},
		{"huge length", binary.LittleEndian.AppendUint64(nil, math.MaxUint64), "is this a safetensors file?"},
		{"length above the limit", binary.LittleEndian.AppendUint64(nil, maxHeader+1), "the format allows"},
		{"not JSON", file("{hello}", 0), "JSON"},
		{"what a terminal obeys", file("{\x1b[2J}", 0), `found "\x1b"`},
		{"not UTF-8", file("{\"\xff\":{}}", 0), "UTF-8"},
		{"leading space", file(" {}", 0), "start with {"},
		{"an array", file("[]", 0), "start with {"},
		{"two objects", file("{}{}", 0), "JSON"},
		{"nested without end", file(strings.Repeat(`{"a":`, 1_000_000), 0), "unknown field"},
		{"nested deeply", file(strings.Repeat(`{"a":`, 9_000)+"1"+strings.Repeat("}", 9_000), 0), "unknown field"},
		{"tensor is a number", file(one("1"), 0), "expected {"},
		{"tensor is null", file(one("null"), 0), "expected {"},
		{"no fields", file(one("{}"), 0), "0 fields"},
		{"no dtype", file(one(`{"shape":[0],"data_offsets":[0,0]}`), 0), "2 fields"},
		{"no shape", file(one(`{"dtype":"F32","data_offsets":[0,4]}`), 4), "2 fields"},
		{"no offsets", file(one(`{"dtype":"F32","shape":[0]}`), 0), "2 fields"},
		{"unknown field", file(one(`{"dtype":"F32","shape":[0],"data_offsets":[0,0],"x":0}`), 0), `"x"`},
		{"misspelt field", file(one(`{"DType":"F32","shape":[0],"data_offsets":[0,0]}`), 0), `"DType"`},
		{"unknown dtype", file(one(`{"dtype":"F31","shape":[1],"data_offsets":[0,4]}`), 4), `"F31"`},
		{"dtype is a number", file(one(`{"dtype":32,"shape":[1],"data_offsets":[0,4]}`), 4), "expected a string"},
		{"shape is a number", file(f32(`1`, `[0,4]`), 4), "expected ["},
		{"negative dimension", file(f32(`[-1]`, `[0,4]`), 4), "-1"},
		{"fractional dimension", file(f32(`[1.5]`, `[0,4]`), 4), "1.5"},
		{"dimension with exponent", file(f32(`[1e0]`, `[0,4]`), 4), "1e0"},
		{"dimension above 63 bits", file(f32(`[9223372036854775808]`, `[0,4]`), 4), "9223372036854775808"},
		{"dimension is a string", file(f32(`["1"]`, `[0,4]`), 4), "expected a number"},
		{"product overflows to the right size", file(f32(`[4294967296,4294967296,1]`, `[0,0]`), 0), "too many"},
		{"bytes overflow", file(f32(`[4611686018427387904]`, `[0,0]`), 0), "too many"},
		{"hostile size", file(f32(`[250000000000]`, `[0,1000000000000]`), 8), "8 bytes of data"},
		{"size mismatch", file(f32(`[3]`, `[0,8]`), 8), "takes 12 bytes"},
		{"offsets reversed", file(f32(`[1]`, `[4,0]`), 4), "[begin, end]"},
		{"one offset", file(f32(`[1]`, `[4]`), 4), "[begin, end]"},
		{"three offsets", file(f32(`[1]`, `[0,4,4]`), 4), "[begin, end]"},
		{"negative offset", file(f32(`[1]`, `[-4,0]`), 4), "-4"},
		{"huge offset", file(f32(`[1]`, `[0,18446744073709551615]`), 4), "18446744073709551615"},
		{"past the end", file(f32(`[2]`, `[0,8]`), 4), "4 bytes of data"},
		{"data left over", file(f32(`[1]`, `[0,4]`), 5), "5 bytes of data"},
		{"data without tensors", file("{}", 1), "1 bytes of data"},
		{"gap before", file(f32(`[1]`, `[4,8]`), 8), "gap"},
		{"gap between", file(two(`[0,4]`, `[5,9]`), 9), `"b"`},
		{"overlap", file(two(`[3,7]`, `[0,4]`), 7), `"a"`},
		{"same place", file(two(`[0,4]`, `[0,4]`), 4), "overlap"},
		{"empty tensor out of place", file(`{"a":{"dtype":"U8","shape":[0],"data_offsets":[7,7]}}`, 0), "gap"},
		{"duplicate tensor", file(`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"\u0061":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}`, 0),
			`duplicate key "a"`},
		{"duplicate field", file(one(`{"dtype":"U8","dtype":"U8","data_offsets":[0,0]}`), 0), `duplicate key "dtype"`},
		{"duplicate metadata", file(`{"__metadata__":{"k":"1","k":"2"}}`, 0), `duplicate key "k"`},
		{"two metadata", file(`{"__metadata__":{},"__metadata__":{}}`, 0), "duplicate"},
		{"metadata is a list", file(`{"__metadata__":[]}`, 0), "expected {"},
		{"metadata value is a number", file(`{"__metadata__":{"step":1}}`, 0), `metadata "step"`},
		{"bool of 2", append(file(one(`{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}`), 2), 2), "element 2 is 0x2"},
		{"checksums not announced", file(`{"__metadata__":{"kasmina.crc32c":"00000000"}}`, 0), "are corrupted"},
		{"announced checksums absent", file(`{"__metadata__":{"kasmina.digest":"crc32c"}}`, 0), "are corrupted"},
		{"another digest", file(`{"__metadata__":{"kasmina.crc32c":"00000000","kasmina.digest":"md5"}}`, 0), `"md5"`},
		{"no digits", file(`{"__metadata__":{"kasmina.crc32c":"","kasmina.digest":"crc32c"}}`, 0), "0 checksum digits"},
		{"digits of another count", file(`{"__metadata__":{"kasmina.crc32c":"0000000000000000","kasmina.digest":"crc32c"}}`, 0), "expected 8"},
		{"not digits", file(`{"__metadata__":{"kasmina.crc32c":"0000000g","kasmina.digest":"crc32c"}}`, 0), `"0000000g"`},
		{"wrong sum", file(`{"__metadata__":{"kasmina.crc32c":"00000000","kasmina.digest":"crc32c"}}`, 0), "expected 00000000"},
		{"escaped key", file(`{"__metadata__":{"k\u0061smina.crc32c":"00000000","kasmina.digest":"crc32c"}}`, 0), "are corrupted"},
		{"key with a space", file(`{"__metadata__":{"kasmina.crc32c": "00000000","kasmina.digest":"crc32c"}}`, 0), "are corrupted"},
		{"digits cut off", file(`{"__metadata__":{"kasmina.digest":"crc32c","kasmina.crc32c":""}}`, 0), "are corrupted"},
	}

	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			err := loadBytes(test.file)
			if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), test.faults) {
				t.Errorf("error %.300v, expected one that mentions %q", err, test.faults)
			}
		})
	}
}

// TestHostileSizesAllocateNothing opens a file that claims a terabyte.
func TestHostileSizesAllocateNothing(t *testing.T) {
	hostile := [][]byte{
		binary.LittleEndian.AppendUint64(nil, maxHeader),
		file(`{"a":{"dtype":"F32","shape":[250000000000],"data_offsets":[0,1000000000000]}}`, 8),
	}
	for _, b := range hostile {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if err := loadBytes(b); !errors.Is(err, ErrCorrupt) {
			t.Errorf("error %v", err)
		}
		runtime.ReadMemStats(&after)
		if got := after.TotalAlloc - before.TotalAlloc; got > 50_000 {
			t.Errorf("%d bytes allocated for a file of %d", got, len(b))
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	if _, err := Open(filepath.Join(dir, "absent")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("absent file: %v", err)
	}
	if _, _, err := Load(dir); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("a folder: %v", err)
	}
}
