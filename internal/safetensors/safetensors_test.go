package safetensors

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
)

// random returns a generator and logs its seed if the test fails.
func random(t *testing.T) *rand.Rand {
	return randtest.New(t)
}

// fill returns a slice for dtype with n elements of random bits, including NaNs of every kind.
func fill(r *rand.Rand, dtype DType, n int) any {
	data := reflect.MakeSlice(dtype.sliceType(), n, n).Interface()
	for b := bytesOf(data); len(b) > 0; b = b[1:] {
		b[0] = byte(r.Uint32())
		if dtype == Bool {
			b[0] &= 1
		}
	}
	return data
}

// sample returns tensors of every type and of odd shapes in random order.
func sample(r *rand.Rand) []Tensor {
	var tensors []Tensor
	for i, s := range sliceTypes {
		for j, shape := range [][]int{{}, {1}, {3}, {2, 3, 5}, {0}, {4, 0, 7}, {1, 1, 1, 1, 9}} {
			n, _ := elements(shape)
			tensors = append(tensors, Tensor{fmt.Sprintf("layer.%d/%s \"%d\" ü<&>", i, s.dtype, j),
				s.dtype, shape, fill(r, s.dtype, n)})
		}
	}
	r.Shuffle(len(tensors), reflect.Swapper(tensors))
	return tensors
}

// same reports whether two tensors are identical, bit for bit.
func same(a, b Tensor) bool {
	return a.Name == b.Name && a.DType == b.DType && slices.Equal(a.Shape, b.Shape) &&
		reflect.TypeOf(a.Data) == reflect.TypeOf(b.Data) &&
		bytes.Equal(bytesOf(a.Data), bytesOf(b.Data))
}

func mustSave(t *testing.T, path string, tensors []Tensor, metadata map[string]string) []byte {
	t.Helper()
	if err := Save(path, tensors, metadata); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestRoundTrip(t *testing.T) {
	r := random(t)
	tensors := sample(r)
	tensors = append(tensors, Tensor{"large", BF16, []int{chunk + 1}, fill(r, BF16, chunk+1)})
	metadata := map[string]string{"": "empty key", "config": `{"a": "b"}`, "nul\x00": "\u2028<>",
		`"` + sumsKey + `":"`: sumsKey}
	path := filepath.Join(t.TempDir(), "model.safetensors")
	first := mustSave(t, path, tensors, metadata)
	if second := mustSave(t, path, tensors, metadata); !bytes.Equal(first, second) {
		t.Error("two saves of the same tensors differ")
	}

	loaded, gotMetadata, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}

	if !maps.Equal(gotMetadata, metadata) {
		t.Errorf("metadata %q, expected %q", gotMetadata, metadata)
	}

	if len(loaded) != len(tensors) {
		t.Fatalf("%d tensors, expected %d", len(loaded), len(tensors))
	}

	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}

	defer f.Close()

	if err := f.Verify(t.Context(), f.Names()...); err != nil || !f.HasDigest() {
		t.Errorf("Verify: %v, HasDigest %v", err, f.HasDigest())
	}

	for i, want := range tensors {
		got, err := f.Tensor(t.Context(), want.Name)
		if err != nil {
			t.Fatal(err)
		}
		if !same(got, want) {
			t.Errorf("Tensor(%q) = %v, expected %v", want.Name, got, want)
		}
		if dtype, shape, err := f.Info(want.Name); err != nil || dtype != want.DType ||
			!slices.Equal(shape, want.Shape) {
			t.Errorf("Info(%q) = %v, %v, %v", want.Name, dtype, shape, err)
		}
		if name := f.Names()[i]; loaded[i].Name != name ||
			!slices.ContainsFunc(tensors, func(t Tensor) bool {
				return same(t, loaded[i])
			}) {
			t.Errorf("Load()[%d] = %v, not what was saved as %q", i, loaded[i], name)
		}
	}

	for _, e := range f.entries {
		if at := f.dataStart + e.begin; at%int64(e.dtype.Size()) != 0 || f.dataStart%8 != 0 {
			t.Errorf("tensor %q of %s starts at byte %d", e.name, e.dtype, at)
		}
	}

	if _, err := f.Tensor(t.Context(), "absent"); !errors.Is(err, ErrNotFound) ||
		!strings.Contains(err.Error(), "absent") {
		t.Errorf("Tensor of an absent name: %v", err)
	}

	if _, _, err := f.Info("absent"); !errors.Is(err, ErrNotFound) {
		t.Errorf("Info of an absent name: %v", err)
	}
}

