package plot

import (
	"os/exec"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestImports checks that only package plot depends on the plotting library, which adds fonts, LaTeX,
// PDF and images to a program.
func TestImports(t *testing.T) {
	const root = "github.com/kasmina-go/kasmina/llm"
	drawing := regexp.MustCompile(`(?m)^.*(gonum.org/v1/plot|/image/|/go-(fonts|latex|pdf)/|svgo|` +
		`freetype).*$`)
	for _, user := range []string{root, root + "/data", root + "/runlog", root + "/gpu"} {
		require.Empty(t, drawing.FindAllString(dependencies(t, user), -1), user)
	}
	require.NotEmpty(t, drawing.FindAllString(dependencies(t, root+"/plot"), -1))
}

// dependencies lists a package and all its dependencies.
func dependencies(t *testing.T, path string) string {
	t.Helper()
	list, err := exec.Command("go", "list", "-deps", path).Output()
	require.NoError(t, err)
	return string(list)
}
