package columns

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"slices"
	"sync"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// Block is the number of rows that are gathered at a time for their checksums: enough to amortize
// the start of a loop over one column, and few enough to stay in the first-level cache.
const Block = 64

// Checksums computes the CRC-32 of each row of a table, over the row's number and elements. It may
// be used concurrently.
type Checksums struct {
	columns []Column
	offsets []int // position of each column in the bytes of a row, after the row's number
	stride  int
	rows    sync.Pool // *[]byte with the bytes of Block rows
}

// NewChecksums returns the checksums of a table with the given columns. With padded set, zeros
// extend rows to a multiple of 16 bytes, because processors compute a CRC-32 faster over blocks of
// that size.
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

// Row returns the bytes that the checksum of a row covers.
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

// Seal stores the checksums of rows [lo, hi) in crc.
func (c *Checksums) Seal(lo, hi int, crc []uint32) {
	c.Each(lo, hi, func(row int, sum uint32) { crc[row] = sum })
}

// Fault is a row that does not match its checksum. Syndrome is the stored checksum XOR the computed
// one.
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

// All returns the faults of all rows, using all cores.
func (c *Checksums) All(crc []uint32) []Fault {
	const grain = 1024
	spans := make([][]Fault, (len(crc)+grain-1)/grain)
	cpu.Parallel(len(crc), grain, func(lo, hi int) { spans[lo/grain] = c.Faults(lo, hi, crc) })
	return slices.Concat(spans...)
}

// Locate describes the flipped bit of a row, if there is exactly one. CRC-32 is linear and gives each
// bit of such a short message its own syndrome.
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
