package kernel

import (
	"crypto/sha256"
	"embed"
	"fmt"
)

//go:generate go run ./build

// binaries are the fat binaries by unit.
var binaries = map[string][]byte{}

// Register makes the units of a family known, which are the .fatbin files of its folder. Each has
// machine code for sm_80, sm_89, sm_90a and sm_100, and PTX for other and later GPUs. It ends in
// the hash of the sources that it was made from.
//
// After a change to a .cu or .cuh file, go generate ./cudaops/internal/kernel makes anew what
// changed. It looks for nvcc of CUDA 13.0 in PATH, in CUDA_HOME, and where pip has installed it.
// Tests fail while a unit and its sources differ.
func Register(units embed.FS) {
	files, err := units.ReadDir(".")
	if err != nil {
		panic(err) // not of a folder that was there when the program was built
	}
	for _, f := range files {
		b, err := units.ReadFile(f.Name())
		if err != nil {
			panic(err)
		}
		binaries[f.Name()[:len(f.Name())-len(".fatbin")]] = b
	}
}

// image is the fat binary of a unit, for the driver to load.
func image(unit string) ([]byte, error) {
	b, ok := binaries[unit]
	if !ok {
		return nil, fmt.Errorf("kernel: there is no unit %q", unit)
	}
	return b[:len(b)-sha256.Size], nil
}

// hash tells one build of a unit from another.
func hash(unit string) (string, error) {
	b, ok := binaries[unit]
	if !ok {
		return "", fmt.Errorf("kernel: there is no unit %q", unit)
	}
	return fmt.Sprintf("%x", sha256.Sum256(b))[:16], nil
}

// Build tells one build of some units from another.
func (k *Set) Build(units ...string) string {
	build := "kernels"
	for _, u := range units {
		h, err := hash(u)
		if err != nil {
			h = err.Error()
		}
		build += " " + h
	}
	return build
}
