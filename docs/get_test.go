package docs_test

import (
	"archive/zip"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestGet downloads the module with the go command from a local proxy. Like go get, it rejects file
// names that are forbidden on any system, and files or modules that are too large.
func TestGet(t *testing.T) {
	const version = "v0.0.1"
	proxy := t.TempDir()
	folder := filepath.Join(proxy, filepath.FromSlash(module), "@v")
	require.NoError(t, os.MkdirAll(folder, 0o777))
	goMod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	require.NoError(t, err)
	write := func(name string, content []byte) {
		require.NoError(t, os.WriteFile(filepath.Join(folder, name), content, 0o666))
	}
	write(version+".mod", goMod)
	write(version+".info", []byte(`{"Version":"`+version+`"}`))
	archive(t, filepath.Join(folder, version+".zip"), module+"@"+version+"/")

	get := exec.Command("go", "mod", "download", module+"@"+version)
	get.Dir = proxy // outside any module
	get.Env = append(os.Environ(), "GOPROXY=file://"+filepath.ToSlash(proxy), "GONOPROXY=none",
		"GONOSUMDB=*", "GOFLAGS=-modcacherw", "GOWORK=off", "GOMODCACHE="+t.TempDir())
	out, err := get.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// archive writes the files of the module to a zip file in the format of a module proxy. It omits nested
// modules and files that only exist in this checkout.
func archive(t *testing.T, path, prefix string) {
	t.Helper()
	file, err := os.Create(path)
	require.NoError(t, err)
	defer file.Close()
	w := zip.NewWriter(file)
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		below, _ := filepath.Rel(root, path)
		switch {
		case err != nil:
			return err
		case d.IsDir() && below != "." &&
			(d.Name() == ".git" || d.Name() == "runs" || isModule(path)):
			return filepath.SkipDir
		case !d.Type().IsRegular() || d.Name() == ".git": // .git is a file in a worktree
			return nil
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		f, err := w.CreateHeader(&zip.FileHeader{Name: prefix + filepath.ToSlash(below),
			Method: zip.Store}) // the fastest method
		if err == nil {
			_, err = f.Write(content)
		}
		return err
	})

	require.NoError(t, err)
	require.NoError(t, w.Close())
}

// isModule reports whether a directory contains a nested module.
func isModule(folder string) bool {
	_, err := os.Stat(filepath.Join(folder, "go.mod"))
	return err == nil
}
