package safetensors

import (
	"bufio"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"os"
	"slices"
	"unicode/utf8"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
)

// chunk is the number of bytes read or written at a time. It keeps the number of system calls low
// and the bytes in the cache for the checksum. It is a multiple of every element size.
const chunk = 1 << 20

// Save writes tensors and metadata to a file at path, replacing it atomically like atomicfile.Write.
// If the process is killed at any point, path contains either the old file or the new one. Several
// processes may save to the same path, in which case the last one wins.
//
// Equal arguments produce identical files. Tensors are ordered by element size, largest first, and
// otherwise as given. Every tensor is therefore aligned to its element size although the format
// allows no gaps, and the first one is aligned to eight bytes.
//
// For invalid arguments, Save returns an error wrapping ErrInvalid and writes nothing. After any
// other error, the file at path is still complete, and the temporary file is removed.
func Save(path string, tensors []Tensor, metadata map[string]string) error {
	return saveTensors(path, tensors, metadata, atomicfile.Write)
}

// SavePart is to [Save] as atomicfile.WritePart is to atomicfile.Write: it saves a file that belongs
// to the main file at the path of.
func SavePart(path, of string, tensors []Tensor, metadata map[string]string) error {
	write := func(path string, write func(*os.File) error) error {
		return atomicfile.WritePart(path, of, write)
	}
	return saveTensors(path, tensors, metadata, write)
}

// writeFunc is the type of atomicfile.Write and its variants.
type writeFunc func(path string, write func(*os.File) error) error

// saveTensors implements Save and SavePart.
func saveTensors(path string, tensors []Tensor, metadata map[string]string, write writeFunc) error {
	sources := make([]Source, len(tensors))
	for i, t := range tensors {
		if err := t.check(); err != nil {
			return fmt.Errorf("safetensors: save %s: %w", path, err)
		}
		sources[i] = t.source()
	}
	return saveSources(path, sources, metadata, write)
}

// Source is a tensor whose data is generated while it is written, so that it need not fit in memory.
type Source struct {
	Name  string
	DType DType
	Shape []int
	// Write writes all elements in order, as little-endian bytes.
	Write func(io.Writer) error
}

// source returns a Source for a tensor in memory.
func (t Tensor) source() Source {
	return Source{t.Name, t.DType, t.Shape, func(w io.Writer) error {
		for part := range slices.Chunk(bytesOf(t.Data), chunk) {
			if !hostIsLittleEndian {
				part = slices.Clone(part)
				swapBytes(part, t.DType.Size())
			}
			if _, err := w.Write(part); err != nil {
				return err
			}
		}
		return nil
	}}
}

// SaveSources is like Save, but the tensors' data is generated during writing. If a source writes
// more or less data than its shape requires, the error wraps ErrInvalid and the old file remains.
func SaveSources(path string, sources []Source, metadata map[string]string) error {
	return saveSources(path, sources, metadata, atomicfile.Write)
}

// saveSources adds the path to errors of save.
func saveSources(path string, sources []Source, metadata map[string]string, write writeFunc) error {
	if err := save(path, sources, metadata, write); err != nil {
		return fmt.Errorf("safetensors: save %s: %w", path, err)
	}
	return nil
}

// save writes a file.
func save(path string, tensors []Source, metadata map[string]string, write writeFunc) error {
	tensors, entries, err := layOut(tensors, metadata)
	if err != nil {
		return err
	}

	head, err := encodeHeader(entries, metadata, make([]uint32, len(entries)))
	if err != nil {
		return err
	}

	return write(path, func(f *os.File) error {
		// The checksums are known only at the end, so the header is written last, into the space
		// left for it.
		if _, err := f.Seek(int64(len(head)), io.SeekStart); err != nil {
			return err
		}

		sums, err := writeData(f, tensors, entries)
		if err != nil {
			return err
		}
		if head, err = encodeHeader(entries, metadata, sums); err != nil {
			return err
		}
		_, err = f.WriteAt(head, 0)
		return err
	})
}

// layOut checks the arguments and assigns each tensor its position in data.
func layOut(tensors []Source, metadata map[string]string) ([]Source, []entry, error) {
	if most := maxMetadata - 2; len(metadata) > most { // in addition to the two checksum entries
		return nil, nil, fmt.Errorf("%d entries of metadata, want at most %d: %w", len(metadata),
			most, ErrInvalid)
	}

	for _, key := range slices.Sorted(maps.Keys(metadata)) {
		value := metadata[key]
		if key == digestKey || key == sumsKey {
			return nil, nil, fmt.Errorf("metadata key %q is reserved for checksums: %w", key,
				ErrInvalid)
		}
		if !utf8.ValidString(key) || !utf8.ValidString(value) {
			return nil, nil, fmt.Errorf("metadata %q: not valid UTF-8: %w", key, ErrInvalid)
		}
	}

	tensors = slices.Clone(tensors)
	slices.SortStableFunc(tensors, func(a, b Source) int { return b.DType.Size() - a.DType.Size() })
	entries := make([]entry, len(tensors))
	seen := make(map[string]bool, len(tensors))
	var offset int64
	for i, t := range tensors {
		n, err := elements(t.Shape)
		switch {
		case err != nil:
			return nil, nil, fmt.Errorf("tensor %q: %w: %w", t.Name, err, ErrInvalid)
		case t.DType.Size() == 0:
			return nil, nil, fmt.Errorf("tensor %q: unknown dtype %q: %w",
				t.Name, t.DType, ErrInvalid)
		case t.Name == "" || t.Name == metadataName || !utf8.ValidString(t.Name):
			return nil, nil, fmt.Errorf("tensor name %q: empty, reserved or not valid UTF-8: %w",
				t.Name, ErrInvalid)
		case len(t.Shape) > maxRank:
			return nil, nil, fmt.Errorf("tensor %q: %d dimensions, want at most %d: %w", t.Name,
				len(t.Shape), maxRank, ErrInvalid)
		case seen[t.Name]:
			return nil, nil, fmt.Errorf("two tensors are named %q: %w", t.Name, ErrInvalid)
		}

		seen[t.Name] = true
		end := offset + int64(n)*int64(t.DType.Size())
		entries[i] = entry{t.Name, t.DType, t.Shape, offset, end}
		offset = end
	}

	return tensors, entries, nil
}

// writeData writes the tensors' elements to w and returns their checksums.
func writeData(w io.Writer, tensors []Source, entries []entry) ([]uint32, error) {
	// The buffer collects small tensors; large chunks bypass it.
	buffered := bufio.NewWriterSize(w, chunk)
	sums := make([]uint32, len(tensors))
	for i, t := range tensors {
		s := &summed{w: buffered}
		err := t.Write(s)
		if want := entries[i].end - entries[i].begin; err == nil && s.bytes != want {
			err = fmt.Errorf("its source wrote %d bytes, but its shape requires %d: %w",
				s.bytes, want, ErrInvalid)
		}
		if err != nil {
			return nil, fmt.Errorf("tensor %q: %w", t.Name, err)
		}
		sums[i] = s.sum
	}

	return sums, buffered.Flush()
}

// summed counts the bytes that pass through it and computes their checksum.
type summed struct {
	w     io.Writer
	bytes int64
	sum   uint32
}

func (s *summed) Write(p []byte) (int, error) {
	s.sum = crc32.Update(s.sum, castagnoli, p)
	s.bytes += int64(len(p))
	return s.w.Write(p)
}
