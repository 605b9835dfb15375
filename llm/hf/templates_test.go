package hf

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSaveTemplates checks that a saved model keeps all chat templates.
func TestSaveTemplates(t *testing.T) {
	dir := copyOf(t, "tiny")
	templates := map[string]string{
		"chat_template.jinja":                      "{{ messages }}",
		"additional_chat_templates/tool_use.jinja": "{{ tools }}",
		"additional_chat_templates/rag.jinja":      "{{ documents }}",
	}
	require.NoError(t, os.Mkdir(filepath.Join(dir, "additional_chat_templates"), 0o700))
	for name, text := range templates {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}

	f, err := Open(dir)
	require.NoError(t, err)
	defer f.Close()
	m, err := f.Load(t.Context())
	require.NoError(t, err)

	out := filepath.Join(t.TempDir(), "out")
	require.NoError(t, SavePretrained(t.Context(), out, m, Like(f)))
	for name, want := range templates {
		text, err := os.ReadFile(filepath.Join(out, name))
		require.NoError(t, err)
		require.Equal(t, want, string(text), name)
	}
}
