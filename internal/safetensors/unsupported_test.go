package safetensors

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"
)

// fileOf returns a file with a header followed by zeros.
func fileOf(t *testing.T, header string, size int) (*File, error) {
	t.Helper()
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	b = append(append(b, header...), make([]byte, size)...)
	return NewFile("file", bytes.NewReader(b), int64(len(b)))
}

// TestNullMetadata checks files with null metadata, which the reference implementation loads.
func TestNullMetadata(t *testing.T) {
	const tensor = `"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}`
	for _, header := range []string{
		`{"__metadata__":null,` + tensor + `}`,
		`{` + tensor + `, "__metadata__" : null }`,
	} {
		f, err := fileOf(t, header, 2)
		if err != nil {
			t.Fatalf("%s: %v", header, err)
		}
		if _, err := f.Tensor(t.Context(), "a"); err != nil || len(f.Metadata()) > 0 || f.HasDigest() {
			t.Fatalf("%s: %v, metadata %v", header, err, f.Metadata())
		}
	}

	// The reference implementation rejects these too.
	for _, header := range []string{
		`{"__metadata__":null,"__metadata__":{},` + tensor + `}`,
		`{"__metadata__":{"a":null},` + tensor + `}`,
		`{"__metadata__":nul,` + tensor + `}`,
		`{"__metadata__":nulll,` + tensor + `}`,
		`{"a":null}`,
		`{"a":{"dtype":"U8","shape":null,"data_offsets":[0,2]}}`,
	} {
		if _, err := fileOf(t, header, 2); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: %v", header, err)
		}
	}
}

// TestUnsupportedTypes checks that a file with types that the format defines but this package
// cannot read is valid, that its other tensors can be read, and that all sizes are checked.
func TestUnsupportedTypes(t *testing.T) {
	for dtype, bits := range map[string]int{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8,
		"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "C64": 64} {
		header := func(elements, size int) string {
			return fmt.Sprintf(`{"a":{"dtype":%q,"shape":[%d],"data_offsets":[0,%d]},`+
				`"b":{"dtype":"U8","shape":[2],"data_offsets":[%d,%d]}}`, dtype, elements, size, size,
				size+2)
		}
		f, err := fileOf(t, header(8, bits), bits+2)
		if err != nil {
			t.Fatalf("%s: %v", dtype, err)
		}
		if d, shape, err := f.Info("a"); err != nil || string(d) != dtype || shape[0] != 8 {
			t.Errorf("%s: Info is %v %v %v", dtype, d, shape, err)
		}
		if _, err := f.Tensor(t.Context(), "b"); err != nil {
			t.Error(err)
		}

		_, tensor := f.Tensor(t.Context(), "a")
		for method, err := range map[string]error{
			"Tensor": tensor,
			"Read":   f.Read(t.Context(), "a", []uint8{}),
			"Chunks": f.Chunks(t.Context(), "a", func([]byte) error { return nil }),
			"Part":   f.Part(t.Context(), "a", 0, 1, func([]byte) error { return nil }),
		} {
			if !errors.Is(err, ErrUnsupported) || errors.Is(err, ErrCorrupt) ||
				!strings.Contains(err.Error(), dtype) {
				t.Errorf("%s of %s: %v", method, dtype, err)
			}
		}

		if err := f.Verify(t.Context(), "a"); err != nil {
			t.Error(err)
		}
		if _, err := fileOf(t, header(9, bits), bits+2); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s of a wrong size: %v", dtype, err)
		}
	}
}
