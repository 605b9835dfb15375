package fake

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// block is a piece of device memory. Addresses are never used twice, so that a stale one is always
// noticed. Blocks lie apart, so that running over the end of one is noticed too.
type block struct {
	base  gpu.Ptr
	size  int
	data  []byte // made at the first access: planning large models costs nothing
	freed bool
}

const (
	firstAddress = gpu.Ptr(0x7f00_0000_0000)
	alignment    = 256
	gap          = 4096
)

// resolve finds the n bytes at an address, or says why they are not to be touched.
func (c *Context) resolve(p gpu.Ptr, n int) ([]byte, string) {
	i, found := slices.BinarySearchFunc(c.blocks, p, func(b *block, p gpu.Ptr) int {
		return cmp.Compare(b.base, p)
	})
	if !found {
		i--
	}
	if i < 0 || p >= c.blocks[i].base+gpu.Ptr(c.blocks[i].size+gap/2) {
		return nil, fmt.Sprintf("%#x is not device memory", uint64(p))
	}
	b := c.blocks[i]
	at := int(p - b.base)
	switch {
	case b.freed:
		return nil, fmt.Sprintf("%#x was freed", uint64(p))
	case n < 0 || at+n > b.size:
		return nil, fmt.Sprintf("%d bytes at offset %d of an allocation of %d", n, at, b.size)
	}
	if b.data == nil {
		b.data = bytes.Repeat([]byte{0xFF}, b.size)
	}
	return b.data[at : at+n : at+n], ""
}

// Bytes is device memory itself, for what stands for other libraries that work there. Streams are
// not waited for.
func (c *Context) Bytes(p gpu.Ptr, n int) ([]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b, bad := c.resolve(p, n)
	if bad != "" {
		return nil, fmt.Errorf("fake: %s", bad)
	}
	return b, nil
}

func (c *Context) live() (sum uint64) {
	for _, b := range c.blocks {
		if !b.freed {
			sum += uint64(b.size)
		}
	}
	return sum
}

// Alloc returns memory filled with 0xFF.
func (c *Context) Alloc(n int) (gpu.Ptr, error) {
	const call = "cuMemAlloc"
	return asked(c, call, func() (gpu.Ptr, error) {
		if n <= 0 {
			return 0, gpu.NewError(call, gpu.InvalidValue, "", fmt.Sprintf("%d bytes asked for", n))
		}
		if free := c.info.Memory - c.live(); uint64(n) > free {
			return 0, gpu.NewOutOfMemory(n, free, c.info.Memory)
		}
		base := firstAddress
		if len(c.blocks) > 0 {
			last := c.blocks[len(c.blocks)-1]
			base = (last.base + gpu.Ptr(last.size) + gap + alignment - 1) &^ (alignment - 1)
		}
		c.blocks = append(c.blocks, &block{base: base, size: n})
		c.ledger.Allocated(base, n)
		return base, nil
	})
}

// Free waits for all work, as cuMemFree does, and frees.
func (c *Context) Free(p gpu.Ptr) error {
	const call = "cuMemFree"
	if p == 0 {
		return nil
	}
	return c.locked(call, func() error {
		if err := c.drainAll(call); err != nil {
			return err
		}
		for _, b := range c.blocks {
			if b.base == p && !b.freed {
				b.freed, b.data = true, nil
				c.ledger.Freed(p)
				return nil
			}
		}
		return gpu.NewError(call, gpu.InvalidValue, "",
			fmt.Sprintf("%#x is not an allocation", uint64(p)))
	})
}

// AllocHost returns Go memory that counts as pinned.
func (c *Context) AllocHost(n int) ([]byte, error) {
	const call = "cuMemHostAlloc"
	return asked(c, call, func() ([]byte, error) {
		if n <= 0 {
			return nil, gpu.NewError(call, gpu.InvalidValue, "",
				fmt.Sprintf("%d bytes asked for", n))
		}
		b := gpu.Bytes(make([]uint64, (n+7)/8))[:n:n]
		c.ledger.Pin(b)
		return b, nil
	})
}

// FreeHost overwrites the memory, so that work still on its way is noticed.
func (c *Context) FreeHost(b []byte) error {
	const call = "cuMemFreeHost"
	return c.locked(call, func() error {
		if !c.ledger.Unpin(b) {
			return gpu.NewError(call, gpu.InvalidValue, "", "not a slice that AllocHost returned")
		}
		for i := range b {
			b[i] = 0xDD
		}
		return nil
	})
}

// MemInfo counts the context's own allocations.
func (c *Context) MemInfo() (free, total uint64, err error) {
	free, err = asked(c, "cuMemGetInfo", func() (uint64, error) {
		return c.info.Memory - c.live(), nil
	})
	return free, c.info.Memory, err
}

