package safetensors

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"maps"
	"slices"
	"strconv"
	"strings"
)

const (
	metadataName = "__metadata__"
	// maxHeader is the reference implementation's limit, in bytes: enough for a million tensors.
	maxHeader = 100_000_000
	// maxRank is the maximum number of dimensions of a tensor. Models use up to five (convolutions in
	// space). With more, shapes would take up more memory than the header itself.
	maxRank = 16
	// maxMetadata is the maximum number of metadata entries. Writers that describe a whole training
	// run use a few dozen, since most of the data is in the values.
	maxMetadata = 1024
	// digestKey and sumsKey announce each other. They differ in more than one byte, so that no minor
	// corruption hides both.
	digestKey   = "kasmina.digest"
	digestValue = "crc32c"
	sumsKey     = "kasmina.crc32c"
	sumDigits   = 8
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// entry describes a tensor in the header. begin and end are offsets into data.
type entry struct {
	name       string
	dtype      DType
	shape      []int
	begin, end int64
}

// encodeHeader returns the length and header bytes at the start of a file, including the checksums
// sums of the entries and the header's own. The header is padded with spaces so that data is
// aligned to eight bytes.
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
		return nil, fmt.Errorf("header of %d bytes, the format allows %d: %w", len(b)-8,
			maxHeader, ErrInvalid)
	}

	binary.LittleEndian.PutUint64(b, uint64(len(b)-8))
	at := sumsOffset(b)
	copy(b[at:], fmt.Sprintf("%08x", headerSum(b, at)))
	return b, nil
}

// appendString appends s as a JSON string.
func appendString(b []byte, s string) []byte {
	quoted, _ := json.Marshal(s) // a string always has an encoding
	return append(b, quoted...)
}

// sumsOffset returns the position of the checksums' digits in the length and header bytes, or −1 if
// there are none. Quotes inside JSON strings are escaped, so only the entry itself can match.
func sumsOffset(head []byte) int {
	key := []byte(`"` + sumsKey + `":"`)
	at := bytes.Index(head, key)
	if at < 0 || at+len(key)+sumDigits > len(head) {
		return -1
	}
	return at + len(key)
}

// headerSum returns the checksum of the length and header bytes, with the digits at position at
// read as zeros.
func headerSum(head []byte, at int) uint32 {
	sum := crc32.Update(0, castagnoli, head[:at])
	sum = crc32.Update(sum, castagnoli, bytes.Repeat([]byte{'0'}, sumDigits))
	return crc32.Update(sum, castagnoli, head[at+sumDigits:])
}

// takeSums removes the checksums from metadata and returns the checksums of the n tensors, or nil if
// the file has no checksums. Damaged checksums, and a header that does not match its own, are errors.
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
		return nil, fmt.Errorf("header: the metadata entries %q and %q are corrupted", digestKey,
			sumsKey)
	}

	if digest != digestValue {
		return nil, fmt.Errorf("header: unknown digest %q, expected %q", digest, digestValue)
	}

	if len(digits) != sumDigits*(n+1) {
		return nil, fmt.Errorf("header: %d checksum digits, expected %d",
			len(digits), sumDigits*(n+1))
	}

	sums := make([]uint32, n+1)
	for i := range sums {
		d := digits[i*sumDigits:][:sumDigits]
		v, err := strconv.ParseUint(d, 16, 32)
		if err != nil {
			return nil, fmt.Errorf("header: checksum %d is %q, expected %d hex digits", i, d,
				sumDigits)
		}
		sums[i] = uint32(v)
	}

	// Compared as text, because the checksum does not cover its own digits, and corruption may turn a
	// digit into upper case.
	if got := fmt.Sprintf("%08x", headerSum(head, at)); got != digits[:sumDigits] {
		return nil, fmt.Errorf("header: checksum %s, expected %s", got, digits[:sumDigits])
	}

	return sums[1:], nil
}
