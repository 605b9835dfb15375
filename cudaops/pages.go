package cudaops

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/op/kvcache"
)

// pageMemory is the memory of a [kvcache.Pages] on a device. It closes with the pages.
type pageMemory struct {
	device *Device
	at     map[int]gpu.Ptr // by number; each attention layer has one number for keys and one for values
	sizes  map[int]int     // in bytes
}

// memoryOfPages returns the memory of pages with the given number, for the machines of a device.
func (d *Device) memoryOfPages(pages *kvcache.Pages, number, bytes int) (gpu.Ptr, error) {
	m, ok := pages.Memory.(*pageMemory)
	switch {
	case pages.Memory == nil:
		m = &pageMemory{d, map[int]gpu.Ptr{}, map[int]int{}}
		pages.Memory = m
	case !ok || m.device != d:
		return 0, errors.New("the pages of an attention are in use on another device: make other ones with " +
			"kvcache.NewPages")
	}

	if m.at[number] == 0 {
		p, err := d.ctx.Alloc(bytes)
		if err != nil {
			return 0, fmt.Errorf("allocating %s for keys and values: %w", gpu.Size(uint64(bytes)), err)
		}
		m.at[number], m.sizes[number] = p, bytes
	}

	if m.sizes[number] != bytes {
		return 0, fmt.Errorf("the pages of an attention have %d bytes in another machine, and %d in this one",
			m.sizes[number], bytes)
	}

	return m.at[number], nil
}

// Close frees the memory.
func (m *pageMemory) Close() error {
	var errs []error
	for _, p := range m.at {
		errs = append(errs, m.device.ctx.Free(p))
	}
	clear(m.at)
	return errors.Join(errs...)
}
