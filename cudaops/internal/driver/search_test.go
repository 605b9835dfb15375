package driver

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/sharedlib"
)

// finderAt returns a finder for a folder that contains the given empty files.
func finderAt(t *testing.T, env map[string]string, files ...string) (f sharedlib.Finder,
	root string) {
	t.Helper()
	if filepath.Separator != '/' {
		t.Skip("describes a Linux file system")
	}

	root = t.TempDir()
	for _, file := range files {
		path := filepath.Join(root, file)
		require.NoError(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755),
			os.WriteFile(path, nil, 0o644)))
	}

	f = sharedlib.Finder{GOOS: "linux", GOARCH: "amd64",
		Getenv: func(name string) string { return strings.ReplaceAll(env[name], "~", root) },
		LookPath: func(string) (string, error) {
			return filepath.Join(root, "venv", "bin", "python3"), nil
		},
		Glob: func(pattern string) ([]string, error) {
			if !strings.HasPrefix(pattern, root) {
				pattern = filepath.Join(root, pattern) // for system folders as well
			}
			return filepath.Glob(pattern)
		}}

	return f, root
}

// candidates returns the files that load would try, relative to root, and the names it would pass to the
// loader.
func candidates(f sharedlib.Finder, root string, newest int) (names []string,
	tried []sharedlib.Attempt) {
	_, tried = sharedlib.Load(f, blasPlaces(f), newest, func(path string) (int, error) {
		rel, err := filepath.Rel(root, path)
		if err != nil || sharedlib.Place(path).IsName() {
			rel = path
		}
		names = append(names, filepath.ToSlash(rel))
		return 0, errors.New("refused")
	})
	return names, tried
}

func TestSearchOrder(t *testing.T) {
	env := map[string]string{"LD_LIBRARY_PATH": "~/ld:", "CUDA_HOME": "~/cuda",
		"HOME": "~/home", "VIRTUAL_ENV": ""}
	f, root := finderAt(t, env,
		"ld/libcublasLt.so.12", "ld/libcublasLt.so.13", "ld/libcublas.so.13",
		"cuda/lib64/libcublasLt.so.12",
		"usr/local/cuda-12.4/lib64/libcublasLt.so.12", "usr/lib/x86_64-linux-gnu/libcublasLt.so.12",
		"venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcublasLt.so.13",
		"venv/lib/python3.12/site-packages/nvidia/cublas/lib/libcublasLt.so.12",
		"home/.local/lib/python3.11/site-packages/nvidia/cublas/lib/libcublasLt.so.12",
		"usr/lib/python3.10/dist-packages/nvidia/cublas/lib/libcublasLt.so.12",
		"usr/lib64/libcublasLt.so.11.5") // its version is too old

	want := []string{
		"ld/libcublasLt.so.13", "ld/libcublasLt.so.12", "cuda/lib64/libcublasLt.so.12",
		"libcublasLt.so.13",
		"libcublasLt.so.12", "usr/local/cuda-12.4/lib64/libcublasLt.so.12",
		"usr/lib/x86_64-linux-gnu/libcublasLt.so.12",
		"venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcublasLt.so.13",
		"venv/lib/python3.12/site-packages/nvidia/cublas/lib/libcublasLt.so.12",
		"home/.local/lib/python3.11/site-packages/nvidia/cublas/lib/libcublasLt.so.12",
		"usr/lib/python3.10/dist-packages/nvidia/cublas/lib/libcublasLt.so.12",
	}

	got, tried := candidates(f, root, 13)
	require.Equal(t, want, got, "tried\n  %s\nwant\n  %s", strings.Join(got, "\n  "),
		strings.Join(want, "\n  "))
	text := (&gpu.NotFoundError{Library: "the library", Tried: tried, Help: "Install it."}).Error()
	for _, s := range []string{"the library was not found. Install it.", "Searched, in this order:",
		"ld/libcublasLt.so.13: refused", "/opt/cuda/lib64/libcublasLt.so.1[0-9]: no such file"} {
		require.Contains(t, text, s)
	}

	// A driver for CUDA 12 can't use a library for CUDA 13.
	got, tried = candidates(f, root, 12)
	if slices.ContainsFunc(got, func(s string) bool {
		return strings.HasSuffix(s, ".13")
	}) || len(got) != 8 {
		t.Errorf("for CUDA 12: %v", got)
	}

	if !slices.ContainsFunc(tried, func(a sharedlib.Attempt) bool {
		return strings.Contains(a.Reason, "needs a driver for CUDA 13")
	}) {
		t.Errorf("not said why: %v", tried)
	}
}

