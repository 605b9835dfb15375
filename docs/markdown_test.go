// Package docs_test compiles or runs every code block and every command in the documents.
//
// The language of a block determines how it is tested, together with a comment before the block that
// readers do not see:
//
//	```go        A whole program is type-checked. Statements are type-checked as well, and can use the
//	             names of the blocks above them. <!-- given: x, y *gorgonia.Node --> declares further
//	             variables. Imports are found by the name of the package.
//	```sh        <!-- run --> runs the commands in an empty folder. Other commands are parsed, and
//	             their programs, files and options must exist.
//	```json      The block must be valid JSON.
//	```text      <!-- output --> compares the block with the output of the block before.
//
// <!-- file: NAME --> writes a block of any language to the named file, for the following commands.
package docs_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// root is the module's root directory.
const root = ".."

// block is a code block of a document.
type block struct {
	document string // path relative to root
	line     int    // number of the first line of code
	language string
	notes    map[string]string // from the comments before the block: given, run, output, file
	code     string
}

func (b block) String() string { return fmt.Sprintf("%s:%d", b.document, b.line) }

// A document is a Markdown file with its code.
type document struct {
	path   string
	text   string
	blocks []block
	spans  []span
}

// A span is inline code.
type span struct {
	line int
	code string
}

// documents reads every Markdown file of the module.
func documents(t *testing.T) (all []document) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		name := d.Name()
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != root && (strings.HasPrefix(name, ".") || name == "runs"):
			return filepath.SkipDir
		case d.IsDir() || filepath.Ext(name) != ".md":
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		below, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		doc, err := parse(filepath.ToSlash(below), string(text))
		all = append(all, doc)
		return err
	})

	require.NoError(t, err)
	require.NotEmpty(t, all)
	return all
}

var (
	notePattern = regexp.MustCompile(`^<!-- (given|run|output|file)(?:: (.*))? -->$`)
	spanPattern = regexp.MustCompile("`([^`]+)`")
)

// parse splits a document into blocks and inline code. It refuses blocks that would not be tested:
// indented blocks, and blocks without a language.
func parse(path, text string) (document, error) {
	doc := document{path: path, text: text}
	lines := strings.Split(text, "\n")
	notes := map[string]string{}
	for i := 0; i < len(lines); i++ {
		line := lines[i]
		if m := notePattern.FindStringSubmatch(line); m != nil {
			notes[m[1]] = m[2]
			continue
		}
		if !strings.HasPrefix(line, "```") {
			if strings.HasPrefix(line, "<!--") {
				return doc, fmt.Errorf("%s:%d: %s is no note that this test knows", path, i+1, line)
			}
			if strings.HasPrefix(line, "    ") && (i == 0 || lines[i-1] == "") {
				return doc, fmt.Errorf("%s:%d: code by indentation: fence it, with a language",
					path, i+1)
			}
			if line != "" && len(notes) > 0 {
				return doc, fmt.Errorf("%s:%d: a note must stand in front of a block", path, i+1)
			}
			for _, m := range spanPattern.FindAllStringSubmatch(line, -1) {
				doc.spans = append(doc.spans, span{i + 1, m[1]})
			}
			continue
		}
		b := block{document: path, line: i + 2, language: strings.TrimPrefix(line, "```"),
			notes: notes}
		notes = map[string]string{}
		end := i + 1
		for ; end < len(lines) && lines[end] != "```"; end++ {
		}
		if end == len(lines) {
			return doc, fmt.Errorf("%s:%d: the block has no end", path, i+1)
		}
		b.code = strings.Join(lines[i+1:end], "\n") + "\n"
		switch b.language {
		case "go", "sh", "json", "text":
		default:
			return doc, fmt.Errorf("%s:%d: the language is %q, want go, sh, json or text",
				path, i+1, b.language)
		}
		doc.blocks = append(doc.blocks, b)
		i = end
	}

	return doc, nil
}

// TestParse checks that blocks which would not be tested are rejected.
func TestParse(t *testing.T) {
	doc, err := parse("d.md",
		"See `go run ./x`.\n\n<!-- run -->\n```sh\nls\n```\n\n```text\na\n```\n")
	require.NoError(t, err)
	require.Equal(t, []span{{1, "go run ./x"}}, doc.spans)
	require.Len(t, doc.blocks, 2)
	require.Equal(t, "ls\n", doc.blocks[0].code)
	require.Contains(t, doc.blocks[0].notes, "run")
	require.Empty(t, doc.blocks[1].notes)
	for name, text := range map[string]string{
		"no language":     "```\nls\n```\n",
		"no end":          "```sh\nls\n",
		"indented":        "Do:\n\n    ls\n",
		"unknown note":    "<!-- runs -->\n```sh\nls\n```\n",
		"note of nothing": "<!-- run -->\n\nWords.\n",
	} {
		_, err := parse("d.md", text)
		require.Error(t, err, name)
	}
}

var linkPattern = regexp.MustCompile(`\]\(([^)\s]+)\)`)

// TestLinks checks that the files and headings behind links exist.
func TestLinks(t *testing.T) {
	for _, doc := range documents(t) {
		for _, m := range linkPattern.FindAllStringSubmatch(doc.text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			file, heading, _ := strings.Cut(m[1], "#")
			target := filepath.Join(root, doc.path)
			if file != "" {
				target = filepath.Join(root, filepath.Dir(doc.path), file)
			}
			text, err := os.ReadFile(target)
			if info, statErr := os.Stat(target); statErr == nil && info.IsDir() {
				err = nil
			}
			if err != nil {
				t.Errorf("%s links %s: %v", doc.path, m[1], err)
			} else if heading != "" &&
				!strings.Contains(headings(string(text)), "\n"+heading+"\n") {
				t.Errorf("%s links %s: there is no such heading", doc.path, m[1])
			}
		}
	}
}

var notAnchor = regexp.MustCompile(`[^\p{L}\p{N} _-]`)

// headings returns the anchors of a document, one per line.
func headings(text string) string {
	anchors := "\n"
	for line := range strings.Lines(text) {
		if title := strings.TrimLeft(line, "#"); title != line && strings.HasPrefix(title, " ") {
			anchor := notAnchor.ReplaceAllString(strings.ToLower(strings.TrimSpace(title)), "")
			anchors += strings.ReplaceAll(anchor, " ", "-") + "\n"
		}
	}
	return anchors
}
