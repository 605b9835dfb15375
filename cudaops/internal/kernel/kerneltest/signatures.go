package kerneltest

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/fatbin"
)

// Signatures returns the signatures of all kernels, as written by go generate.
var Signatures = sync.OnceValues(func() (table fatbin.Table, err error) {
	err = table.UnmarshalText([]byte(kernel.Signatures))
	return table, err
})

// Kernels returns the kernels that a unit's fat binary has for a compute capability, with the
// signatures of the table. It returns an error if the table does not fit the binary. [fake.Config]
// uses it as its Images.
func Kernels(image []byte, capability int) (map[string][]gpu.Param, error) {
	read, _ := binaries.LoadOrStore(binaryKey{&image[0], capability},
		sync.OnceValues(func() (map[string][]gpu.Param, error) {
			all, err := fatbin.Layouts(image, capability)
			if err != nil {
				return nil, err
			}
			table, err := Signatures()
			if err != nil {
				return nil, err
			}
			for _, name := range slices.Sorted(maps.Keys(all)) {
				if all[name], err = table[name].Of(all[name]); err != nil {
					return nil, fmt.Errorf("kerneltest: %s: %w: run go generate", name, err)
				}
			}
			return all, nil
		}))

	return read.(func() (map[string][]gpu.Param, error))()
}

// binaries caches the results of Kernels.
var binaries sync.Map

type binaryKey struct {
	image      *byte
	capability int
}
