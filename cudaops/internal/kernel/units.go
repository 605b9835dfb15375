package kernel

import (
	"crypto/sha256"
	"embed"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
)

//go:generate go run ./build

// binaries are the fat binaries of all units. Each has machine code for sm_80, sm_89, sm_90a and
// sm_100, and PTX for other and later GPUs. It ends in the hash of the sources that it was made
// from.
//
// After a change to a .cu or .cuh file, go generate ./cudaops/internal/kernel makes anew what
// changed, with nvcc of CUDA 13.0 in PATH or CUDA_HOME. Tests fail while a unit and its sources
// differ.
//
//go:embed */*.fatbin
var binaries embed.FS

// units are the binaries by unit, read once.
var units = sync.OnceValue(func() map[string][]byte {
	paths, err := fs.Glob(binaries, "*/*.fatbin")
	if err != nil {
		panic(err) // the pattern is right
	}
	all := map[string][]byte{}
	for _, p := range paths {
		b, err := binaries.ReadFile(p)
		if err != nil {
			panic(err) // not of a file that was there when the program was built
		}
		all[strings.TrimSuffix(path.Base(p), ".fatbin")] = b
	}
	return all
})

// image is the fat binary of a unit, for the driver to load.
func image(unit string) ([]byte, error) {
	b, ok := units()[unit]
	if !ok {
		return nil, fmt.Errorf("kernel: there is no unit %q", unit)
	}
	return b[:len(b)-sha256.Size], nil
}

// build tells one build of all units from another, by the hashes of their sources.
var build = sync.OnceValue(func() string {
	h := sha256.New()
	for _, unit := range slices.Sorted(maps.Keys(units())) {
		b := units()[unit]
		h.Write(b[len(b)-sha256.Size:])
	}
	return fmt.Sprintf("kernels %x", h.Sum(nil)[:8])
})

// Build tells one build of the kernels from another.
func (k *Set) Build() string { return build() }
