package fake

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"
	"unsafe"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// block is a device allocation. Addresses are never reused, so that stale ones are always detected. Gaps
// between blocks make overruns detectable as well.
type block struct {
	base  gpu.Ptr
	size  int
	data  []byte // allocated at the first access, so that planning a large model is cheap
	freed bool
}

const (
	firstAddress = gpu.Ptr(0x7f00_0000_0000)
	alignment    = 256
	gap          = 4096
)

// find returns the block that contains the n bytes at p, and their offset within it. It returns an error
// with status s if the bytes may not be accessed.
func (c *Context) find(p gpu.Ptr, n int, s gpu.Status) (b *block, at int, err error) {
	i, found := slices.BinarySearchFunc(c.blocks, p, func(b *block, p gpu.Ptr) int {
		return cmp.Compare(b.base, p)
	})
	if !found {
		i--
	}

	if i < 0 || p >= c.blocks[i].base+gpu.Ptr(c.blocks[i].size+gap/2) {
		return nil, 0, refused(s, fmt.Sprintf("%#x is not device memory", uint64(p)))
	}

	b = c.blocks[i]
	at = int(p - b.base)
	switch {
	case b.freed:
		return nil, 0, refused(s, fmt.Sprintf("%#x was freed", uint64(p)))
	case n < 0 || at+n > b.size:
		return nil, 0, refused(s, fmt.Sprintf("%d bytes at offset %d of an allocation of %d", n,
			at, b.size))
	}

	return b, at, nil
}

// resolve returns the n bytes at an address of device memory or pinned memory.
func (c *Context) resolve(p gpu.Ptr, n int, s gpu.Status) ([]byte, error) {
	for _, b := range c.hosts {
		base := addressOf(b)
		if p < base || p >= base+gpu.Ptr(len(b)) {
			continue
		}
		at := int(p - base)
		if n < 0 || at+n > len(b) {
			return nil, refused(s, fmt.Sprintf("%d bytes at offset %d of %d bytes of pinned memory", n,
				at, len(b)))
		}
		return b[at : at+n : at+n], nil
	}

	b, at, err := c.find(p, n, s)
	if err != nil {
		return nil, err
	}
	if b.data == nil {
		b.data = bytes.Repeat([]byte{0xFF}, b.size)
	}
	return b.data[at : at+n : at+n], nil
}

// Bytes returns device memory for use by fakes of other libraries. It doesn't wait for streams.
func (c *Context) Bytes(p gpu.Ptr, n int) ([]byte, error) {
	return lockedResult(c, "Bytes", func() ([]byte, error) { return c.resolve(p, n, gpu.IllegalAddress) })
}

// Alloc returns memory filled with 0xFF.
func (c *Context) Alloc(n int) (gpu.Ptr, error) {
	return lockedResult(c, "cuMemAlloc", func() (gpu.Ptr, error) {
		if n <= 0 {
			return 0, refused(gpu.InvalidValue, fmt.Sprintf("%d bytes requested", n))
		}
		if uint64(n) > c.free {
			return 0, gpu.NewOutOfMemory(n, c.free, c.info.Memory)
		}
		base := c.top
		c.top = (base + gpu.Ptr(n) + gap + alignment - 1) &^ (alignment - 1)
		c.free -= uint64(n)
		c.blocks = append(c.blocks, &block{base: base, size: n})
		return base, nil
	})
}

// Free waits for all work, as cuMemFree does, and then frees the memory.
func (c *Context) Free(p gpu.Ptr) error {
	if p == 0 {
		return nil
	}

	return c.locked("cuMemFree", func() error {
		for _, s := range slices.Sorted(maps.Keys(c.streams)) {
			if err := c.drain(c.streams[s]); err != nil {
				return err
			}
		}
		for _, b := range c.blocks {
			if b.base == p && !b.freed {
				b.freed, b.data = true, nil
				c.free += uint64(b.size)
				return nil
			}
		}
		return refused(gpu.InvalidValue, fmt.Sprintf("%#x is not an allocation", uint64(p)))
	})
}

