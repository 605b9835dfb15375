package tasks

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm"
)

// write writes a file and returns its path.
func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o666))
	return path
}

// TestFormatsFound checks that formats are recognized by the fields of a file, both for the data sets on
// the Hugging Face hub and for the original files.
func TestFormatsFound(t *testing.T) {
	for text, want := range map[string]string{
		`{"ctx_a":"a","ctx_b":"b","activity_label":"c","endings":["d","e"],"label":"1"}`:                          "hellaswag",
		`{"question":"a","choices":{"text":["b","c"],"label":["A","B"]},"answerKey":"B"}`:                         "arc",
		`{"question":{"stem":"a","choices":[{"text":"b","label":"A"},{"text":"c","label":"B"}]},"answerKey":"B"}`: "arc",
		`{"goal":"a","sol1":"b","sol2":"c","label":1}`:                                                            "piqa",
		`{"sentence":"a _ b","option1":"c","option2":"d","answer":"2"}`:                                           "winogrande",
		`{"passage":"a","question":"b","label":1}`:                                                                "boolq",
		`{"passage":"a","question":"b","answer":true}`:                                                            "boolq",
		`{"question":"a","choices":["b","c","d","e"],"answer":"B"}`:                                               "mmlu",
		`{"question":"a","answer":"b\n#### 1"}`:                                                                   "gsm8k",
		`{"page":"a"}`:                                                                                            "wikitext",
		"\ufeff" + `{"page":"a"}`:                                                                                 "wikitext",
	} {
		all, err := Open(write(t, "file.jsonl", text+"\n\n"), Options{})
		require.NoError(t, err, text)
		require.Equal(t, want, all[0].Format)
		require.Equal(t, "file", all[0].Name)
		require.Len(t, all[0].Items, 1)
		if _, ok := all[0].Items[0].gold.(int); ok {
			require.Equal(t, 1, all[0].Items[0].gold, text)
		}
	}
}

// TestBadFiles checks the errors for files that cannot be used.
func TestBadFiles(t *testing.T) {
	piqa := `{"goal":"a","sol1":"b","sol2":"c","label":1}` + "\n"
	for _, c := range []struct {
		text, want string
		o          Options
	}{
		{"", "has no items", Options{}},
		{"[1]", "file.jsonl:1: want one JSON object per line, and this is an array", Options{}},
		{"a", "file.jsonl:1: want one JSON object per line: invalid character 'a'", Options{}},
		{"null", "file.jsonl:1: null", Options{}},
		{`{"text":"a b"}`, "name the right one, lambada or perplexity", Options{}},
		{`{"x":1,"b":2}`, `has the fields "b", "x", which match none of the formats hellaswag, arc`, Options{}},
		{`{"x":1,"b":2}`, "perplexity: name a format to see the fields that it needs", Options{}},
		{piqa, `unknown format "piqb"`, Options{Format: "piqb"}},
		{piqa, `has the fields "goal", "label", "sol1", "sol2", and the format lambada needs "text"`,
			Options{Format: "lambada"}},
		{piqa + `{"goal":"a"}`, `file.jsonl:2: the fields are "goal", and the format piqa needs`, Options{}},
		{piqa + `{"goal":"a","sol1":"b","sol2":"c"}`, `file.jsonl:2: "label" is missing: the item has no answer`,
			Options{}},
		{piqa + `{"goal":1,"sol1":"b","sol2":"c","label":0}`, `file.jsonl:2: "goal" is 1, want a string`, Options{}},
		{piqa + `{"goal":"a","sol1":"b","sol2":"c","label":0.5}`, `"label" is 0.5, want the number of a choice`,
			Options{}},
		{`{"sentence":"a","option1":"c","option2":"d","answer":"2"}`, `want a blank`, Options{}},
		{`{"question":"a","choices":{"text":["b"],"label":["A"]},"answerKey":"B"}`, `"answerKey" is "B", want one of`,
			Options{}},
		{`{"question":"a","choices":["b"],"answer":0}`, `"choices" has 1 choices, want 4`, Options{}},
		{piqa, "there are 1 examples to draw from, want at least 3", Options{FewShot: 2}},
		{`{"page":"a"}`, "have no few-shot examples", Options{FewShot: 2}},
		{piqa, "-2 few-shot examples", Options{FewShot: -2}},
	} {
		_, err := Open(write(t, "file.jsonl", c.text), c.o)
		require.ErrorContains(t, err, c.want)
	}

	_, err := Open(filepath.Join(t.TempDir(), "none"), Options{})
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = Open(t.TempDir(), Options{FewShot: DefaultFewShot})
	require.ErrorContains(t, err, "has no core.yaml")
	_, err = Open("testdata/core", Options{FewShot: 1})
	require.ErrorContains(t, err, "defines its few-shot examples itself")
}

