package safetensors

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"math"
	"reflect"
	"slices"

	"github.com/kasmina-go/kasmina/internal/memory"
	"github.com/kasmina-go/kasmina/internal/regular"
)

// File is an open safetensors file with a valid header. Its methods may be called concurrently.
type File struct {
	name      string
	r         io.ReaderAt
	close     func() error
	dataStart int64
	entries   []entry // in data order
	byName    []int32 // indices of entries, ordered by name
	metadata  map[string]string
	sums      []uint32 // checksums of the entries; nil if the file has none
}

// Open opens the file at path and checks its header. If the header is corrupted, the error wraps
// ErrCorrupt. Anything but a regular file is rejected at once. The caller must close the file.
func Open(path string) (*File, error) {
	f, size, err := regular.Open(path)
	if err != nil {
		return nil, fmt.Errorf("safetensors: %w", err)
	}

	file, err := NewFile(path, f, size)
	if err != nil {
		f.Close()
		return nil, err
	}

	file.close = f.Close
	return file, nil
}

// NewFile reads the header of a safetensors file of size bytes from r. name appears in errors.
func NewFile(name string, r io.ReaderAt, size int64) (*File, error) {
	f := &File{name: name, r: r, close: func() error { return nil }}
	if size < 8 {
		return nil, f.corrupt("%d bytes, too short for a header: %s", size, cutShort)
	}

	var length [8]byte
	if err := f.readAt(length[:], 0); err != nil {
		return nil, err
	}

	n := binary.LittleEndian.Uint64(length[:])
	if n > maxHeader {
		return nil,
			f.corrupt("header of %d bytes, the format allows %d: is this a safetensors file?",
				n, maxHeader)
	}

	if n > uint64(size-8) {
		return nil, f.corrupt("header of %d bytes, but only %d follow its length: %s", n, size-8,
			cutShort)
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

	if err := f.sortNames(); err != nil {
		return nil, f.corrupt("header: %v", err)
	}

	return f, nil
}

// sortNames creates the index of names, which needs a tenth of a map's memory.
func (f *File) sortNames() error {
	f.byName = make([]int32, len(f.entries)) // a header may contain millions of entries
	for i := range f.byName {
		f.byName[i] = int32(i)
	}

	slices.SortFunc(f.byName, func(a, b int32) int {
		return cmp.Compare(f.entries[a].name,
			f.entries[b].name)
	})
	for i := range f.byName[:max(0, len(f.byName)-1)] {
		if name := f.entries[f.byName[i]].name; name == f.entries[f.byName[i+1]].name {
			return fmt.Errorf("duplicate key %.100q", name)
		}
	}

	return nil
}

// find returns the index of a tensor's entry.
func (f *File) find(name string) (int, error) {
	i, ok := slices.BinarySearchFunc(f.byName, name, func(i int32,
		name string) int {
		return cmp.Compare(f.entries[i].name, name)
	})
	if !ok {
		return 0, fmt.Errorf("safetensors: %s: tensor %.100q: %w", f.name, name, ErrNotFound)
	}
	return int(f.byName[i]), nil
}

// Load reads a whole file and verifies its checksums. It returns the tensors in the order of their
// data, and the metadata. It uses as much memory as the file demands, so to read an untrusted file,
// open it and read only the tensors you need.
func Load(path string) ([]Tensor, map[string]string, error) {
	f, err := Open(path)
	if err != nil {
		return nil, nil, err
	}

	defer f.Close()

	tensors := make([]Tensor, len(f.entries))
	for i := range tensors {
		if tensors[i], err = f.tensor(context.Background(), i); err != nil {
			return nil, nil, err
		}
	}

	return tensors, f.Metadata(), nil
}

// Close closes the file.
func (f *File) Close() error { return f.close() }

// Metadata returns a copy of the metadata, without the checksums.
func (f *File) Metadata() map[string]string { return maps.Clone(f.metadata) }

// HasDigest reports whether the file has checksums, as all files written by Save do.
func (f *File) HasDigest() bool { return f.sums != nil }

// Names returns the names of the tensors in the order of their data.
func (f *File) Names() []string {
	names := make([]string, len(f.entries))
	for i, e := range f.entries {
		names[i] = e.name
	}
	return names
}

// Info returns the type and shape of a tensor without reading its data.
func (f *File) Info(name string) (DType, []int, error) {
	i, err := f.find(name)
	if err != nil {
		return "", nil, err
	}
	return f.entries[i].dtype, slices.Clone(f.entries[i].shape), nil
}

// Bytes returns the size of a tensor's data, or 0 if the file does not contain the tensor.
func (f *File) Bytes(name string) int64 {
	i, err := f.find(name)
	if err != nil {
		return 0
	}
	return f.entries[i].end - f.entries[i].begin
}

// Tensor reads a tensor and verifies its checksum, if the file has checksums. It allocates as much
// memory as Bytes returns.
func (f *File) Tensor(ctx context.Context, name string) (Tensor, error) {
	i, err := f.find(name)
	if err != nil {
		return Tensor{}, err
	}
	return f.tensor(ctx, i)
}

// Read reads a tensor into data, a slice of the tensor's type and size. After an error, data may be
// partly overwritten.
func (f *File) Read(ctx context.Context, name string, data any) error {
	i, err := f.find(name)
	if err != nil {
		return err
	}

	e := f.entries[i]
	if err := f.supports(e); err != nil {
		return err
	}

	n := int((e.end - e.begin) / int64(e.dtype.Size()))
	if reflect.TypeOf(data) != e.dtype.sliceType() || reflect.ValueOf(data).Len() != n {
		return fmt.Errorf("safetensors: %s: tensor %.100q has %d elements of type %s, which do "+
			"not fit a %T of %d: %w", f.name, name, n, e.dtype, data,
			reflect.ValueOf(data).Len(), ErrInvalid)
	}

	return f.fill(ctx, i, data)
}

// Verify reads the data of the named tensors, one chunk at a time, and verifies their checksums.
func (f *File) Verify(ctx context.Context, names ...string) error {
	scratch := make([]byte, min(chunk, f.dataSize()))
	for _, name := range names {
		i, err := f.find(name)
		if err == nil {
			err = f.read(ctx, i, func(_, n int64) []byte { return scratch[:n] }, nil)
		}
		if err != nil {
			return err
		}
	}

	return nil
}

// dataSize returns the size of all data.
func (f *File) dataSize() int64 {
	if len(f.entries) == 0 {
		return 0
	}
	return f.entries[len(f.entries)-1].end
}

// tensor reads the tensor of entry i.
func (f *File) tensor(ctx context.Context, i int) (Tensor, error) {
	e := f.entries[i]
	if err := f.supports(e); err != nil {
		return Tensor{}, err
	}

	size := e.end - e.begin
	err := memory.Check("its data take", uint64(size))
	if err == nil && size > math.MaxInt {
		err = fmt.Errorf("its data take %d bytes, more than this computer can address", size)
	}

	if err != nil {
		return Tensor{}, fmt.Errorf("safetensors: %s: tensor %.100q: %w", f.name, e.name, err)
	}

	n := int(size) / e.dtype.Size()
	data := reflect.MakeSlice(e.dtype.sliceType(), n, n).Interface()
	if err := f.fill(ctx, i, data); err != nil {
		return Tensor{}, err
	}

	return Tensor{e.name, e.dtype, slices.Clone(e.shape), data}, nil
}

// supports returns an error if elements of the entry's type cannot be read.
func (f *File) supports(e entry) error {
	if _, no := unsupported[e.dtype]; no {
		return fmt.Errorf("safetensors: %s: tensor %.100q is of type %s, which cannot be read: %w",
			f.name, e.name, e.dtype, ErrUnsupported)
	}
	return nil
}

// fill reads the data of entry i into a slice of the right type and size.
func (f *File) fill(ctx context.Context, i int, data any) error {
	b := bytesOf(data)
	if err := f.read(ctx, i, func(at, n int64) []byte { return b[at : at+n] }, nil); err != nil {
		return err
	}
	if !hostIsLittleEndian {
		swapBytes(b, f.entries[i].dtype.Size())
	}
	return nil
}

// Chunks calls visit with the data of a tensor, in order and as little-endian bytes. Each part
// consists of whole elements and is valid only during the call. Chunks verifies the checksum at the
// end, and returns an error of visit unchanged.
func (f *File) Chunks(ctx context.Context, name string, visit func(part []byte) error) error {
	i, err := f.find(name)
	if err != nil {
		return err
	}
	if err := f.supports(f.entries[i]); err != nil {
		return err
	}
	scratch := make([]byte, min(chunk, f.entries[i].end-f.entries[i].begin))
	return f.read(ctx, i, func(_, n int64) []byte { return scratch[:n] }, visit)
}

// Part calls visit, like Chunks, with bytes [from, to) of a tensor, which must start and end at
// elements. It verifies no checksum. Goroutines may read parts concurrently.
func (f *File) Part(ctx context.Context, name string, from, to int64,
	visit func(part []byte) error) error {
	i, err := f.find(name)
	if err != nil {
		return err
	}

	e := f.entries[i]
	if err := f.supports(e); err != nil {
		return err
	}

	if size := int64(e.dtype.Size()); from < 0 || to < from || to > e.end-e.begin ||
		from%size != 0 || to%size != 0 {
		return fmt.Errorf("safetensors: %s: bytes %d to %d of tensor %.100q, which has %d", f.name,
			from, to, name, e.end-e.begin)
	}

	scratch := make([]byte, min(chunk, to-from))
	for at := from; at < to; at += chunk {
		if ctx.Err() != nil {
			return fmt.Errorf("safetensors: %s: reading tensor %.100q: %w", f.name, name,
				context.Cause(ctx))
		}
		part := scratch[:min(chunk, to-at)]
		if err := f.readAt(part, f.dataStart+e.begin+at); err != nil {
			return fmt.Errorf("tensor %.100q: %w", name, err)
		}
		if err := visit(part); err != nil {
			return err
		}
	}

	return nil
}

// read reads the data of entry i, chunk by chunk, and verifies it. buffer returns the destination
// of a chunk, given its offset in the entry and its length. visit, unless nil, is called with each
// chunk.
func (f *File) read(ctx context.Context, i int, buffer func(at, n int64) []byte,
	visit func(part []byte) error) error {
	e := f.entries[i]
	var sum uint32
	for at := int64(0); at < e.end-e.begin; at += chunk {
		if ctx.Err() != nil {
			return fmt.Errorf("safetensors: %s: reading tensor %.100q: %w", f.name, e.name,
				context.Cause(ctx))
		}

		part := buffer(at, min(chunk, e.end-e.begin-at))
		if err := f.readAt(part, f.dataStart+e.begin+at); err != nil {
			return fmt.Errorf("tensor %.100q: %w", e.name, err)
		}

		if f.sums != nil {
			sum = crc32.Update(sum, castagnoli, part)
		}
		if e.dtype == Bool {
			if j := slices.IndexFunc(part, func(b byte) bool { return b > 1 }); j >= 0 {
				return f.corrupt("tensor %.100q: element %d is %#x, expected a bool", e.name,
					at+int64(j),
					part[j])
			}
		}

		if visit != nil {
			if err := visit(part); err != nil {
				return err
			}
		}
	}

	if f.sums != nil && sum != f.sums[i] {
		return f.corrupt("tensor %.100q: data checksum %08x, expected %08x (file bytes %d to %d)",
			e.name, sum, f.sums[i], f.dataStart+e.begin, f.dataStart+e.end)
	}

	return nil
}

// readAt fills b from the given position. Since sizes were checked, a premature end means that the
// file has shrunk.
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

// cutShort explains that a file is truncated.
const cutShort = "the file is cut short, as by an incomplete copy"

// corrupt returns an error wrapping ErrCorrupt.
func (f *File) corrupt(format string, args ...any) error {
	return fmt.Errorf("safetensors: %s: %s: %w", f.name, fmt.Sprintf(format, args...), ErrCorrupt)
}
