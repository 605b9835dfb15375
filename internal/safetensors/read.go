package safetensors

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"os"
	"reflect"
	"slices"
)

// File is an open safetensors file whose header has been checked. Its methods may be called concurrently.
type File struct {
	name      string
	r         io.ReaderAt
	close     func() error
	dataStart int64
	entries   []entry // in data order
	index     map[string]int
	metadata  map[string]string
	sums      []uint32 // of the entries, nil when the file has none
}

// Open opens the file at path and checks its header: what is wrong with it comes as an ErrCorrupt. Close it after use.
func Open(path string) (*File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("safetensors: %w", err)
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("safetensors: %w", err)
	}
	file, err := NewFile(path, f, info.Size())
	if err != nil {
		f.Close()
		return nil, err
	}
	file.close = f.Close
	return file, nil
}

// NewFile reads the header of a safetensors file of size bytes from r; name stands for it in errors.
func NewFile(name string, r io.ReaderAt, size int64) (*File, error) {
	f := &File{name: name, r: r, close: func() error { return nil }}
	if size < 8 {
		return nil, f.corrupt("%d bytes, too short for a header", size)
	}
	var length [8]byte
	if err := f.readAt(length[:], 0); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint64(length[:])
	if n > maxHeader {
		return nil, f.corrupt("header of %d bytes, the format allows %d: it may be no safetensors file", n, maxHeader)
	}
	if n > uint64(size-8) {
		return nil, f.corrupt("header of %d bytes, but only %d follow its length", n, size-8)
	}
	head := make([]byte, 8+n)
	if err := f.readAt(head, 0); err != nil {
		return nil, err
	}
	f.dataStart = int64(len(head))
	var err error
	if f.entries, f.metadata, err = parseHeader(head[8:], size-f.dataStart); err != nil {
		return nil, f.corrupt("%v", err)
	}
	if f.sums, err = takeSums(head, f.metadata, len(f.entries)); err != nil {
		return nil, f.corrupt("%v", err)
	}
	f.index = make(map[string]int, len(f.entries))
	for i, e := range f.entries {
		f.index[e.name] = i
	}
	return f, nil
}

// Load reads a whole file, checksums included: the tensors in data order and the metadata.
func Load(path string) ([]Tensor, map[string]string, error) {
	f, err := Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	tensors := make([]Tensor, len(f.entries))
	for i := range tensors {
		if tensors[i], err = f.tensor(i); err != nil {
			return nil, nil, err
		}
	}
	return tensors, f.Metadata(), nil
}

// Close closes the file.
func (f *File) Close() error { return f.close() }

// Metadata returns a copy of the metadata, without the checksums.
func (f *File) Metadata() map[string]string { return maps.Clone(f.metadata) }

// HasDigest reports whether the file carries checksums, as all files from Save do.
func (f *File) HasDigest() bool { return f.sums != nil }

// Names returns the names of the tensors in data order.
func (f *File) Names() []string {
	names := make([]string, len(f.entries))
	for i, e := range f.entries {
		names[i] = e.name
	}
	return names
}

// Info returns the type and shape of a tensor without reading its data.
func (f *File) Info(name string) (DType, []int, error) {
	i, ok := f.index[name]
	if !ok {
		return "", nil, f.missing(name)
	}
	return f.entries[i].dtype, slices.Clone(f.entries[i].shape), nil
}

// Tensor reads one tensor and checks its checksum, if the file has checksums.
func (f *File) Tensor(name string) (Tensor, error) {
	i, ok := f.index[name]
	if !ok {
		return Tensor{}, f.missing(name)
	}
	return f.tensor(i)
}

// Verify reads the whole file and checks all checksums, holding one chunk at a time.
func (f *File) Verify() error {
	scratch := make([]byte, chunk)
	for i := range f.entries {
		if err := f.read(i, func(_, n int64) []byte { return scratch[:n] }); err != nil {
			return err
		}
	}
	return nil
}

func (f *File) tensor(i int) (Tensor, error) {
	e := f.entries[i]
	n := int(e.end-e.begin) / e.dtype.Size()
	data := reflect.MakeSlice(e.dtype.sliceType(), n, n).Interface()
	b := bytesOf(data)
	if err := f.read(i, func(at, n int64) []byte { return b[at : at+n] }); err != nil {
		return Tensor{}, err
	}
	if !hostIsLittleEndian {
		swapBytes(b, e.dtype.Size())
	}
	return Tensor{e.name, e.dtype, slices.Clone(e.shape), data}, nil
}

// read reads the data of entry i, chunk by chunk, into what buffer returns for an offset into the entry and a length,
// and checks it.
func (f *File) read(i int, buffer func(at, n int64) []byte) error {
	e := f.entries[i]
	var sum uint32
	for at := int64(0); at < e.end-e.begin; at += chunk {
		part := buffer(at, min(chunk, e.end-e.begin-at))
		if err := f.readAt(part, f.dataStart+e.begin+at); err != nil {
			return fmt.Errorf("tensor %q: %w", e.name, err)
		}
		sum = crc32.Update(sum, castagnoli, part)
		if e.dtype == Bool {
			if j := slices.IndexFunc(part, func(b byte) bool { return b > 1 }); j >= 0 {
				return f.corrupt("tensor %q: element %d is %#x, expected a bool", e.name, at+int64(j), part[j])
			}
		}
	}
	if f.sums != nil && sum != f.sums[i] {
		return f.corrupt("tensor %q: data checksum %08x, expected %08x (file bytes %d to %d)",
			e.name, sum, f.sums[i], f.dataStart+e.begin, f.dataStart+e.end)
	}
	return nil
}

// readAt fills b from the given position. The sizes were checked, so an early end means that the file has shrunk.
func (f *File) readAt(b []byte, at int64) error {
	n, err := f.r.ReadAt(b, at)
	switch {
	case n == len(b):
		return nil
	case errors.Is(err, io.EOF):
		return f.corrupt("ends at byte %d, expected %d more", at+int64(n), len(b)-n)
	}
	return fmt.Errorf("safetensors: %s: %w", f.name, err)
}

func (f *File) corrupt(format string, args ...any) error {
	return fmt.Errorf("safetensors: %s: %s: %w", f.name, fmt.Sprintf(format, args...), ErrCorrupt)
}

func (f *File) missing(name string) error {
	return fmt.Errorf("safetensors: %s: tensor %q: %w", f.name, name, ErrNotFound)
}
