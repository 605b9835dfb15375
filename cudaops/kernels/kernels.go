// Package kernels holds the CUDA C++ sources of the machine's kernels and what nvcc makes of them. Each .cu file is a unit,
// one family of ops; its .fatbin beside it has machine code for sm_80, sm_89, sm_90a and sm_100, and PTX for other and later
// GPUs, and ends in the hash of the sources that it was made from. After a change to a .cu or .cuh file, with nvcc of
// CUDA 13.0 in PATH, CUDA_HOME, or a Python environment that pip installed it into (drivers of CUDA 13.0 do not take a later one's PTX):
//
//	go generate ./cudaops/kernels
//
// rebuilds the units that changed. Tests fail while a unit and its sources differ.
package kernels

import (
	"crypto/sha256"
	"embed"
	"fmt"
)

//go:generate go run ./build

//go:embed *.fatbin
var fatbins embed.FS

// Image is the fat binary of a unit, named without an extension, for the driver to load.
func Image(unit string) ([]byte, error) {
	b, err := fatbins.ReadFile(unit + ".fatbin")
	if err != nil {
		return nil, fmt.Errorf("kernels: there is no unit %q", unit)
	}
	return b[:len(b)-sha256.Size], nil
}

// Hash tells one build of a unit from another.
func Hash(unit string) (string, error) {
	b, err := fatbins.ReadFile(unit + ".fatbin")
	if err != nil {
		return "", fmt.Errorf("kernels: there is no unit %q", unit)
	}
	return fmt.Sprintf("%x", sha256.Sum256(b))[:16], nil
}
