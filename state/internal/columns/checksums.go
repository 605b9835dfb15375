package columns

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"slices"
	"sync"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// Block is how many rows are gathered at a time for their checksums. They are enough to make a loop
// over one column worth its start, few enough to stay in the first-level cache.
const Block = 64

// Checksums computes the CRC-32 of a table's rows: of the row's number and its elements. Several
// goroutines may use it at once.
type Checksums struct {
	columns []Column
	offsets []int // of each column in a row of bytes, which begins with the row's number
	stride  int
	rows    sync.Pool // *[]byte, of Block rows
}

// NewChecksums returns those of a table with the given columns. With padded set, zeros fill rows up
// to a multiple of 16 bytes, of which processors compute a CRC-32 faster than of the rest.
func NewChecksums(columns []Column, padded bool) *Checksums {
	c := &Checksums{columns: columns, stride: 4}
	for _, col := range columns {
		c.offsets = append(c.offsets, c.stride)
		c.stride += col.Width()
	}
	if padded {
		c.stride = (c.stride + 15) / 16 * 16
	}
	return c
}

// Row returns the bytes of a row that its checksum is of.
func (c *Checksums) Row(row int) []byte {
	b := make([]byte, c.stride)
	binary.LittleEndian.PutUint32(b, uint32(row))
	for k, col := range c.columns {
		col.Gather(b[c.offsets[k]:], c.stride, row, row+1)
	}
	return b
}

// SetRow sets a row to the bytes that Row returned.
func (c *Checksums) SetRow(row int, b []byte) {
	for k, col := range c.columns {
		col.Scatter(b[c.offsets[k]:], c.stride, row, row+1)
	}
}

// Each calls f with the checksum of every row in [lo, hi).
func (c *Checksums) Each(lo, hi int, f func(row int, sum uint32)) {
	rows, _ := c.rows.Get().(*[]byte)
	if rows == nil {
		b := make([]byte, Block*c.stride)
		rows = &b
	}
	defer c.rows.Put(rows)
	buf := *rows
	for ; lo < hi; lo += Block {
		end := min(lo+Block, hi)
		for i := lo; i < end; i++ {
			binary.LittleEndian.PutUint32(buf[(i-lo)*c.stride:], uint32(i))
		}
		for k, col := range c.columns {
			col.Gather(buf[c.offsets[k]:], c.stride, lo, end)
		}
		for i := lo; i < end; i++ {
			f(i, crc32.ChecksumIEEE(buf[(i-lo)*c.stride:][:c.stride]))
		}
	}
}

// Seal renews the checksums crc of the rows in [lo, hi).
func (c *Checksums) Seal(lo, hi int, crc []uint32) {
	c.Each(lo, hi, func(row int, sum uint32) { crc[row] = sum })
}

// Fault is a row that does not match its checksum. Its syndrome is its checksum XOR that of its
// elements.
type Fault struct {
	Row      int
	Syndrome uint32
}

// Faults returns the rows in [lo, hi) that do not match the checksums crc, in order.
func (c *Checksums) Faults(lo, hi int, crc []uint32) (found []Fault) {
	c.Each(lo, hi, func(row int, sum uint32) {
		if sum != crc[row] {
			found = append(found, Fault{row, sum ^ crc[row]})
		}
	})
	return found
}

// All is Faults of all rows, on all cores.
func (c *Checksums) All(crc []uint32) []Fault {
	const grain = 1024
	spans := make([][]Fault, (len(crc)+grain-1)/grain)
	cpu.Parallel(len(crc), grain, func(lo, hi int) { spans[lo/grain] = c.Faults(lo, hi, crc) })
	return slices.Concat(spans...)
}

// Locate says which bit of a row has flipped, if a single one has. CRC-32 is linear, and gives
// every bit of a message as short as this a syndrome of its own.
func (c *Checksums) Locate(syndrome uint32) string {
	for bit := range 32 {
		if syndrome == 1<<bit {
			return fmt.Sprintf("bit %d of its checksum has flipped", bit)
		}
	}
	row := make([]byte, c.stride)
	zero := crc32.ChecksumIEEE(row)
	for k, col := range c.columns {
		for bit := range 8 * col.Width() {
			at := &row[c.offsets[k]+bit/8]
			*at = 1 << (bit % 8)
			if crc32.ChecksumIEEE(row)^zero == syndrome {
				return fmt.Sprintf("bit %d of %s has flipped", bit, col.Name)
			}
			*at = 0
		}
	}
	return "more than one bit has changed"
}
