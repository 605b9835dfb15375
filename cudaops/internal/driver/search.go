package driver

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Environment variables that name a library (the file, or a folder that holds it) and end the
// search for it.
const (
	cudaVariable = "KASMINA_LIBCUDA"
	blasVariable = "KASMINA_LIBCUBLASLT"
)

// finder lists the places where a library may be, best first, on one system.
type finder struct {
	goos, goarch string
	getenv       func(string) string
	lookPath     func(string) (string, error)
	glob         func(string) ([]string, error)
}

func hostFinder() finder {
	return finder{runtime.GOOS, runtime.GOARCH, os.Getenv, exec.LookPath, filepath.Glob}
}

// A place is a name for the system's loader, which searches LD_LIBRARY_PATH and its own cache (on
// Windows the folder System32 alone), or, if it has a folder in it, a pattern of files.
type place string

func (p place) isName() bool { return !strings.ContainsAny(string(p), `/\`) }

// override turns the value of a variable into a place: a folder stands for the library's files in
// it.
func (f finder) override(value, pattern string) place {
	if inside := filepath.Join(value, pattern); len(f.files(place(inside))) > 0 {
		return place(inside)
	}
	if p := place(value); !p.isName() {
		return p
	}
	return place("." + string(filepath.Separator) + value)
}

// trusts reports whether a place may be loaded from. On Windows whoever can write to the working
// folder, or to one of PATH, could plant a DLL there: a path must be absolute, and openLibrary
// finds names in System32 alone.
func (f finder) trusts(p place) bool {
	if f.goos != "windows" || p.isName() {
		return true
	}
	slash := func(i int) bool { return len(p) > i && (p[i] == '\\' || p[i] == '/') }
	return slash(0) && slash(1) || len(p) > 1 && p[1] == ':' && slash(2)
}

func (f finder) files(p place) []string {
	if p.isName() {
		return []string{string(p)}
	}
	files, err := f.glob(string(p))
	if err != nil {
		return nil
	}
	return files
}

// cuda lists where NVIDIA's driver library may be. Drivers install it for the system's loader; the
// folders are those of containers, WSL and NixOS, where the loader may not know them.
func (f finder) cuda() []place {
	name := "libcuda.so.1"
	if f.goos == "windows" {
		name = "nvcuda.dll"
	}
	if v := f.getenv(cudaVariable); v != "" {
		return []place{f.override(v, name)}
	}
	switch f.goos {
	case "windows":
		return []place{place(name)}
	case "linux":
		places := []place{place(name), "libcuda.so"}
		for _, dir := range []string{"/usr/lib/" + f.multiarch(), "/usr/lib64", "/usr/lib", "/usr/lib/wsl/lib",
			"/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/run/opengl-driver/lib", "/usr/local/cuda/compat"} {
			places = append(places, place(dir+"/"+name))
		}
		return places
	}
	return nil
}

func (f finder) multiarch() string {
	if f.goarch == "arm64" {
		return "aarch64-linux-gnu"
	}
	return "x86_64-linux-gnu"
}

// cublasLt lists where cuBLASLt may be.
func (f finder) cublasLt() []place {
	pattern := "libcublasLt.so.1[0-9]"
	if f.goos == "windows" {
		pattern = "cublasLt64_1[0-9].dll"
	}
	var names []place
	for major := newestCUDA; major >= oldestCUDA; major-- {
		names = append(names, place(strings.Replace(pattern, "1[0-9]", strconv.Itoa(major), 1)))
	}
	return f.toolkit(blasVariable, pattern, names...)
}

// toolkit lists where a library of CUDA's may be, given a pattern of its files and the names that
// the loader is asked for: the variable, LD_LIBRARY_PATH and the loader's cache, CUDA's toolkits,
// the system's packages, and Python's packages of the environment in use. On Windows every place
// but System32 is below an absolute path that a variable gives.
func (f finder) toolkit(variable, pattern string, names ...place) []place {
	sub, pip := []string{"lib64", "lib"}, "lib"
	if f.goos == "windows" {
		sub, pip = []string{"bin", filepath.Join("bin", "x64")}, "bin"
	}
	if v := f.getenv(variable); v != "" {
		return []place{f.override(v, pattern)}
	}
	if f.goos != "linux" && f.goos != "windows" {
		return nil
	}
	var places []place
	in := func(elem ...string) {
		p := place(filepath.Join(append(elem, pattern)...))
		if elem[0] != "" && f.trusts(p) && !slices.Contains(places, p) {
			places = append(places, p)
		}
	}
	if f.goos == "linux" {
		for _, dir := range filepath.SplitList(f.getenv("LD_LIBRARY_PATH")) {
			in(dir)
		}
	}
	for _, root := range []string{f.getenv("CUDA_HOME"), f.getenv("CUDA_PATH"), f.getenv("CONDA_PREFIX")} {
		for _, s := range sub {
			in(root, s)
		}
	}
	places = append(places, names...)
	if f.goos == "linux" {
		for _, dir := range []string{"/usr/local/cuda/lib64", "/usr/local/cuda-[0-9]*/lib64", "/opt/cuda/lib64",
			"/usr/lib/" + f.multiarch(), "/usr/lib64"} {
			in(dir)
		}
	} else {
		toolkits := filepath.Join("NVIDIA GPU Computing Toolkit", "CUDA", "v*", "bin")
		in(f.getenv("ProgramFiles"), toolkits, "x64")
		in(f.getenv("ProgramFiles"), toolkits)
	}
	for _, site := range f.sitePackages() {
		in(site, "nvidia", "cu*", pip) // nvidia/cublas/lib, and nvidia/cu13/lib since CUDA 13
		if f.goos == "windows" {
			in(site, "nvidia", "cu*", "bin", "x86_64")
		}
	}
	return places
}

// The majors of CUDA whose cuBLASLt has the calls used here.
const newestCUDA, oldestCUDA = 13, 12

// sitePackages lists the folders of Python packages: those of the environment that is active or
// (but not on Windows) first in PATH, then the user's, then the system's.
func (f finder) sitePackages() []string {
	dirs := filepath.SplitList(f.getenv("PYTHONPATH"))
	lib := filepath.Join("lib", "python3*")
	roots := []string{f.getenv("VIRTUAL_ENV"), f.getenv("CONDA_PREFIX")}
	if f.goos == "windows" {
		lib = "Lib"
	} else if exe, err := f.lookPath("python3"); err == nil {
		roots = append(roots, filepath.Dir(filepath.Dir(exe)))
	}
	if home := f.getenv("HOME"); home != "" {
		roots = append(roots, filepath.Join(home, ".local"))
	}
	if f.goos == "linux" {
		roots = append(roots, "/usr/local", "/usr")
	}
	for _, root := range roots {
		if root == "" {
			continue
		}
		dirs = append(dirs, filepath.Join(root, lib, "site-packages"))
		if f.goos == "linux" && (root == "/usr" || root == "/usr/local") {
			dirs = append(dirs, filepath.Join(root, lib, "dist-packages"))
		}
	}
	return dirs
}

// load tries the places in turn, and in each the newest major that is at most newest first, until
// accept takes a library. It returns what accept returned, or the attempts.
func load[T any](f finder, places []place, newest int, accept func(path string) (T, error)) (T, []gpu.Attempt) {
	var tried []gpu.Attempt
	seen := map[string]bool{}
	for _, p := range places {
		files := f.files(p)
		if !f.trusts(p) {
			files, tried = nil, append(tried, gpu.Attempt{Place: string(p), Reason: "not an absolute path, which Windows needs"})
		} else if len(files) == 0 {
			tried = append(tried, gpu.Attempt{Place: string(p), Reason: "no such file"})
		}
		slices.SortStableFunc(files, func(a, b string) int { return cmp.Compare(major(b), major(a)) })
		for _, file := range files {
			if seen[file] {
				continue
			}
			seen[file] = true
			if m := major(file); newest > 0 && m > newest {
				tried = append(tried, gpu.Attempt{Place: file, Reason: fmt.Sprintf("needs a driver for CUDA %d; this one is for CUDA %d", m, newest)})
				continue
			}
			t, err := accept(file)
			if err == nil {
				return t, nil
			}
			tried = append(tried, gpu.Attempt{Place: file, Reason: err.Error()})
		}
	}
	var none T
	return none, tried
}

// major is the number at the end of a library's name: 13 in libcublasLt.so.13 and
// cublasLt64_13.dll.
func major(path string) int {
	name := strings.TrimSuffix(filepath.Base(path), ".dll")
	i := strings.LastIndexAny(name, "._")
	n, err := strconv.Atoi(name[i+1:])
	if err != nil {
		return 0
	}
	return n
}