// AllocHost returns Go memory that counts as pinned.
func (c *Context) AllocHost(n int) ([]byte, error) {
	return lockedResult(c, "cuMemHostAlloc", func() ([]byte, error) {
		if n <= 0 {
			return nil, refused(gpu.InvalidValue, fmt.Sprintf("%d bytes requested", n))
		}
		b := gpu.Bytes(make([]uint64, (n+7)/8))[:n:n]
		c.pinned.Add(b)
		c.hosts = append(c.hosts, b)
		c.pinnedBytes += n
		return b, nil
	})
}

// FreeHost overwrites the memory, so that tests detect pending work that uses it.
func (c *Context) FreeHost(b []byte) error {
	return c.locked("cuMemFreeHost", func() error {
		if err := c.pinned.Remove(b); err != nil {
			return err
		}
		c.pinnedBytes -= len(b)
		c.hosts = slices.DeleteFunc(c.hosts, func(h []byte) bool { return addressOf(h) == addressOf(b) })
		fill(b, 0xDD)
		return nil
	})
}

// addressOf returns the address of host memory, which the Go runtime does not move.
func addressOf(b []byte) gpu.Ptr { return gpu.Ptr(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// PinnedAddress returns an address that fake kernels pass to Slice.
func (c *Context) PinnedAddress(b []byte) (gpu.Ptr, error) {
	return lockedResult(c, "cuMemHostGetDevicePointer", func() (gpu.Ptr, error) {
		if len(b) == 0 || !c.pinned.Has(b) {
			return 0, refused(gpu.InvalidValue, fmt.Sprintf(
				"%d bytes that AllocHost did not return", len(b)))
		}
		return addressOf(b), nil
	})
}

// MemInfo accounts for the context's own allocations.
func (c *Context) MemInfo() (free, total uint64, err error) {
	free, err = lockedResult(c, "cuMemGetInfo", func() (uint64, error) { return c.free, nil })
	return free, c.info.Memory, err
}

// CopyToDevice copies when the stream reaches the copy. If the memory is not pinned, it waits for the
// copy.
func (c *Context) CopyToDevice(dst gpu.Ptr, src []byte, s gpu.Stream) error {
	return c.access("copy to the device", "cuMemcpyHtoDAsync", s, src, len(src),
		func(m [][]byte) { copy(m[0], src) }, dst)
}

func (c *Context) CopyToHost(dst []byte, src gpu.Ptr, s gpu.Stream) error {
	return c.access("copy to the host", "cuMemcpyDtoHAsync", s, dst, len(dst),
		func(m [][]byte) { copy(dst, m[0]) }, src)
}

// CopyOnDevice copies when the stream reaches the copy.
func (c *Context) CopyOnDevice(dst, src gpu.Ptr, n int, s gpu.Stream) error {
	return c.access("copy on the device", "cuMemcpyDtoDAsync", s, nil, n,
		func(m [][]byte) { copy(m[0], m[1]) }, dst, src)
}

func (c *Context) Memset8(dst gpu.Ptr, v byte, n int, s gpu.Stream) error {
	return c.access("memset", "cuMemsetD8Async", s, nil, n, func(m [][]byte) {
		fill(m[0], v)
	}, dst)
}

// fill sets all bytes to v. For speed, it copies increasing prefixes.
func fill(b []byte, v byte) {
	b[0] = v
	for n := 1; n < len(b); {
		n += copy(b[n:], b[:min(n, 8<<10)])
	}
}

// access enqueues work on n bytes of memory at each address, and waits for it if host memory is involved
// that is not pinned. The addresses are checked immediately, as the driver does for copies, and again
// when the work runs, since a graph may run it much later.
func (c *Context) access(name, call string, s gpu.Stream, host []byte, n int,
	do func(m [][]byte), at ...gpu.Ptr) error {
	if n == 0 {
		return nil
	}

	resolve := func(s gpu.Status) (m [][]byte, err error) {
		for _, p := range at {
			b, bad := c.resolve(p, n, s)
			m, err = append(m, b), cmp.Or(err, bad)
		}
		return m, err
	}

	return c.watched(gpu.Work{Name: name}, s, call, func() error {
		if _, err := resolve(gpu.InvalidValue); err != nil {
			return err
		}
		c.issue(s, Op{Call: call, Bytes: n}, func() error {
			m, err := resolve(gpu.IllegalAddress)
			if err == nil {
				do(m)
			}
			return err
		})
		if host == nil || c.pinned.Has(host) {
			return nil
		}
		return c.wait(c.streams[s])
	})
}
