package safetensors

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
	"unsafe"
)

// minEntry is the length of the shortest entry:
// `"":{"dtype":"U8","shape":[],"data_offsets":[0,0]}`.
const minEntry = 49

// parseHeader parses the header's JSON in one pass, using about three times its size in memory. For
// this reason it does not decode into maps, and names and values share the memory of header, which
// must not change afterwards. The entries are returned in the order of their data. They are valid,
// have distinct names and fill dataSize bytes exactly.
func parseHeader(header []byte, dataSize int64) ([]entry, map[string]string, error) {
	if len(header) == 0 || header[0] != '{' {
		return nil, nil, errors.New("header does not start with {")
	}

	if !utf8.Valid(header) {
		return nil, nil, errors.New("header is not valid UTF-8 JSON")
	}

	p := parser{scanner: scanner{text: unsafe.String(unsafe.SliceData(header), len(header))},
		dataSize: dataSize}
	p.entries = make([]entry, 0, min(strings.Count(p.text, `"dtype"`), len(p.text)/minEntry))
	if err := p.header(); err != nil {
		return nil, nil, fmt.Errorf("header: %w", err)
	}

	if err := p.inDataOrder(); err != nil {
		return nil, nil, err
	}

	if p.metadata == nil {
		p.metadata = map[string]string{}
	}

	return p.entries, p.metadata, nil
}

// parser collects the contents of a header. It is strict: duplicate, misspelled and unknown keys are
// errors, which decoding into structs would not detect.
type parser struct {
	scanner
	entries  []entry
	metadata map[string]string // nil until the metadata has been read
	dataSize int64
}

// header parses the whole header.
func (p *parser) header() error {
	for first := true; ; first = false {
		name, more, err := p.key(first)
		if err != nil {
			return err
		}
		if !more {
			return p.end()
		}

		if name == metadataName {
			if err := p.readMetadata(); err != nil {
				return err
			}
			continue
		}

		e, err := p.entry(name)
		if err != nil {
			return fmt.Errorf("tensor %.100q: %w", name, err)
		}
		p.entries = append(p.entries, e)
	}
}

// readMetadata parses the metadata.
func (p *parser) readMetadata() error {
	if p.metadata != nil {
		return fmt.Errorf("duplicate key %q", metadataName)
	}

	p.metadata = map[string]string{}
	if p.acceptNull() { // written by some programs for empty metadata
		return nil
	}

	for first := true; ; first = false {
		key, more, err := p.key(first)
		if err != nil || !more {
			return err
		}
		if _, twice := p.metadata[key]; twice {
			return fmt.Errorf("metadata: duplicate key %.100q", key)
		}
		if len(p.metadata) == maxMetadata {
			return fmt.Errorf("metadata: more than %d entries", maxMetadata)
		}
		if p.metadata[key], err = p.string(); err != nil {
			return fmt.Errorf("metadata %.100q: %w", key, err)
		}
	}
}

// entry parses the description of a tensor.
func (p *parser) entry(name string) (entry, error) {
	e := entry{name: name}
	var seen [3]bool
	for first := true; ; first = false {
		key, more, err := p.key(first)
		if err != nil {
			return e, err
		}
		if !more {
			break
		}

		field := slices.Index(fields[:], key)
		if field < 0 {
			return e, fmt.Errorf("unknown field %.100q", key)
		}
		if seen[field] {
			return e, fmt.Errorf("duplicate key %q", key)
		}
		seen[field] = true
		if err := p.field(&e, field); err != nil {
			return e, err
		}
	}

	n := 0
	for _, s := range seen {
		if s {
			n++
		}
	}

	if n != len(fields) {
		return e, fmt.Errorf("%d fields, expected dtype, shape and data_offsets", n)
	}

	return e, e.check()
}

// fields lists the fields of an entry.
var fields = [...]string{"dtype", "shape", "data_offsets"}

// field parses the value of the given field.
func (p *parser) field(e *entry, field int) error {
	switch field {
	case 0:
		s, err := p.string()
		if err != nil {
			return err
		}
		if e.dtype = DType(s); e.dtype.bits() == 0 {
			return fmt.Errorf("unknown dtype %.100q", s)
		}
	case 1:
		var dims [maxRank]int64
		n, err := p.array(dims[:], math.MaxInt)
		if err != nil {
			return err
		}
		e.shape = make([]int, n)
		for i := range e.shape {
			e.shape[i] = int(dims[i])
		}
	case 2:
		var at [2]int64
		n, err := p.array(at[:], math.MaxInt64)
		if err != nil {
			return fmt.Errorf("data_offsets: %w: expected [begin, end]", err)
		}
		if n != 2 || at[0] > at[1] {
			return fmt.Errorf("data_offsets %v, expected [begin, end]", at[:n])
		}
		e.begin, e.end = at[0], at[1]
	}

	return nil
}

// check returns an error unless the type and shape match the offsets.
func (e *entry) check() error {
	n, err := elements(e.shape)
	if err != nil {
		return err
	}

	bits := e.dtype.bits()
	want, whole := int64(n)*int64(bits/8), true
	if bits%8 != 0 {
		want, whole = int64(n)*int64(bits)/8, n*bits%8 == 0
	}

	if !whole {
		return fmt.Errorf("%s of shape %v takes %d bits, which is not a whole number of bytes",
			e.dtype, e.shape, n*bits)
	}

	if got := e.end - e.begin; got != want {
		return fmt.Errorf("%s of shape %v takes %d bytes, data_offsets [%d,%d] hold %d", e.dtype,
			e.shape, want, e.begin, e.end, got)
	}

	return nil
}

// inDataOrder sorts the entries by the position of their data, and checks that these fill data
// without gaps or overlaps.
func (p *parser) inDataOrder() error {
	byPlace := func(a, b entry) int {
		return cmp.Or(cmp.Compare(a.begin, b.begin), cmp.Compare(a.end,
			b.end))
	}
	if !slices.IsSortedFunc(p.entries, byPlace) {
		slices.SortStableFunc(p.entries, byPlace)
	}

	var end int64
	for _, e := range p.entries {
		if e.begin != end {
			return fmt.Errorf(
				"tensor %.100q: data starts at offset %d, expected %d: a gap or an overlap",
				e.name, e.begin, end)
		}
		if end = e.end; end > p.dataSize {
			return fmt.Errorf(
				"tensor %.100q: data ends at offset %d, but the file has %d bytes of data: %s",
				e.name, end, p.dataSize, cutShort)
		}
	}

	if end != p.dataSize {
		return fmt.Errorf("the tensors end at offset %d, but the file has %d bytes of data", end,
			p.dataSize)
	}

	return nil
}
