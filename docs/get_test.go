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

// TestGet has go download the module from a proxy of its own. The proxy refuses what go get
// refuses: a file name that some system forbids, a file or a module that is too large.
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
	get.Dir = proxy // outside of any module
	get.Env = append(os.Environ(), "GOPROXY=file://"+filepath.ToSlash(proxy), "GONOPROXY=none",
		"GONOSUMDB=*", "GOFLAGS=-modcacherw", "GOWORK=off", "GOMODCACHE="+t.TempDir())
	out, err := get.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// archive writes the module's files to a zip file as a proxy has it. Modules in folders below it
// are left out, and so is what only this checkout has.
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
		case !d.Type().IsRegular() || d.Name() == ".git": // which is a file in a worktree
			return nil
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		f, err := w.CreateHeader(&zip.FileHeader{Name: prefix + filepath.ToSlash(below),
			Method: zip.Store}) // which takes no time
		if err == nil {
			_, err = f.Write(content)
		}
		return err
	})
	require.NoError(t, err)
	require.NoError(t, w.Close())
}

// isModule tells whether a folder is a module of its own.
func isModule(folder string) bool {
	_, err := os.Stat(filepath.Join(folder, "go.mod"))
	return err == nil
}
