package chatdata_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
	"github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

// chatML ends turns with a special token, and words ends them with a line break.
const (
	chatML = `{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}`
	words = `{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}`

	// lastSystem writes the system message before the last user message, so that earlier messages
	// change once another one follows.
	lastSystem = `{% for m in messages %}{% if m.role == "user" %}[{% if loop.last or ` +
		`loop.index == messages|length - 1 %}{{ messages[0].content }} {% endif %}{{ m.content }}]` +
		`{% elif m.role == "assistant" %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}`
)

// newEncoder returns an encoder with a byte-level tokenizer that includes the tokens of ChatML.
func newEncoder(t *testing.T, template string) *chatdata.Encoder {
	t.Helper()
	text, config, err := hf.Train(t.Context(), strings.NewReader("hello hello world hello"), 260, "gpt2", nil)
	if err != nil {
		t.Fatal(err)
	}

	var file map[string]any
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}

	added := file["added_tokens"].([]any)
	last := int(added[len(added)-1].(map[string]any)["id"].(float64))
	for i, name := range []string{"<|im_start|>", "<|im_end|>"} {
		added = append(added, map[string]any{"id": last + 1 + i, "content": name, "special": true,
			"single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
	}

	file["added_tokens"] = added
	if text, err = json.Marshal(file); err != nil {
		t.Fatal(err)
	}

	tok, err := hf.Parse(text, config)
	if err != nil {
		t.Fatal(err)
	}

	end, ok := tok.ID("<|im_end|>")
	if !ok {
		t.Fatal("no <|im_end|>")
	}

	e := &chatdata.Encoder{Tokenizer: tok, End: []int{end}, Now: time.Unix(0, 0)}
	if template != "" {
		if e.Template, err = chat.Parse(template, nil); err != nil {
			t.Fatal(err)
		}
	}

	return e
}

func TestEncode(t *testing.T) {
	for name, c := range map[string]struct{ template, line, want string }{
		"conversation": {chatML,
			`{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}`,
			"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦hello<|im_end|>⟧\n"},
		"two turns": {chatML,
			`{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
			{"role": "user", "content": "c"}, {"role": "assistant", "content": "é 日本"}]}`,
			"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n" +
				"<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦é 日本<|im_end|>⟧\n"},
		"an end token in an answer": {chatML,
			`{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<|im_end|>c"}]}`,
			"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>c<|im_end|>⟧\n"},
		"an empty answer": {chatML,
			`{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}`,
			"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦<|im_end|>⟧\n"},
		"a prompt and a completion": {"", `{"prompt": "hello wo", "completion": "rld"}`,
			"hello wo⟦rld<|im_end|>⟧"},
		"a prompt of messages": {chatML,
			`{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
			{"role": "user", "content": "c"}], "completion": [{"role": "assistant", "content": "d"}]}`,
			"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n" +
				"<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦d<|im_end|>⟧\n"},
		"text": {"", `{"text": "hello\n"}`, "hel⟦lo\n<|im_end|>⟧"},
		"columns of other formats": {chatML,
			`{"messages": null, "text": "hello\n", "tools": null}`, "hel⟦lo\n<|im_end|>⟧"},
		"a preference pair": {"", `{"prompt": "a", "chosen": "b", "rejected": "c"}`,
			"a⟦b<|im_end|>⟧|a⟦c<|im_end|>⟧"},
		"a preference pair with an implicit prompt": {chatML,
			`{"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
			"rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}`,
			"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n|" +
				"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦c<|im_end|>⟧\n"},
		"a template that changes earlier messages": {lastSystem,
			`{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "a"},
			{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
			{"role": "assistant", "content": "d"}]}`,
			"[S a]⟦b<|im_end|>⟧|[a]b<|im_end|>[S c]⟦d<|im_end|>⟧"},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEncoder(t, c.template)
			sequences, err := encodeLine(e, strings.ReplaceAll(c.line, "\n", " "))
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, s := range sequences {
				got = append(got, e.Show(s))
			}
			if text := strings.Join(got, "|"); text != c.want {
				t.Errorf("have %q\nwant %q", text, c.want)
			}
		})
	}
}