func TestSearchOverride(t *testing.T) {
	for value, want := range map[string]string{
		"~/own":                      "own/libcublasLt.so.12",
		"~/own/libcublasLt.so.12":    "own/libcublasLt.so.12",
		"~/elsewhere/libcublasLt.so": "",
	} {
		f, root := finderAt(t, map[string]string{blasVariable: value, "LD_LIBRARY_PATH": "~/ld"},
			"own/libcublasLt.so.12",
			"ld/libcublasLt.so.12")
		got, tried := candidates(f, root, 13)
		require.Equal(t, want, strings.Join(got, " "), value)
		require.Len(t, tried, 1, value)
	}

	f, _ := finderAt(t, map[string]string{cudaVariable: "libmine.so"})
	require.Equal(t, []sharedlib.Place{"./libmine.so"}, cudaPlaces(f))
}

func TestSearchSystems(t *testing.T) {
	for goos, want := range map[string]string{"linux": "libcuda.so.1",
		"windows": "nvcuda.dll", "darwin": ""} {
		f, _ := finderAt(t, nil)
		f.GOOS = goos
		got := cudaPlaces(f)
		if want == "" && len(got) != 0 || want != "" && got[0] != sharedlib.Place(want) {
			t.Errorf("%s: %v", goos, got)
		}
		require.Equal(t, goos == "darwin", (len(blasPlaces(f)) == 0))
	}
}

// TestSearchWindows checks that no DLL is loaded from the working directory or from PATH. Plain names,
// which the loader resolves only in System32, and absolute paths from variables are allowed.
func TestSearchWindows(t *testing.T) {
	env := map[string]string{
		"ProgramFiles": `C:\Program Files`, "CUDA_PATH": `D:\cuda`,
		"CONDA_PREFIX":    `\\server\conda`,
		"LD_LIBRARY_PATH": `C:\planted`, "CUDA_HOME": `planted`, "VIRTUAL_ENV": `C:planted`,
		"PYTHONPATH": `planted`,
		"HOME":       `\planted`,
	}

	f, _ := finderAt(t, env)
	f.GOOS = "windows"
	f.LookPath = func(string) (string, error) { return `C:\planted\Scripts\python.exe`, nil }
	places := slices.Concat(cudaPlaces(f), blasPlaces(f))
	for _, p := range places {
		require.NotContains(t, string(p), "planted")
		require.True(t, f.Trusts(p))
	}

	for _, want := range []string{`C:\Program Files`, `D:\cuda`, `\\server\conda`} {
		if !slices.ContainsFunc(places, func(p sharedlib.Place) bool {
			return strings.HasPrefix(string(p), want)
		}) {
			t.Errorf("nothing of %s in %q", want, places)
		}
	}

	accept := func(path string) (string, error) { return path, nil }
	// pretend that all files exist
	f.Glob = func(pattern string) ([]string, error) { return []string{pattern}, nil }
	for value, loads := range map[string]bool{
		`nvcuda.dll`: false, `.\nvcuda.dll`: false, `C:nvcuda.dll`: false, `\nvcuda.dll`: false,
		`own/nvcuda.dll`:    false,
		`C:\own\nvcuda.dll`: true, `C:/own/nvcuda.dll`: true, `\\server\own\nvcuda.dll`: true,
	} {
		env[cudaVariable] = value
		got, tried := sharedlib.Load(f, cudaPlaces(f), 0, accept)
		if (got != "") != loads || !loads && !strings.Contains(tried[0].Reason,
			"not an absolute path") {
			t.Errorf("%s=%s: loaded %q after %v", cudaVariable, value, got, tried)
		}
	}
}

// TestLoadStops checks that loading stops at the first library that is accepted.
func TestLoadStops(t *testing.T) {
	f, root := finderAt(t, map[string]string{"LD_LIBRARY_PATH": "~/a:~/b"}, "a/libcublasLt.so.12",
		"b/libcublasLt.so.12")
	var asked []string
	got, tried := sharedlib.Load(f, blasPlaces(f), 13, func(path string) (string, error) {
		asked = append(asked, path)
		if strings.Contains(path, "/a/") {
			return "", errors.New("damaged")
		}
		return path, nil
	})

	require.Equal(t, filepath.Join(root, "b/libcublasLt.so.12"), got)
	require.Len(t, asked, 2)
	require.Nil(t, tried)
}
