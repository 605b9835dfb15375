package safetensors

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	metadataName = "__metadata__"
	// maxHeader is the reference implementation's limit, in bytes.
	maxHeader = 100_000_000
	// digestKey announces sumsKey and the other way round; they differ in more than one byte, so that no small damage
	// hides both.
	digestKey   = "kasmina.digest"
	digestValue = "crc32c"
	sumsKey     = "kasmina.crc32c"
	sumDigits   = 8
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// entry is a tensor's line in the header; begin and end are offsets into data.
type entry struct {
	name       string
	dtype      DType
	shape      []int
	begin, end int64
}

// encodeHeader returns the length and header bytes that open a file, padded with spaces so that data is aligned to eight
// bytes, with the checksums sums of the entries and its own.
func encodeHeader(entries []entry, metadata map[string]string, sums []uint32) ([]byte, error) {
	all := maps.Clone(metadata)
	if all == nil {
		all = make(map[string]string)
	}
	var digits strings.Builder
	digits.WriteString(strings.Repeat("0", sumDigits))
	for _, s := range sums {
		fmt.Fprintf(&digits, "%08x", s)
	}
	all[digestKey], all[sumsKey] = digestValue, digits.String()

	b := make([]byte, 8, 256+128*len(entries))
	b = append(b, `{"`+metadataName+`":{`...)
	for i, key := range slices.Sorted(maps.Keys(all)) {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(appendString(b, key), ':')
		b = appendString(b, all[key])
	}
	b = append(b, '}')
	for _, e := range entries {
		b = append(appendString(append(b, ','), e.name), `:{"dtype":`...)
		b = append(appendString(b, string(e.dtype)), `,"shape":[`...)
		for i, d := range e.shape {
			if i > 0 {
				b = append(b, ',')
			}
			b = strconv.AppendInt(b, int64(d), 10)
		}
		b = fmt.Appendf(b, `],"data_offsets":[%d,%d]}`, e.begin, e.end)
	}
	b = append(b, '}')
	for len(b)%8 != 0 {
		b = append(b, ' ')
	}
	if len(b)-8 > maxHeader {
		return nil, fmt.Errorf("header of %d bytes, the format allows %d: %w", len(b)-8, maxHeader, ErrInvalid)
	}
	binary.LittleEndian.PutUint64(b, uint64(len(b)-8))
	at := sumsOffset(b)
	copy(b[at:], fmt.Sprintf("%08x", headerSum(b, at)))
	return b, nil
}

func appendString(b []byte, s string) []byte {
	quoted, _ := json.Marshal(s) // a string always has an encoding
	return append(b, quoted...)
}

// sumsOffset returns where the checksums' digits start in the length and header bytes, -1 when there are none. A quote
// inside a JSON string is escaped, so only the entry itself can match.
func sumsOffset(head []byte) int {
	key := []byte(`"` + sumsKey + `":"`)
	at := bytes.Index(head, key)
	if at < 0 || at+len(key)+sumDigits > len(head) {
		return -1
	}
	return at + len(key)
}

// headerSum is the checksum of the length and header bytes with the digits at position at read as zeros.
func headerSum(head []byte, at int) uint32 {
	sum := crc32.Update(0, castagnoli, head[:at])
	sum = crc32.Update(sum, castagnoli, bytes.Repeat([]byte{'0'}, sumDigits))
	return crc32.Update(sum, castagnoli, head[at+sumDigits:])
}

// takeSums removes the checksums from metadata and returns those of the n tensors, nil when the file has none. It fails
// when they are damaged or the header does not match its own.
func takeSums(head []byte, metadata map[string]string, n int) ([]uint32, error) {
	digest, announced := metadata[digestKey]
	digits, present := metadata[sumsKey]
	if !announced && !present {
		return nil, nil
	}
	delete(metadata, digestKey)
	delete(metadata, sumsKey)
	at := sumsOffset(head)
	if !announced || !present || at < 0 {
		return nil, fmt.Errorf("header: the metadata entries %q and %q are damaged", digestKey, sumsKey)
	}
	if digest != digestValue {
		return nil, fmt.Errorf("header: unknown digest %q, expected %q", digest, digestValue)
	}
	if len(digits) != sumDigits*(n+1) {
		return nil, fmt.Errorf("header: %d checksum digits, expected %d", len(digits), sumDigits*(n+1))
	}
	sums := make([]uint32, n+1)
	for i := range sums {
		d := digits[i*sumDigits:][:sumDigits]
		v, err := strconv.ParseUint(d, 16, 32)
		if err != nil {
			return nil, fmt.Errorf("header: checksum %d is %q, expected %d hex digits", i, d, sumDigits)
		}
		sums[i] = uint32(v)
	}
	// Compared as text: the checksum does not cover its own digits, and damage may turn one into upper case.
	if got := fmt.Sprintf("%08x", headerSum(head, at)); got != digits[:sumDigits] {
		return nil, fmt.Errorf("header: checksum %s, expected %s", got, digits[:sumDigits])
	}
	return sums[1:], nil
}