func TestProblems(t *testing.T) {
	for line, want := range map[string]string{
		`{"messages": []}`:                                                      "empty list",
		`{"messages": "a"}`:                                                     "not a list",
		`{"messages": [{"a": 1}]}`:                                              `no "role"`,
		`{"messages": [{"role": "user"}]}`:                                      `no "content"`,
		`{"messages": [{"role": "user", "content": 3}]}`:                        "neither a string nor a list",
		`{"messages": [{"from": "human", "value": "a"}]}`:                       "ShareGPT",
		`{"messages": [{"role": "user", "content": "a"}]}`:                      "the assistant says nothing",
		`{"conversations": [{"from": "human", "value": "a"}]}`:                  "ShareGPT",
		`{"instruction": "a", "input": "", "output": "b"}`:                      "Alpaca",
		`{"prompt": "a"}`:                                                       "the prompt has no answer",
		`{"prompt": "a", "completion": [{"role": "assistant", "content": ""}]}`: "make both strings",
		`{"chosen": "a"}`:                                                       "needs both",
		`{"prompt": "a", "chosen": "b", "rejected": "b"}`:                       "equal",
		`{"text": ""}`:                                                          "empty",
		`{"question": "a"}`:                                                     `no format has the members "question"`,
		`{}`:                                                                    "empty",
		`3`:                                                                     "not a JSON object",
		`Once upon a time`:                                                      `plain text can be the value of "text"`,
		`{"text": "a"`:                                                          "not valid JSON",
		`{`:                                                                     "spread over several lines",
		`[{"text": "a"}]`:                                                       "JSON array",
		"{\"text\": \"\xff\"}":                                                  "UTF-8",
		`{"text": "a", "tools": 3}`:                                             `"tools" is not a list`,
		`{"text": "` + strings.Repeat("a ", 60) + `"}`:                          "the answer would be cut off",
	} {
		e := newEncoder(t, chatML)
		e.MaxTokens = 100
		_, err := encodeLine(e, line)
		var p *chatdata.Problem
		if !errors.As(err, &p) || p.Line != 1 || !strings.Contains(p.Error(), want) {
			t.Errorf("%.60s: %v, want a problem with %q", line, err, want)
		}
	}
}

func TestTurnWithoutEnd(t *testing.T) {
	_, err := encodeLine(newEncoder(t, words),
		`{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}`)
	var p *chatdata.Problem
	if !errors.As(err, &p) || !strings.Contains(p.What, "without a token at which the model stops (<|im_end|>)") ||
		p.Show != "user: a\nassistant: b\n" {
		t.Errorf("%v, which shows %q", err, p.Show)
	}
}

func TestReadGoesOnAfterProblems(t *testing.T) {
	file := "\ufeff{\"text\": \"a\"}\n\nnonsense\r\n{\"text\": \"" + strings.Repeat("long ", 1<<15) + "\"}\r\n{\"text\": \"b\"}"
	var lines, problems []int
	for x, err := range chatdata.Read(strings.NewReader(file), "f") {
		var p *chatdata.Problem
		switch {
		case errors.As(err, &p):
			problems = append(problems, p.Line)
		case err != nil:
			t.Fatal(err)
		default:
			lines = append(lines, x.Line)
		}
	}

	if !slices.Equal(lines, []int{1, 4, 5}) || !slices.Equal(problems, []int{3}) {
		t.Errorf("examples in lines %v, problems in lines %v", lines, problems)
	}
}

func TestCheck(t *testing.T) {
	e := newEncoder(t, chatML)
	report, err := e.Check(chatdata.Read(strings.NewReader(strings.Join([]string{
		`{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}`,
		`{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}`,
		`{"messages": [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "b"}]}`,
		`{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]}`,
		`{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]}`,
		`{"prompt": "no answer"}`,
	}, "\n")), "chat.jsonl"), "chat.jsonl", nil)
	if err != nil {
		t.Fatal(err)
	}

	have := func(all []*chatdata.Problem) (lines []string) {
		for _, p := range all {
			lines = append(lines, fmt.Sprintf("%d %s", p.Line, p.What))
		}
		return lines
	}

	if got, want := have(report.Problems), []string{"6 the prompt has no answer"}; !slices.Equal(got, want) {
		t.Errorf("problems %q", got)
	}

	want := []string{"2 it is equal to line 1", "3 the text contains the special token <|im_end|>",
		"4 message 2 is empty, so the model learns to end its turn at once",
		"5 the conversation does not end with the assistant, so the last messages teach nothing"}
	if got := have(report.Warnings); !slices.Equal(got, want) {
		t.Errorf("warnings %q", got)
	}

	if report.Examples[chatdata.Conversation] != 5 || len(report.Sequences) != 5 || report.Learned != 2+2+2+2+2 {
		t.Errorf("%v, %d sequences, %d learned", report.Examples, len(report.Sequences), report.Learned)
	}

	n := 0
	for _, b := range report.Histogram() {
		n += b.Sequences
	}

	if n != 5 {
		t.Errorf("the histogram has %d sequences", n)
	}
}