// TestLabelsOutside checks that labels without a choice count as wrong, with a note, and that such an item
// is rejected as an example.
func TestLabelsOutside(t *testing.T) {
	path := write(t, "piqa.jsonl", `{"goal":"a","sol1":"b","sol2":"c","label":-1}`+"\n"+
		`{"goal":"d","sol1":"e","sol2":"f","label":2}`)
	all, err := Open(path, Options{})
	require.NoError(t, err)
	require.Contains(t, all[0].Notes[0], "the labels of 2 of 2 items name none of their choices")
	for _, item := range all[0].Items {
		for _, best := range []int{0, 1} {
			answers := []Response{{LogProb: -2}, {LogProb: -2}}
			answers[best].LogProb = -1
			require.Zero(t, item.grade(answers).values[0].x)
		}
	}

	_, err = Open(path, Options{FewShot: 1})
	require.ErrorContains(t, err, "has a label that names none of its choices: remove the line")
}

// TestUnscorable checks the errors for items that no model can score.
func TestUnscorable(t *testing.T) {
	model, s := testModel(t, models+"tiny")
	s.Window = 8
	for text, want := range map[string]string{
		`{"text":"a ` + strings.Repeat("xyz", 20) + `"}`: "remove the item, or choose a larger window",
		`{"text":"a b"}`: "",
	} {
		all, err := Open(write(t, "l.jsonl", text), Options{Format: "lambada"})
		require.NoError(t, err)
		_, err = Evaluate(t.Context(), all, model, s)
		if want == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, want)
		}
	}

	all, err := Open("testdata/gsm8k.jsonl", Options{})
	require.NoError(t, err)
	_, err = Evaluate(t.Context(), all, model, s)
	require.ErrorContains(t, err, "permit fewer answer tokens")
}

// broken is a model with logits that are not finite.
type broken struct{ Model }

func (broken) Score(ctx context.Context, texts []llm.Continuation) ([]llm.ContinuationScore, error) {
	scores := make([]llm.ContinuationScore, len(texts))
	scores[len(scores)-1].LogProb = math.NaN()
	return scores, nil
}

// TestBrokenModel checks that an evaluation returns an error if log-probabilities are not finite.
func TestBrokenModel(t *testing.T) {
	model, s := testModel(t, models+"tiny")
	all, err := Open("testdata/piqa.jsonl", Options{})
	require.NoError(t, err)
	_, err = Evaluate(t.Context(), all, broken{model}, s)
	require.ErrorContains(t, err, "the model's logits are not finite numbers")
}

// failing is a model that fails after some passes.
type failing struct {
	Model
	left int
}

var errTest = errors.New("out of passes")

func (f *failing) Score(ctx context.Context, texts []llm.Continuation) ([]llm.ContinuationScore, error) {
	if f.left--; f.left < 0 {
		return nil, errTest
	}
	return f.Model.Score(ctx, texts)
}

// TestResume interrupts an evaluation after every pass, tears the last line of the log, and checks that the
// results equal the results without interruptions.
func TestResume(t *testing.T) {
	model, s := testModel(t, models+"tiny")
	choices, err := Open("testdata/hellaswag.jsonl", Options{FewShot: 2, Examples: "testdata/train/hellaswag.jsonl"})
	require.NoError(t, err)
	texts, err := Open("testdata/gsm8k.jsonl", Options{})
	require.NoError(t, err)
	tasks := slices.Concat(choices, texts)
	want, err := Evaluate(t.Context(), tasks, model, s)
	require.NoError(t, err)

	s.Log = filepath.Join(t.TempDir(), "log.jsonl")
	passes := 0
	for ; ; passes++ {
		got, err := Evaluate(t.Context(), tasks, &failing{model, 1}, s)
		if err == nil {
			require.Equal(t, want, got)
			break
		}
		require.ErrorIs(t, err, errTest)
		text, err := os.ReadFile(s.Log)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(s.Log, append(text, `{"task":"hellas`...), 0o666))
	}
	require.Greater(t, passes, 0)

	// The log has every item once or, if its chunk was repeated, several times with the same answers.
	text, err := os.ReadFile(s.Log)
	require.NoError(t, err)
	seen := map[string]bool{}
	for line := range bytes.Lines(text) {
		var l logLine
		require.NoError(t, json.Unmarshal(line, &l))
		seen[l.Task+string(rune(l.Item))] = true
	}
	require.Len(t, seen, 40+12+1) // and the header

	s.Model = "another"
	_, err = Evaluate(t.Context(), tasks, model, s)
	require.ErrorContains(t, err, "has the answers of another model")
	require.NoError(t, os.WriteFile(s.Log, []byte("{}\n"), 0o666))
	_, err = Evaluate(t.Context(), tasks, model, s)
	require.ErrorContains(t, err, "is no log of an evaluation")
	left, err := os.ReadFile(s.Log)
	require.NoError(t, err)
	require.Equal(t, "{}\n", string(left))
}

// TestTable checks the table and the JSON of results without a standard error.
func TestTable(t *testing.T) {
	model, s := testModel(t, models+"tiny")
	all, err := Open("testdata/wikitext.jsonl", Options{Limit: 1})
	require.NoError(t, err)
	results, err := Evaluate(t.Context(), all, model, s)
	require.NoError(t, err)
	var table strings.Builder
	require.NoError(t, WriteTable(&table, results))
	require.Regexp(t, `(?m)^wikitext +2 +1 +0 +none +word_perplexity +[0-9.]+ +N/A$`, table.String())
	text, err := json.Marshal(results[0])
	require.NoError(t, err)
	require.Contains(t, string(text), `"byte_perplexity_stderr,none":"N/A"`)
}