// parseHeader reads the header's JSON. The entries come back in data order and are known to be sound and to fill
// dataSize bytes exactly.
func parseHeader(header []byte, dataSize int64) ([]entry, map[string]string, error) {
	if len(header) == 0 || header[0] != '{' {
		return nil, nil, errors.New("header does not start with {")
	}
	if !utf8.Valid(header) || !json.Valid(header) {
		return nil, nil, errors.New("header is not valid UTF-8 JSON")
	}
	p := parser{json.NewDecoder(bytes.NewReader(header))}
	p.UseNumber()
	var entries []entry
	metadata := make(map[string]string)
	err := p.object(func(name string) error {
		if name == metadataName {
			return p.metadata(metadata)
		}
		e, err := p.entry(name)
		if err != nil {
			return fmt.Errorf("tensor %q: %w", name, err)
		}
		entries = append(entries, e)
		return nil
	})
	if err != nil {
		return nil, nil, fmt.Errorf("header: %w", err)
	}
	slices.SortStableFunc(entries, func(a, b entry) int {
		return cmp.Or(cmp.Compare(a.begin, b.begin), cmp.Compare(a.end, b.end))
	})
	var end int64
	for _, e := range entries {
		if e.begin != end {
			return nil, nil, fmt.Errorf("tensor %q: data begins at offset %d, expected %d: a gap or an overlap", e.name, e.begin, end)
		}
		if end = e.end; end > dataSize {
			return nil, nil, fmt.Errorf("tensor %q: data ends at offset %d, but the file has %d bytes of data", e.name, end, dataSize)
		}
	}
	if end != dataSize {
		return nil, nil, fmt.Errorf("the tensors end at offset %d, but the file has %d bytes of data", end, dataSize)
	}
	return entries, metadata, nil
}

// parser reads the header token by token, because decoding into maps and structs would let duplicate, misspelt and
// unknown keys pass.
type parser struct{ *json.Decoder }

func (p parser) metadata(into map[string]string) error {
	return p.object(func(key string) error {
		value, err := p.string()
		if err != nil {
			return fmt.Errorf("metadata %q: %w", key, err)
		}
		into[key] = value
		return nil
	})
}

func (p parser) entry(name string) (entry, error) {
	e := entry{name: name, begin: -1}
	var fields int
	err := p.object(func(key string) (err error) {
		fields++
		switch key {
		case "dtype":
			var s string
			s, err = p.string()
			if e.dtype = DType(s); err == nil && e.dtype.Size() == 0 {
				err = fmt.Errorf("unknown dtype %q", s)
			}
		case "shape":
			e.shape, err = p.shape()
		case "data_offsets":
			e.begin, e.end, err = p.offsets()
		default:
			err = fmt.Errorf("unknown field %q", key)
		}
		return err
	})
	if err != nil {
		return e, err
	}
	if fields != 3 { // known and without duplicates, so three are all
		return e, fmt.Errorf("%d fields, expected dtype, shape and data_offsets", fields)
	}
	n, err := elements(e.shape)
	if err != nil {
		return e, err
	}
	if want, got := int64(n)*int64(e.dtype.Size()), e.end-e.begin; got != want {
		return e, fmt.Errorf("%s of shape %v takes %d bytes, data_offsets [%d,%d] hold %d", e.dtype, e.shape, want, e.begin, e.end, got)
	}
	return e, nil
}

// object reads an object and calls field after every key, which must read the value.
func (p parser) object(field func(key string) error) error {
	if err := p.delim('{'); err != nil {
		return err
	}
	seen := make(map[string]bool)
	for p.More() {
		key, err := p.string()
		if err != nil {
			return err
		}
		if seen[key] {
			return fmt.Errorf("duplicate key %q", key)
		}
		seen[key] = true
		if err := field(key); err != nil {
			return err
		}
	}
	return p.delim('}')
}

func (p parser) delim(want json.Delim) error {
	t, err := p.Token()
	if err == nil && t != want {
		err = fmt.Errorf("found %v, expected %v", t, want)
	}
	return err
}

func (p parser) string() (string, error) {
	t, err := p.Token()
	if err != nil {
		return "", err
	}
	s, ok := t.(string)
	if !ok {
		return "", fmt.Errorf("found %v, expected a string", t)
	}
	return s, nil
}

// shape reads an array of dimensions.
func (p parser) shape() ([]int, error) {
	shape := []int{}
	err := p.array(strconv.IntSize-1, func(v int64) { shape = append(shape, int(v)) })
	return shape, err
}

// offsets reads an array of two offsets in order.
func (p parser) offsets() (begin, end int64, err error) {
	var v []int64
	if err := p.array(63, func(x int64) { v = append(v, x) }); err != nil {
		return 0, 0, err
	}
	if len(v) != 2 || v[0] > v[1] {
		return 0, 0, fmt.Errorf("data_offsets %v, expected [begin, end]", v)
	}
	return v[0], v[1], nil
}

// array reads whole numbers from 0 to 2^bits-1.
func (p parser) array(bits int, add func(int64)) error {
	if err := p.delim('['); err != nil {
		return err
	}
	for p.More() {
		t, err := p.Token()
		if err != nil {
			return err
		}
		number, ok := t.(json.Number)
		if !ok {
			return fmt.Errorf("found %v, expected a number", t)
		}
		v, err := strconv.ParseUint(number.String(), 10, bits)
		if err != nil {
			return fmt.Errorf("found %v, expected a whole number of at most %d bits", number, bits)
		}
		add(int64(v))
	}
	return p.delim(']')
}