// TestBytes compares a whole file with the format's description, written out by hand.
func TestBytes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	got := mustSave(t, path, []Tensor{
		{"small", U16, []int{1}, []uint16{0x0102}},
		{"wide", F64, []int{}, []float64{1}},
	}, map[string]string{"z": "1"})
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}

	defer f.Close()

	at := sumsOffset(got)
	header := fmt.Sprintf(
		`{"__metadata__":{"kasmina.crc32c":%q,"kasmina.digest":"crc32c","z":"1"},`+
			`"wide":{"dtype":"F64","shape":[],"data_offsets":[0,8]},"small":{"dtype":"U16","shape":[1],"data_offsets":[8,10]}}`,
		got[at:at+3*sumDigits])
	header += strings.Repeat(" ", -len(header)&7)
	want := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	want = append(want, header...)
	want = binary.LittleEndian.AppendUint64(want, math.Float64bits(1))
	want = append(want, 2, 1)
	if !bytes.Equal(got, want) {
		t.Errorf("file is\n%q, expected\n%q", got, want)
	}
}

// TestOtherByteOrder pretends that this host uses the other byte order. Files must then contain the
// bytes of every element reversed, and load correctly.
func TestOtherByteOrder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	data := []uint32{0x01020304, 0xa0b0c0d0}
	here := mustSave(t, path, []Tensor{{"x", U32, []int{2}, data}}, nil)
	hostIsLittleEndian = !hostIsLittleEndian
	defer func() { hostIsLittleEndian = !hostIsLittleEndian }()
	other := mustSave(t, path, []Tensor{{"x", U32, []int{2}, data}}, nil)
	swapBytes(here[len(here)-8:], 4)
	if !bytes.Equal(here[len(here)-8:], other[len(other)-8:]) {
		t.Errorf("data % x, expected % x", other[len(other)-8:], here[len(here)-8:])
	}

	loaded, _, err := Load(path)
	if err != nil || !reflect.DeepEqual(loaded[0].Data, data) {
		t.Errorf("loaded %v, %v", loaded, err)
	}
}

func TestNew(t *testing.T) {
	for _, s := range sliceTypes {
		tensor, err := New("x", []int{2, 0}, reflect.MakeSlice(s.slice, 0, 0).Interface())
		if err != nil || tensor.DType.sliceType() != s.slice {
			t.Errorf("New of %v: %v, %v", s.slice, tensor, err)
		}
	}

	shape := []int{2}
	tensor, err := New("x", shape, []int8{1, 2})
	if shape[0] = 9; err != nil || tensor.Shape[0] != 2 {
		t.Errorf("New kept the caller's shape: %v, %v", tensor, err)
	}

	for _, data := range []any{nil, 3.0, []int{1, 2}, []string{"a", "b"}, [2]float64{},
		[]complex64{1, 2}, []float64{1}} {
		if _, err := New("weight", []int{2}, data); !errors.Is(err, ErrInvalid) ||
			!strings.Contains(err.Error(), "weight") {
			t.Errorf("New of %T: error %v", data, err)
		}
	}
}

