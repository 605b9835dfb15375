package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMapOrder compares the reports for testdata/found with the comments in its files, line by line.
func TestMapOrder(t *testing.T) {
	err := check([]string{"./testdata/found"})
	require.Error(t, err)
	found := map[string][]string{}
	for line := range strings.SplitSeq(err.Error(), "\n") {
		m := regexp.MustCompile(`^.*/(\w+\.go:\d+):\d+: (.*)$`).FindStringSubmatch(line)
		require.NotNil(t, m, line)
		found[m[1]] = append(found[m[1]], m[2])
	}

	files, err := filepath.Glob("testdata/found/*.go")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	want := regexp.MustCompile(`// want "(.*)"$`)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for i, line := range strings.Split(string(text), "\n") {
			at := fmt.Sprintf("%s:%d", filepath.Base(file), i+1)
			if m := want.FindStringSubmatch(line); m == nil {
				require.Empty(t, found[at], at)
			} else if len(found[at]) == 0 {
				t.Errorf("%s: nothing is reported, want %q", at, m[1])
			} else {
				require.Contains(t, strings.Join(found[at], "\n"), m[1], at)
			}
		}
	}
}

// TestMapOrderAllowed checks that nothing is reported where the order does not matter.
func TestMapOrderAllowed(t *testing.T) {
	require.NoError(t, check([]string{"./testdata/fine"}))
}

// TestExitStatus checks the exit status and the output of the command.
func TestExitStatus(t *testing.T) {
	program := filepath.Join(t.TempDir(), "typecheck")
	out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput()
	require.NoError(t, err, string(out))

	out, err = exec.Command(program, "./testdata/found").CombinedOutput()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit, string(out))
	require.Equal(t, 1, exit.ExitCode())
	require.Regexp(t, `found/sums\.go:\d+:\d+: sum is accumulated .* range over slices\.Sorted`,
		string(out))

	out, err = exec.Command(program, "./testdata/fine").CombinedOutput()
	require.NoError(t, err, string(out))
	require.Empty(t, string(out))
}
