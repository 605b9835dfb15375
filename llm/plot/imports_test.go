package plot

import (
	"os/exec"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestImports wants a program that trains models to hold nothing that draws pictures: llm/plot does
// that for those who ask for it. The plotting library brings fonts, LaTeX, PDF and images along.
func TestImports(t *testing.T) {
	const room = "github.com/kasmina-go/kasmina/llm"
	drawing := regexp.MustCompile(`(?m)^.*(gonum.org/v1/plot|/image/|/go-(fonts|latex|pdf)/|svgo|` +
		`freetype).*$`)
	for _, user := range []string{room, room + "/data", room + "/runlog", room + "/gpu"} {
		require.Empty(t, drawing.FindAllString(dependencies(t, user), -1), user)
	}
	require.NotEmpty(t, drawing.FindAllString(dependencies(t, room+"/plot"), -1))
}

// dependencies lists all packages that go into a program that imports one.
func dependencies(t *testing.T, path string) string {
	t.Helper()
	list, err := exec.Command("go", "list", "-deps", path).Output()
	require.NoError(t, err)
	return string(list)
}
