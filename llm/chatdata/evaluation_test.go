package chatdata_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
)

// TestEvaluation checks that an evaluation contains every learned token once, regardless of the size of
// its batches.
func TestEvaluation(t *testing.T) {
	e := newEncoder(t, chatML)
	var sequences []chatdata.Sequence
	want := map[string]int{}
	for i := range 13 {
		s, err := encodeLine(e, fmt.Sprintf(`{"prompt": "hello %s", "completion": " world%s"}`,
			strings.Repeat("o ", i%4), strings.Repeat("d", i%3)))
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range s {
			for k, id := range s.IDs {
				if s.Learn[k] {
					want[fmt.Sprint(s.IDs[:k], id)]++
				}
			}
		}
		sequences = append(sequences, s...)
	}

	for _, batch := range []int{1, 2, 5} {
		v, err := e.Evaluation(sequences, batch, 40)
		if err != nil {
			t.Fatal(err)
		}

		have, count := map[string]int{}, 0
		for b := range v.Batches() {
			if len(b.Inputs) != batch*40 || b.Count < 1 {
				t.Fatalf("a batch of %d tokens with %d targets", len(b.Inputs), b.Count)
			}
			count += b.Count
			for i, target := range b.Targets {
				if target < 0 {
					continue
				}
				row := b.Inputs[i/40*40:]
				have[fmt.Sprint(row[b.Starts[i]:i%40+1], target)]++
				if b.Positions[i] != i%40-b.Starts[i] {
					t.Fatalf("token %d is at position %d of a document that starts at %d", i, b.Positions[i], b.Starts[i])
				}
			}
		}
		if fmt.Sprint(have) != fmt.Sprint(want) || count != v.Tokens() {
			t.Errorf("batches of %d: have %v\nwant %v", batch, have, want)
		}
		if _, bpb := v.Score(float64(v.Bytes())); bpb < 1.44 || bpb > 1.45 {
			t.Errorf("one nat for each byte is %v bits per byte", bpb)
		}
		for id := range v.IDs() {
			if id < 0 {
				t.Fatalf("token %d", id)
			}
		}
	}

	two, err := e.Evaluation(sequences, 2, 40)
	if err != nil {
		t.Fatal(err)
	}
	fewer, err := e.Evaluation(sequences[1:], 2, 40)
	if err != nil {
		t.Fatal(err)
	}
	if two.Fingerprint() == fewer.Fingerprint() {
		t.Error("evaluations of different sequences have the same fingerprint")
	}
}

// TestPackedEvaluationRefuses checks the errors of rows that do not fit together.
func TestPackedEvaluationRefuses(t *testing.T) {
	rows := func() data.Batch {
		return data.Batch{Inputs: make([]int, 8), Targets: make([]int, 8), Starts: make([]int, 8),
			Positions: make([]int, 8)}
	}
	for want, change := range map[string]func(*data.Batch) (bytes, seq int){
		"a whole number of sequences of 3": func(*data.Batch) (int, int) { return 1, 3 },
		"want at least 1":                  func(*data.Batch) (int, int) { return 0, 4 },
		"7 targets":                        func(b *data.Batch) (int, int) { b.Targets = b.Targets[1:]; return 1, 4 },
		"sequence 1 has no targets": func(b *data.Batch) (int, int) {
			copy(b.Targets[4:], slices.Repeat([]int{-1}, 4))
			return 1, 4
		},
	} {
		b := rows()
		bytes, seq := change(&b)
		if _, err := data.NewPackedEvaluation(b, bytes, 1, seq); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestPrompt checks the text that a model is given to answer an example.
func TestPrompt(t *testing.T) {
	e := newEncoder(t, chatML)
	for line, want := range map[string]string{
		`{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}`: "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
		`{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
			{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}`: "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n" +
			"<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
		`{"prompt": "a", "completion": "b"}`: "a",
		`{"text": "a"}`:                      "",
	} {
		for x, err := range chatdata.Read(strings.NewReader(strings.ReplaceAll(line, "\n", " ")), "test.jsonl") {
			if err != nil {
				t.Fatal(err)
			}
			have, err := e.Prompt(x)
			if err != nil || have != want {
				t.Errorf("%s: %q, %v", line, have, err)
			}
		}
	}
}