func TestSaveRefuses(t *testing.T) {
	good := Tensor{"x", F32, []int{2}, []float32{1, 2}}
	tests := []struct {
		name     string
		tensors  []Tensor
		metadata map[string]string
		mentions string
	}{
		{"duplicate name", []Tensor{good, good}, nil, `"x"`},
		{"reserved name", []Tensor{{"__metadata__", F32, []int{2}, []float32{1, 2}}}, nil,
			"__metadata__"},
		{"empty name", []Tensor{{"", F32, []int{2}, []float32{1, 2}}}, nil, `""`},
		{"name not UTF-8", []Tensor{{"\xff", F32, []int{2}, []float32{1, 2}}}, nil, "UTF-8"},
		{"shape and length", []Tensor{{"x", F32, []int{3}, []float32{1, 2}}}, nil,
			"3 elements, data has 2"},
		{"negative dimension", []Tensor{{"x", F32, []int{-1, -2}, []float32{1, 2}}}, nil,
			"negative"},
		{"overflowing shape", []Tensor{{"x", F32, []int{math.MaxInt, math.MaxInt}, []float32{1}}},
			nil, "too many"},
		{"data of another type", []Tensor{{"x", F32, []int{2}, []float64{1, 2}}}, nil, "[]float64"},
		{"no data", []Tensor{{"x", F32, []int{2}, nil}}, nil, "<nil>"},
		{"unknown dtype", []Tensor{{"x", "F128", []int{2}, []float64{1, 2}}}, nil, "F128"},
		{"reserved metadata", nil, map[string]string{sumsKey: ""}, sumsKey},
		{"reserved metadata", nil, map[string]string{digestKey: ""}, digestKey},
		{"metadata key not UTF-8", nil, map[string]string{"\xff": ""}, "UTF-8"},
		{"metadata value not UTF-8", nil, map[string]string{"k": "\xff"}, `"k"`},
	}

	for _, test := range tests {
		dir := t.TempDir()
		path := filepath.Join(dir, "model")
		err := Save(path, test.tensors, test.metadata)
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), test.mentions) ||
			!strings.Contains(err.Error(), path) {
			t.Errorf("%s: error %v, expected one that mentions %q and the file",
				test.name, err, test.mentions)
		}
		if files, _ := os.ReadDir(dir); len(files) != 0 {
			t.Errorf("%s: %v was written", test.name, files)
		}
	}
}

func TestSaveFails(t *testing.T) {
	dir := t.TempDir()
	if err := Save(filepath.Join(dir, "absent", "model"), nil,
		nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("into an absent folder: %v", err)
	}

	// A directory in place of the file makes the save fail at the rename.
	path := filepath.Join(dir, "model")
	if err := os.MkdirAll(filepath.Join(path, "full"), 0o777); err != nil {
		t.Fatal(err)
	}

	if err := Save(path, []Tensor{{"x", U8, []int{1}, []uint8{1}}}, nil); err == nil {
		t.Error("replaced a folder")
	}

	if files, _ := os.ReadDir(dir); len(files) != 1 {
		t.Errorf("left %v", files)
	}
}

func TestConcurrentSaves(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model")
	done := make(chan error)
	const writers = 4
	for w := range writers {
		go func() {
			var err error
			for range 5 {
				data := bytes.Repeat([]byte{byte(w)}, 10_000)
				err = errors.Join(err, Save(path, []Tensor{{"x", U8, []int{len(data)}, data}}, nil))
			}
			done <- err
		}()
	}

	for range writers {
		// Windows refuses to replace a file that another goroutine is renaming. This is an error, not
		// corruption.
		if err := <-done; err != nil && runtime.GOOS != "windows" {
			t.Error(err)
		}
	}

	if _, _, err := Load(path); err != nil {
		t.Error(err)
	}
}

// TestSources checks that tensors generated during writing produce the same file, that a wrong size
// preserves the old file, and that Chunks returns the bytes.
func TestSources(t *testing.T) {
	x, err := New("x", []int{3}, []float32{1, 2, 3})
	require.NoError(t, err)
	dir := t.TempDir()
	whole, generated := filepath.Join(dir, "whole"), filepath.Join(dir, "generated")
	require.NoError(t, Save(whole, []Tensor{x}, nil))
	source := x.source()
	require.NoError(t, SaveSources(generated, []Source{source}, nil))
	want, err := os.ReadFile(whole)
	require.NoError(t, err)
	got, err := os.ReadFile(generated)
	require.NoError(t, err)
	require.Equal(t, want, got)
	source.Shape = []int{4}
	require.ErrorIs(t, SaveSources(generated, []Source{source}, nil), ErrInvalid)
	got, err = os.ReadFile(generated)
	require.NoError(t, err)
	require.Equal(t, want, got)
	f, err := Open(generated)
	require.NoError(t, err)
	defer f.Close()
	var all []byte
	visit := func(part []byte) error {
		all = append(all, part...)
		return nil
	}
	require.NoError(t, f.Chunks(t.Context(), "x", visit))
	require.Equal(t, want[len(want)-12:], all)
	require.ErrorIs(t, f.Chunks(t.Context(), "y", visit), ErrNotFound)
	require.ErrorIs(t, f.Chunks(t.Context(), "x", func([]byte) error { return io.EOF }), io.EOF)
}
