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

// binaries holds the fat binaries of all units. Each has machine code for sm_80, sm_89, sm_90a and
// sm_100, and PTX for other GPUs. The hash of its sources is at the end.
//
// After changing a .cu or .cuh file, run go generate ./cudaops/internal/kernel to recompile the
// affected units. It needs nvcc from CUDA 13.0, in CUDA_HOME or PATH. Tests fail while a binary and
// its sources differ.
//
//go:embed */*.fatbin
var binaries embed.FS

// Signatures is a [fatbin.Table] of all kernels. Tests check launches against it, since a GPU would
// otherwise read whatever lies where it expects a parameter.
//
//go:embed signatures.txt
var Signatures string

// units returns the binaries by unit, and a string that identifies the build. It reads them only
// once.
var units = sync.OnceValues(func() (images map[string][]byte, build string) {
	paths, err := fs.Glob(binaries, "*/*.fatbin")
	if err != nil {
		panic(err) // the pattern is valid
	}
	images = map[string][]byte{}
	h := sha256.New()
	for _, p := range paths {
		b, err := binaries.ReadFile(p)
		if err != nil {
			panic(err) // the file is embedded
		}
		end := len(b) - sha256.Size
		images[strings.TrimSuffix(path.Base(p), ".fatbin")] = b[:end]
		h.Write(b[end:])
	}
	return images, fmt.Sprintf("kernels %x", h.Sum(nil)[:8])
})

// Build returns a string that identifies the build of the kernels, based on the hashes of their
// sources.
func (k *Set) Build() string {
	_, build := units()
	return build
}

// HasUnit reports whether there is a unit with that name.
func HasUnit(name string) bool {
	images, _ := units()
	return images[name] != nil
}
