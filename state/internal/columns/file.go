package columns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// The file of a table consists of a head followed by the arrays, one after another. The head consists
// of the magic number, the length and checksum of a header (uint32, little endian), and the header.
const (
	Magic  = "KASMINA\n"
	Prefix = len(Magic) + 8 // size of the head without its header
)

// Head returns the head of a file with the given header, with capacity for the given number of
// further bytes.
func Head(header []byte, more int) []byte {
	head := make([]byte, 0, Prefix+len(header)+more)
	head = append(head, Magic...)
	head = binary.LittleEndian.AppendUint32(head, uint32(len(header)))
	head = binary.LittleEndian.AppendUint32(head, crc32.ChecksumIEEE(header))
	return append(head, header...)
}

// ParseHead returns the header at the start of data and the bytes after it.
func ParseHead(data []byte) (header, rest []byte, err error) {
	if len(data) < Prefix || string(data[:len(Magic)]) != Magic {
		return nil, nil, fmt.Errorf("the data does not start with %q", Magic)
	}

	size := binary.LittleEndian.Uint32(data[len(Magic):])
	sum := binary.LittleEndian.Uint32(data[len(Magic)+4:])
	rest = data[Prefix:]
	if uint64(len(rest)) < uint64(size) {
		return nil, nil, fmt.Errorf("the header is %d bytes long, but only %d bytes follow", size,
			len(rest))
	}
	if crc32.ChecksumIEEE(rest[:size]) != sum {
		return nil, nil, errors.New("the header does not match its checksum")
	}
	return rest[:size], rest[size:], nil
}

// AppendRows appends the arrays of n rows to a file.
func AppendRows(data []byte, columns []Column, n int) []byte {
	for _, c := range columns {
		start := len(data)
		data = append(data, make([]byte, n*c.Width())...)
		c.Gather(data[start:], c.Width(), 0, n)
	}
	return data
}

// ReadRows fills empty columns with the n rows that follow the head of a file. It returns an error,
// before allocating anything, unless data has exactly the size of n rows.
func ReadRows(columns []Column, n int, data []byte) error {
	if want := uint64(n) * uint64(RowWidth(columns)); uint64(len(data)) != want {
		return fmt.Errorf("%d seeds take %d bytes, but %d follow the header", n, want, len(data))
	}
	for _, c := range columns {
		c.Make(n)
		c.Scatter(data, c.Width(), 0, n)
		data = data[n*c.Width():]
	}
	return nil
}

// Field describes a column in a header.
type Field struct {
	Name string `json:"name"`
	Type string `json:"type"`
}

// Fields returns the descriptions of columns.
func Fields(columns []Column) (fields []Field) {
	for _, c := range columns {
		fields = append(fields, Field{c.Name, c.Type()})
	}
	return fields
}

// Empty returns empty columns for the given descriptions.
func Empty(fields []Field) (columns []Column, err error) {
	for _, f := range fields {
		c, err := New(f.Name, f.Type)
		if err != nil {
			return nil, err
		}
		columns = append(columns, c)
	}
	return columns, nil
}
