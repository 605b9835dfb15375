// Package sharedlib finds and loads shared libraries at run time, under the names and in the
// directories commonly used by people and package managers.
package sharedlib

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
)

// Attempt is a location that was searched for a library, and the reason it failed.
type Attempt struct{ Place, Reason string }

// Finder lists the possible locations of a library on one system, best first.
type Finder struct {
	GOOS, GOARCH string
	Getenv       func(string) string
	LookPath     func(string) (string, error)
	Glob         func(string) ([]string, error)
}

// Host returns a Finder for this computer.
func Host() Finder {
	return Finder{runtime.GOOS, runtime.GOARCH, os.Getenv, exec.LookPath, filepath.Glob}
}

// Place is a name for the system's loader or, if it contains a separator, a pattern of files. The
// loader searches LD_LIBRARY_PATH and its cache; on Windows, only System32.
type Place string

// IsName reports whether the place is a name for the loader.
func (p Place) IsName() bool { return !strings.ContainsAny(string(p), `/\`) }

// Override converts the value of an environment variable to a place. If the value is a directory, the
// place is the library's files in it.
func (f Finder) Override(value, pattern string) Place {
	if inside := filepath.Join(value, pattern); len(f.files(Place(inside))) > 0 {
		return Place(inside)
	}
	if p := Place(value); !p.IsName() {
		return p
	}
	return Place("." + string(filepath.Separator) + value)
}

// Trusts reports whether libraries may be loaded from a place. On Windows, anyone who can write to
// the working directory, or to a directory in PATH, could plant a DLL there. Paths must therefore be
// absolute, and Open looks up names in System32 only.
func (f Finder) Trusts(p Place) bool {
	if f.GOOS != "windows" || p.IsName() {
		return true
	}
	slash := func(i int) bool { return len(p) > i && (p[i] == '\\' || p[i] == '/') }
	return slash(0) && slash(1) || len(p) > 1 && p[1] == ':' && slash(2)
}

// files returns the files that match a place, or the name itself.
func (f Finder) files(p Place) []string {
	if p.IsName() {
		return []string{string(p)}
	}
	files, err := f.Glob(string(p))
	if err != nil {
		return nil
	}
	return files
}

// Multiarch returns the name of the library directory on Debian and its derivatives.
func (f Finder) Multiarch() string {
	if f.GOARCH == "arm64" {
		return "aarch64-linux-gnu"
	}
	return "x86_64-linux-gnu"
}

// Toolkit returns the possible places of a CUDA library. pattern matches its files, pip is the
// directory of its Python package within nvidia, and names are the names for the loader.
//
// If the environment variable is set, it is the only place. Otherwise the places are, in order:
// LD_LIBRARY_PATH, the directories in CUDA_HOME, CUDA_PATH and CONDA_PREFIX, the loader, the usual
// directories of CUDA toolkits and system packages, and the Python packages of the active
// environment. On Windows, all places except System32 are below an absolute path from an environment
// variable.
func (f Finder) Toolkit(variable, pattern, pip string, names ...Place) []Place {
	sub, lib := []string{"lib64", "lib"}, "lib"
	if f.GOOS == "windows" {
		sub, lib = []string{"bin", filepath.Join("bin", "x64")}, "bin"
	}

	if v := f.Getenv(variable); v != "" {
		return []Place{f.Override(v, pattern)}
	}

	if f.GOOS != "linux" && f.GOOS != "windows" {
		return nil
	}

	var places []Place
	in := func(elem ...string) {
		p := Place(filepath.Join(append(elem, pattern)...))
		if elem[0] != "" && f.Trusts(p) && !slices.Contains(places, p) {
			places = append(places, p)
		}
	}

	if f.GOOS == "linux" {
		for _, dir := range filepath.SplitList(f.Getenv("LD_LIBRARY_PATH")) {
			in(dir)
		}
	}

	for _, root := range []string{f.Getenv("CUDA_HOME"), f.Getenv("CUDA_PATH"),
		f.Getenv("CONDA_PREFIX")} {
		for _, s := range sub {
			in(root, s)
		}
	}

	places = append(places, names...)
	if f.GOOS == "linux" {
		for _, dir := range []string{"/usr/local/cuda/lib64", "/usr/local/cuda-[0-9]*/lib64",
			"/opt/cuda/lib64",
			"/usr/lib/" + f.Multiarch(), "/usr/lib64"} {
			in(dir)
		}
	} else {
		toolkits := filepath.Join("NVIDIA GPU Computing Toolkit", "CUDA", "v*", "bin")
		in(f.Getenv("ProgramFiles"), toolkits, "x64")
		in(f.Getenv("ProgramFiles"), toolkits)
	}

	for _, site := range f.sitePackages() {
		in(site, "nvidia", pip, lib) // nvidia/cublas/lib, and nvidia/cu13/lib since CUDA 13
		if f.GOOS == "windows" {
			in(site, "nvidia", pip, "bin", "x86_64")
		}
	}

	return places
}

// sitePackages returns the directories of Python packages. Those of the active environment and,
// except on Windows, of the first Python in PATH come first, followed by the user's and the system's.
func (f Finder) sitePackages() []string {
	dirs := filepath.SplitList(f.Getenv("PYTHONPATH"))
	lib := filepath.Join("lib", "python3*")
	roots := []string{f.Getenv("VIRTUAL_ENV"), f.Getenv("CONDA_PREFIX")}
	if f.GOOS == "windows" {
		lib = "Lib"
	} else if exe, err := f.LookPath("python3"); err == nil {
		roots = append(roots, filepath.Dir(filepath.Dir(exe)))
	}

	if home := f.Getenv("HOME"); home != "" {
		roots = append(roots, filepath.Join(home, ".local"))
	}

	if f.GOOS == "linux" {
		roots = append(roots, "/usr/local", "/usr")
	}

	for _, root := range roots {
		if root == "" {
			continue
		}
		dirs = append(dirs, filepath.Join(root, lib, "site-packages"))
		if f.GOOS == "linux" && (root == "/usr" || root == "/usr/local") {
			dirs = append(dirs, filepath.Join(root, lib, "dist-packages"))
		}
	}

	return dirs
}

// Load tries all places in order until accept accepts a library. Within a place, it tries the
// newest major version first, up to newest. It returns the result of accept, or all attempts.
func Load[T any](f Finder, places []Place, newest int,
	accept func(path string) (T, error)) (T, []Attempt) {
	var tried []Attempt
	seen := map[string]bool{}
	for _, p := range places {
		files := f.files(p)
		if !f.Trusts(p) {
			files, tried = nil,
				append(tried,
					Attempt{Place: string(p), Reason: "not an absolute path, which Windows needs"})
		} else if len(files) == 0 {
			tried = append(tried, Attempt{Place: string(p), Reason: "no such file"})
		}

		slices.SortStableFunc(files, func(a, b string) int {
			return cmp.Compare(major(b), major(a))
		})
		for _, file := range files {
			if seen[file] {
				continue
			}

			seen[file] = true
			if m := major(file); newest > 0 && m > newest {
				tried = append(tried,
					Attempt{Place: file,
						Reason: fmt.Sprintf("needs a driver for CUDA %d; this one is for CUDA %d",
							m, newest)})
				continue
			}
			t, err := accept(file)
			if err == nil {
				return t, nil
			}
			tried = append(tried, Attempt{Place: file, Reason: err.Error()})
		}
	}

	var none T
	return none, tried
}

// major returns the number at the end of a library's name: 13 for libcublasLt.so.13 and
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

// NotFoundError reports that a library could not be loaded, with all attempts.
type NotFoundError struct {
	Library string
	Tried   []Attempt
	Help    string
}

// Error lists the attempts, after advice on installing the library.
func (e *NotFoundError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s was not found. %s", e.Library, e.Help)
	if len(e.Tried) > 0 {
		b.WriteString("\nSearched, in this order:")
	}
	for _, t := range e.Tried {
		fmt.Fprintf(&b, "\n  %s: %s", t.Place, t.Reason)
	}
	return b.String()
}
