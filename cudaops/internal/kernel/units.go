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
// changed, with nvcc of CUDA 13.0 in CUDA_HOME or PATH. Tests fail while a unit and its sources
// differ.
//
//go:embed */*.fatbin
var binaries embed.FS

// Signatures is a [fatbin.Table] of all kernels. Tests check launches against it: a GPU would read
// whatever lies where it expects a parameter.
//
//go:embed signatures.txt
var Signatures string

// units are the binaries by unit, read once, and what tells one build of them from another.
var units = sync.OnceValues(func() (images map[string][]byte, build string) {
	paths, err := fs.Glob(binaries, "*/*.fatbin")
	if err != nil {
		panic(err) // the pattern is right
	}
	images = map[string][]byte{}
	h := sha256.New()
	for _, p := range paths {
		b, err := binaries.ReadFile(p)
		if err != nil {
			panic(err) // not of a file that was there when the program was built
		}
		end := len(b) - sha256.Size
		images[strings.TrimSuffix(path.Base(p), ".fatbin")] = b[:end]
		h.Write(b[end:])
	}
	return images, fmt.Sprintf("kernels %x", h.Sum(nil)[:8])
})

// Build tells one build of the kernels from another, by the hashes of their sources.
func (k *Set) Build() string {
	_, build := units()
	return build
}

// HasUnit reports whether there is a unit with that name.
func HasUnit(name string) bool {
	images, _ := units()
	return images[name] != nil
}