func TestPack(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		size := 1 + r.IntN(300)
		lengths := make([]int, r.IntN(200))
		total := 0
		for i := range lengths {
			lengths[i] = r.IntN(size + 3)
			if lengths[i] <= size {
				total += lengths[i]
			}
		}

		seen := make([]bool, len(lengths))
		rows := chatdata.Pack(lengths, size)
		for _, row := range rows {
			sum := 0
			for _, i := range row {
				if seen[i] {
					t.Fatalf("item %d is packed twice", i)
				}
				seen[i] = true
				sum += lengths[i]
			}
			if sum > size {
				t.Fatalf("a row of %d has %d", size, sum)
			}
		}
		for i, n := range lengths {
			if seen[i] != (n <= size) {
				t.Fatalf("item %d of length %d in rows of %d: packed %v", i, n, size, seen[i])
			}
		}
		// Best fit decreasing never needs more than 11/9 of the fewest rows, plus one.
		if fewest := (total + size - 1) / size; len(rows) > fewest*2+1 {
			t.Errorf("%d rows of %d for %d", len(rows), size, total)
		}
	}
}

func TestLoader(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	var sequences []chatdata.Sequence
	for i := range 40 {
		s := chatdata.Sequence{Line: i + 1}
		for range 2 + r.IntN(8) {
			s.IDs = append(s.IDs, 1+r.IntN(100))
			s.Learn = append(s.Learn, len(s.IDs) > 1 && r.IntN(2) == 0)
		}
		sequences = append(sequences, s)
	}

	c := data.LoaderConfig{Batch: 3, Seq: 12, Seed: 7}
	l, err := chatdata.NewLoader(sequences, c)
	if err != nil {
		t.Fatal(err)
	}

	// An epoch contains every learned token once, after the earlier tokens of the same sequence.
	want := map[string]int{}
	for _, s := range sequences {
		for i := range s.IDs {
			if s.Learn[i] {
				want[fmt.Sprint(s.IDs[:i], s.IDs[i])]++
			}
		}
	}

	have := map[string]int{}
	c.Batch = 1
	single, err := chatdata.NewLoader(sequences, c)
	if err != nil {
		t.Fatal(err)
	}

	for range single.Rows() {
		b, err := single.Next()
		if err != nil {
			t.Fatal(err)
		}
		count := 0
		for i, target := range b.Targets {
			if target >= 0 {
				have[fmt.Sprint(b.Inputs[b.Starts[i]:i+1], target)]++
				count++
			}
		}
		if count != b.Count {
			t.Errorf("%d targets, Count %d", count, b.Count)
		}
	}

	if fmt.Sprint(have) != fmt.Sprint(want) {
		t.Errorf("an epoch has\n%v\nwant\n%v", have, want)
	}

	// A loader set to a position continues from there, including in the next epoch.
	for range 9 {
		mustNext(t, l)
	}

	other, err := chatdata.NewLoader(sequences, data.LoaderConfig{Batch: 3, Seq: 12, Seed: 8})
	if err != nil {
		t.Fatal(err)
	}

	if err := other.SetState(l.State()); err != nil {
		t.Fatal(err)
	}

	for range 20 {
		if a, b := mustNext(t, l), mustNext(t, other); !slices.Equal(a.Targets, b.Targets) {
			t.Fatal("batches differ after SetState")
		}
	}

	sequences[3].Learn[1] = !sequences[3].Learn[1]
	changed, err := chatdata.NewLoader(sequences, c)
	if err != nil {
		t.Fatal(err)
	}

	if err := changed.SetState(l.State()); !errors.Is(err, data.ErrChanged) {
		t.Errorf("a state of other data: %v", err)
	}
}

func mustNext(t *testing.T, l *chatdata.Loader) data.Batch {
	t.Helper()
	b, err := l.Next()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestLoaderRefuses(t *testing.T) {
	long := chatdata.Sequence{File: "f", Line: 3, IDs: make([]int, 10), Learn: make([]bool, 10)}
	if _, err := chatdata.NewLoader([]chatdata.Sequence{long}, data.LoaderConfig{Batch: 1, Seq: 8}); err == nil {
		t.Error("accepted a sequence that does not fit in a row")
	}
	if _, err := chatdata.NewLoader([]chatdata.Sequence{long}, data.LoaderConfig{Batch: 1, Seq: 9}); err == nil {
		t.Error("accepted sequences of which nothing is learned")
	}
}