// CopyToDevice copies when the stream gets there; with memory that is not pinned it waits for that.
func (c *Context) CopyToDevice(dst gpu.Ptr, src []byte, s gpu.Stream) error {
	work := gpu.Stats{ToDevice: gpu.Copies{Count: 1, Bytes: int64(len(src))}}
	return c.copyHost(Op{Call: "cuMemcpyHtoDAsync", Stream: s, Dst: dst, Bytes: len(src)}, src, dst,
		work,
		func(device []byte) { copy(device, src) })
}

// CopyToHost is the other direction.
func (c *Context) CopyToHost(dst []byte, src gpu.Ptr, s gpu.Stream) error {
	work := gpu.Stats{ToHost: gpu.Copies{Count: 1, Bytes: int64(len(dst))}}
	return c.copyHost(Op{Call: "cuMemcpyDtoHAsync", Stream: s, Src: src, Bytes: len(dst)}, dst, src,
		work,
		func(device []byte) { copy(dst, device) })
}

func (c *Context) copyHost(o Op, host []byte, p gpu.Ptr, work gpu.Stats,
	do func(device []byte)) error {
	if o.Bytes == 0 {
		return nil
	}
	return c.locked(o.Call, func() error {
		async, err := c.ledger.CheckHost(o.Call, host, o.Stream)
		if err != nil {
			return err
		}
		if err := c.enqueue(o, work, []gpu.Ptr{p}, func(m [][]byte) {
			do(m[0])
		}); err != nil || async {
			return err
		}
		return c.drain(o.Call, c.streams[o.Stream])
	})
}

// CopyOnDevice copies when the stream gets there.
func (c *Context) CopyOnDevice(dst, src gpu.Ptr, n int, s gpu.Stream) error {
	return c.fill(Op{Call: "cuMemcpyDtoDAsync", Stream: s, Dst: dst, Src: src, Bytes: n},
		gpu.Stats{OnDevice: gpu.Copies{Count: 1, Bytes: int64(n)}}, []gpu.Ptr{dst, src},
		func(m [][]byte) { copy(m[0], m[1]) })
}

// Memset8 sets bytes.
func (c *Context) Memset8(dst gpu.Ptr, v byte, n int, s gpu.Stream) error {
	return c.fill(Op{Call: "cuMemsetD8Async", Stream: s, Dst: dst, Bytes: n},
		gpu.Stats{Memsets: 1}, []gpu.Ptr{dst},
		func(m [][]byte) {
			if len(m[0]) == 0 {
				return
			}
			m[0][0] = v
			for n := 1; n < len(m[0]); n *= 2 { // choices clear caches by many bytes
				copy(m[0][n:], m[0][:n])
			}
		})
}

// Memset32 sets words; the address must be a multiple of 4.
func (c *Context) Memset32(dst gpu.Ptr, v uint32, n int, s gpu.Stream) error {
	if dst%4 != 0 {
		return gpu.NewError("cuMemsetD32Async", gpu.InvalidValue, "",
			"the address is not a multiple of 4")
	}
	return c.fill(Op{Call: "cuMemsetD32Async", Stream: s, Dst: dst, Bytes: 4 * n},
		gpu.Stats{Memsets: 1},
		[]gpu.Ptr{dst}, func(m [][]byte) {
			words := gpu.View[uint32](m[0])
			for i := range words {
				words[i] = v
			}
		})
}

func (c *Context) fill(o Op, work gpu.Stats, at []gpu.Ptr, do func(m [][]byte)) error {
	if o.Bytes < 0 {
		return gpu.NewError(o.Call, gpu.InvalidValue, "",
			fmt.Sprintf("negative length %d", o.Bytes))
	}
	if o.Bytes == 0 {
		return nil
	}
	return c.locked(o.Call, func() error { return c.enqueue(o, work, at, do) })
}

// enqueue puts work on o.Bytes of memory at each address on a stream. The memory is checked now, as
// the driver does for copies, and again when the work runs, since a graph may run it long after.
func (c *Context) enqueue(o Op, work gpu.Stats, at []gpu.Ptr, do func(m [][]byte)) error {
	resolve := func(s gpu.Status) ([][]byte, error) {
		m := make([][]byte, len(at))
		for i, p := range at {
			var why string
			if m[i], why = c.resolve(p, o.Bytes); why != "" {
				return nil, gpu.NewError(o.Call, s, "", why)
			}
		}
		return m, nil
	}
	if _, err := resolve(gpu.InvalidValue); err != nil {
		return err
	}
	return c.issue(o, work, func() error {
		m, err := resolve(gpu.IllegalAddress)
		if err == nil {
			do(m)
		}
		return err
	})
}
