package kernel

import (
	"crypto/sha256"
	"embed"
	"fmt"
	"io/fs"
	"path"
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

// Build tells one build of some units from another, by the hashes of their sources.
func (k *Set) Build(names ...string) string {
	build := "kernels"
	for _, name := range names {
		b := units()[name]
		build += fmt.Sprintf(" %x", b[len(b)-sha256.Size:][:8])
	}
	return build
}
