package chat

import (
	"encoding/json"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

//go:generate python3 testdata/golden.py

// A corpus holds conversations, templates, and the text or error of transformers for each pair. The name
// of a case consists of the name of its conversation and whether the assistant is next.
type corpus struct {
	Conversations map[string]struct {
		Messages  json.RawMessage
		Variables map[string]json.RawMessage
	}
	Templates []struct {
		Name, Source string
		Cases        map[string]struct{ Text, Error *string }
	}
}

const tokens = `{"bos_token":{"content":"<bos>"},"eos_token":"<eos>"}`

var now = time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC)

func readCorpus(t *testing.T, path string) (c corpus) {
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(raw, &c))
	require.NotEmpty(t, c.Templates)
	return c
}

// render renders a case.
func (c corpus) render(template *Template, name string) (string, error) {
	name, prompt, _ := strings.Cut(name, "/")
	conversation := c.Conversations[name]
	variables := map[string]any{}
	for k, v := range conversation.Variables {
		variables[k] = v
	}
	return template.RenderJSON(conversation.Messages,
		Options{AddGenerationPrompt: prompt == "True", Variables: variables, Now: now})
}

// compare renders all cases and fails the test for each difference. It returns the number of equal texts,
// the number of cases that are errors both here and in transformers, and the cases that are errors only
// here.
func (c corpus) compare(t *testing.T) (equal, errors int, refused []string) {
	for _, published := range c.Templates {
		template, parseErr := Parse(published.Source, []byte(tokens))
		for _, name := range slices.Sorted(maps.Keys(published.Cases)) {
			want := published.Cases[name]
			text, err := "", parseErr
			if err == nil {
				text, err = c.render(template, name)
			}
			switch {
			case err != nil && want.Error != nil:
				errors++
				if message, ok := strings.CutPrefix(*want.Error, "TemplateError: "); ok && parseErr == nil {
					require.ErrorContains(t, err, message)
				}
			case err != nil:
				refused = append(refused, published.Name+": "+name+": "+err.Error())
			case want.Error != nil:
				t.Errorf("%s: %s: got %.80q, want the error %s\n%s", published.Name, name, text, *want.Error,
					published.Source)
			case text != *want.Text:
				at := 0
				for at < min(len(text), len(*want.Text)) && text[at] == (*want.Text)[at] {
					at++
				}
				at = max(0, at-30)
				t.Errorf("%s: %s:\ngot  … %.80q\nwant … %.80q\n%s", published.Name, name, text[at:],
					(*want.Text)[at:], published.Source)
			default:
				equal++
			}
		}
	}

	return equal, errors, refused
}

// TestGolden compares templates that cover the language, including templates that an earlier engine
// rendered differently.
func TestGolden(t *testing.T) {
	equal, errors, refused := readCorpus(t, "testdata/golden.json").compare(t)
	require.Empty(t, refused)
	require.Greater(t, equal, 500)
	require.NotZero(t, errors)
}

// TestPublished compares the templates of published models, which fetch.sh collects, or the random ones
// of testdata/fuzz.py. A template may use unsupported features, which must be reported as errors.
func TestPublished(t *testing.T) {
	path := os.Getenv("KASMINA_CHAT_CORPUS")
	if path == "" {
		t.Skip("KASMINA_CHAT_CORPUS names no file: see fetch.sh and testdata/fuzz.py")
	}

	c := readCorpus(t, path)
	equal, errors, refused := c.compare(t)
	t.Logf("%d templates: %d texts are equal, %d cases are errors for transformers too, %d are refused",
		len(c.Templates), equal, errors, len(refused))
	for _, r := range refused {
		t.Log("refused: " + r)
	}
}
