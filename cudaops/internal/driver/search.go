package driver

import (
	"fmt"

	"github.com/kasmina-go/kasmina/internal/sharedlib"
)

// Environment variables that name a library (the file, or a folder that holds it) and end the
// search for it.
const (
	cudaVariable = "KASMINA_LIBCUDA"
	blasVariable = "KASMINA_LIBCUBLASLT"
)

// cudaPlaces lists where NVIDIA's driver library may be. Drivers install it for the system's
// loader; the folders are those of containers, WSL and NixOS, where the loader may not know them.
func cudaPlaces(f sharedlib.Finder) []sharedlib.Place {
	name := "libcuda.so.1"
	if f.GOOS == "windows" {
		name = "nvcuda.dll"
	}
	if v := f.Getenv(cudaVariable); v != "" {
		return []sharedlib.Place{f.Override(v, name)}
	}
	switch f.GOOS {
	case "windows":
		return []sharedlib.Place{sharedlib.Place(name)}
	case "linux":
		places := []sharedlib.Place{sharedlib.Place(name), "libcuda.so"}
		for _, dir := range []string{"/usr/lib/" + f.Multiarch(), "/usr/lib64",
			"/usr/lib", "/usr/lib/wsl/lib",
			"/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/run/opengl-driver/lib",
			"/usr/local/cuda/compat"} {
			places = append(places, sharedlib.Place(dir+"/"+name))
		}
		return places
	}
	return nil
}

// blasPlaces lists where cuBLASLt may be, of the majors of CUDA that have the calls used here.
func blasPlaces(f sharedlib.Finder) []sharedlib.Place {
	name := "libcublasLt.so.%s"
	if f.GOOS == "windows" {
		name = "cublasLt64_%s.dll"
	}
	of := func(major string) sharedlib.Place { return sharedlib.Place(fmt.Sprintf(name, major)) }
	return f.Toolkit(blasVariable, string(of("1[0-9]")), "cu*", of("13"), of("12"))
}
