package folderlock

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMain acts as another program that claims a directory if an environment variable names one.
func TestMain(m *testing.M) {
	dir := os.Getenv("FOLDERLOCK_CLAIM")
	if dir == "" {
		os.Exit(m.Run())
	}

	_, err := Claim(dir)
	switch {
	case errors.Is(err, ErrInUse):
		os.Exit(3)
	case err != nil:
		panic(err)
	}

	os.Stdout.Write([]byte("!"))
	io.Copy(io.Discard, os.Stdin) // until it is told to exit, or killed
}

// other starts another program that claims a directory. It returns whether the program succeeded, and
// a function that kills it.
func other(t *testing.T, dir string) (claimed bool, kill func()) {
	t.Helper()
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), "FOLDERLOCK_CLAIM="+dir)
	_, err := c.StdinPipe()
	require.NoError(t, err)
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	if n, _ := out.Read(make([]byte, 1)); n == 1 {
		return true, func() {
			require.NoError(t, c.Process.Kill())
			c.Wait()
		}
	}

	c.Wait()
	require.Equal(t, 3, c.ProcessState.ExitCode())
	return false, func() {}
}

// TestOneProgram checks that a directory belongs to one program at a time, until the program is
// killed or has released the directory as often as it claimed it, and that no files remain.
func TestOneProgram(t *testing.T) {
	dir := t.TempDir()
	first, err := Claim(dir)
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}

	require.NoError(t, err)
	second, err := Claim(filepath.Join(dir, "..", filepath.Base(dir)))
	require.NoError(t, err)
	claimed, _ := other(t, dir)
	require.False(t, claimed, "two programs have the folder")
	require.NoError(t, first())
	require.NoError(t, first(), "a release that comes twice counts once")
	claimed, _ = other(t, dir)
	require.False(t, claimed, "another program has the folder before all have released it")
	require.NoError(t, second())
	claimed, kill := other(t, dir)
	require.True(t, claimed)
	_, err = Claim(dir)
	require.ErrorIs(t, err, ErrInUse)
	kill()
	third, err := Claim(dir)
	require.NoError(t, err)
	require.NoError(t, third())
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestNoFolder(t *testing.T) {
	_, err := Claim(filepath.Join(t.TempDir(), "none"))
	require.ErrorIs(t, err, os.ErrNotExist)
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o666))
	_, err = Claim(file)
	require.ErrorContains(t, err, "no folder")
}
