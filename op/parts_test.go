package op_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestParts checks that every file with a forward op starts with a list of the op's parts, and that the
// paths in the list exist.
func TestParts(t *testing.T) {
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	method := regexp.MustCompile(`(?m)^func \(\w+ \*\w+\) SymDiff\(`)
	path := regexp.MustCompile(`\b(internal|cudaops)/[\w/.]*\w`)

	lists := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		if strings.HasSuffix(file, "_test.go") || !method.Match(text) {
			continue
		}

		list, _, _ := strings.Cut(string(text), "\npackage op\n")
		require.True(t, strings.HasPrefix(list, "// The parts of "), file)
		for _, kind := range []string{"CPU: ", "GPU: ", "test cases and benchmark: "} {
			require.Contains(t, list, kind, file)
		}
		parts := path.FindAllString(list, -1)
		require.GreaterOrEqual(t, len(parts), 3, file)
		for _, p := range parts {
			_, err := os.Stat(filepath.Join("..", p))
			require.NoError(t, err, file)
		}
		lists++
	}

	require.GreaterOrEqual(t, lists, 10)
}
