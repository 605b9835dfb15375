package chatdata_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/llm/chatdata"
)

//go:generate python3 testdata/parquet.py

// inParquet returns the path of a file of examples in testdata.
func inParquet(name string) string { return filepath.Join("testdata", "parquet", name) }

// TestParquet checks that parquet files contain the same examples as the files of JSON Lines with the same name, and
// that both are encoded to the same tokens.
func TestParquet(t *testing.T) {
	paths, err := filepath.Glob(inParquet("*.jsonl"))
	if err != nil || len(paths) < 9 {
		t.Fatal(paths, err)
	}

	const withTools = `{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}`
	e := newEncoder(t, withTools)
	for _, path := range paths {
		t.Run(filepath.Base(path), func(t *testing.T) {
			want := collect(t, chatdata.ReadFile(path, nil))
			table := strings.TrimSuffix(path, ".jsonl") + ".parquet"
			have := collect(t, chatdata.ReadFile(table, nil))
			if len(have) != len(want) || len(want) < 4 {
				t.Fatalf("%d examples, want %d", len(have), len(want))
			}

			for i := range want {
				if have[i].File != table || !have[i].Parquet || have[i].Line != i+1 {
					t.Errorf("row %d has the location %s, %d", i+1, have[i].File, have[i].Line)
				}
				if a, b := parsed(t, have[i]), parsed(t, want[i]); !reflect.DeepEqual(a, b) {
					t.Errorf("row %d:\nhave %v\nwant %v", i+1, a, b)
				}
				if a, b := shown(t, e, have[i]), shown(t, e, want[i]); a != b {
					t.Errorf("row %d:\nhave %q\nwant %q", i+1, a, b)
				}
			}
		})
	}
}

// collect returns all examples, and fails the test if there is an error.
func collect(t *testing.T, examples iter.Seq2[chatdata.Example, error]) (all []chatdata.Example) {
	t.Helper()
	for x, err := range examples {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, x)
	}
	return all
}

// parsed returns an example without its location, and with JSON as values.
func parsed(t *testing.T, x chatdata.Example) map[string]any {
	t.Helper()
	value := func(text json.RawMessage) (v any) {
		if text != nil {
			d := json.NewDecoder(bytes.NewReader(text))
			if err := d.Decode(&v); err != nil {
				t.Fatalf("%s: %v", text, err)
			}
		}
		return v
	}

	all := map[string]any{"format": x.Format, "tools": value(x.Tools)}
	for name, c := range map[string]chatdata.Content{"prompt": x.Prompt, "completion": x.Completion, "rejected": x.Rejected} {
		all[name] = c.Text
		for i, m := range c.Messages {
			all[fmt.Sprint(name, i)] = []any{m.Role, m.Text, value(m.JSON)}
		}
	}
	return all
}

// shown returns the sequences of an example as text.
func shown(t *testing.T, e *chatdata.Encoder, x chatdata.Example) (text string) {
	t.Helper()
	sequences, err := e.Encode(x)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range sequences {
		text += e.Show(s) + "\n"
	}
	return text
}

// TestParquetTypes checks that numbers keep their digits, and values that JSON has no form of.
func TestParquetTypes(t *testing.T) {
	calls := collect(t, chatdata.ReadFile(inParquet("calls.parquet"), nil))
	text := string(calls[2].Completion.Messages[1].JSON) + string(calls[3].Completion.Messages[1].JSON)
	for _, want := range []string{`"n":3,"x":1.0,"exact":true`, `"n":-1,"x":1e-07}`, `"n":9007199254740993,"x":0.1}`} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s in %s", want, text)
		}
	}

	var problems []string
	for x, err := range chatdata.ReadFile(inParquet("types.parquet"), nil) {
		if err != nil {
			problems = append(problems, err.Error())
			continue
		}
		want := `{"role":"user","content":"a","when":"2026-01-02T03:04:05.6Z","day":"2026-01-02","small":7,` +
			`"unsigned":9223372036854775809,"half":0.5,"names":{"x":1,"y":null}}`
		if have := string(x.Completion.Messages[0].JSON); have != want {
			t.Errorf("have %s\nwant %s", have, want)
		}
	}
	if want := []string{inParquet("types.parquet") + `, row 2: the column "messages.half" has the number NaN, which JSON ` +
		`does not have: change the column, for example to strings`}; !slices.Equal(problems, want) {
		t.Errorf("have %q\nwant %q", problems, want)
	}
}

// TestParquetProblems checks that problems name the row, and that reading continues after it.
func TestParquetProblems(t *testing.T) {
	check := func(path string) *chatdata.Report {
		report, err := newEncoder(t, chatML).Check(chatdata.ReadFile(path, nil), path, nil)
		if err != nil {
			t.Fatal(err)
		}
		return report
	}

	path := inParquet("bytes.parquet")
	report := check(path)
	var have []string
	for _, p := range report.Problems {
		have = append(have, p.Error())
	}
	want := []string{path + `, row 2: the column "text" has bytes that are not UTF-8: change the column, for example to strings`,
		path + `, row 3: the row is empty: give it "messages", "prompt" and "completion", "text", or "chosen" and "rejected"`,
		path + `, row 4: the text is empty: remove the row`}
	if !slices.Equal(have, want) {
		t.Errorf("have %q\nwant %q", have, want)
	}
	if len(report.Sequences) != 1 || report.Sequences[0].Location() != path+", row 1" {
		t.Errorf("have %v", report.Sequences)
	}

	path = inParquet("columns.parquet")
	if p := check(path).Problems; len(p) != 1 || !strings.HasPrefix(p[0].Error(), path+
		`: no format has the columns "answer", "question": give it "messages", `) || !strings.Contains(p[0].Fix, "rename_column") {
		t.Errorf("have %v", p)
	}

	if w := check(inParquet("texts.parquet")).Warnings; len(w) == 0 || w[0].What != "it is equal to row 1" ||
		!strings.Contains(w[0].Error(), "texts.parquet, row 4: ") {
		t.Errorf("have %v", w)
	}
}

// TestDamagedParquet checks that a file with a wrong byte, or only the start of a file, yields an error or examples, and
// never more examples than the file had.
func TestDamagedParquet(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for _, name := range []string{"chats", "calls", "pages", "pages2", "completions", "texts", "chat-pairs"} {
		whole, err := os.ReadFile(inParquet(name + ".parquet"))
		if err != nil {
			t.Fatal(err)
		}
		rows := len(collect(t, chatdata.ReadParquet(bytes.NewReader(whole), int64(len(whole)), name)))

		for try := range 40 {
			file := slices.Clone(whole)
			at := r.IntN(len(file))
			if try%4 == 0 {
				file = file[:at]
			} else {
				file[at] ^= byte(1 + r.IntN(255))
			}

			count := 0
			var last error
			for _, err := range chatdata.ReadParquet(bytes.NewReader(file), int64(len(file)), name) {
				if last = err; err == nil {
					count++
				}
			}
			if count > rows || len(file) < len(whole) && last == nil {
				t.Errorf("%s, byte %d of %d, try %d: %d of %d rows, %v", name, at, len(file), try, count, rows, last)
			}
		}
	}
}

// TestReadFile checks the kinds of files and the progress.
func TestReadFile(t *testing.T) {
	for _, name := range []string{"chats.jsonl", "chats.parquet"} {
		var done, size int64
		n := len(collect(t, chatdata.ReadFile(inParquet(name), func(d, s int64) {
			if d < done {
				t.Errorf("%s: %d bytes after %d", name, d, done)
			}
			done, size = d, s
		})))
		info, err := os.Stat(inParquet(name))
		if err != nil || n != 7 || size != info.Size() || done < size/2 || done > size {
			t.Errorf("%s: %d examples, %d of %d bytes, %v", name, n, done, size, err)
		}
	}

	for path, want := range map[string]string{"testdata": "is a folder", inParquet("none"): "no such file"} {
		n := 0
		for _, err := range chatdata.ReadFile(path, nil) {
			if err == nil || !strings.Contains(err.Error(), want) && !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s: %v", path, err)
			}
			n++
		}
		if n != 1 {
			t.Errorf("%s: %d errors, want 1", path, n)
		}
	}

	file, err := os.Open(inParquet("chats.parquet"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for _, err := range chatdata.Read(io.Reader(file), "chats") {
		if err == nil || !strings.Contains(err.Error(), "chats is a parquet file, which ReadFile") {
			t.Error(err)
		}
	}
}
