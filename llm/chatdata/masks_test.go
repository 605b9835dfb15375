package chatdata_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
	"github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

// masksOf is an entry of the file written by testdata/masks.py, holding a template with its
// conversations.
type masksOf struct {
	Name, Source, Tokenizer string
	End                     []int
	BOS, EOS                string
	Cases                   []struct {
		Name     string
		Messages json.RawMessage
		Tools    json.RawMessage
		IDs      []int
		Mask     []int
		Error    string
	}
}

// TestPublishedMasks compares tokens and masks with the results of transformers, for templates that
// mark the assistant's words with {% generation %}. It requires the file written by
// testdata/masks.py.
func TestPublishedMasks(t *testing.T) {
	folder := os.Getenv("KASMINA_CHAT_CORPUS")
	if folder == "" {
		t.Skip("KASMINA_CHAT_CORPUS is not set: see testdata/masks.py")
	}

	text, err := os.ReadFile(filepath.Join(folder, "masks.json"))
	if err != nil {
		t.Fatal(err)
	}

	var all []masksOf
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}

	counts := map[string]int{}
	for _, m := range all {
		e := encoderOf(t, m)
		if e == nil {
			counts["templates refused"]++
			continue
		}
		counts["templates"]++
		for _, c := range m.Cases {
			line, err := json.Marshal(map[string]any{"messages": c.Messages, "tools": c.Tools})
			if err != nil {
				t.Fatal(err)
			}
			sequences, err := encodeLine(e, string(line))
			var p *chatdata.Problem
			switch {
			case err != nil && c.Error != "":
				counts["errors in both"]++
			case errors.As(err, &p):
				counts["refused here"]++
				t.Logf("%s, %s: %s", m.Name, c.Name, p.What)
			case err != nil:
				t.Errorf("%s, %s: %v", m.Name, c.Name, err)
			case c.Error != "":
				counts["refused there"]++
				t.Logf("%s, %s: refused there: %s", m.Name, c.Name, c.Error)
			case len(sequences) > 1:
				counts["separate turns"]++
				t.Logf("%s, %s: %d sequences", m.Name, c.Name, len(sequences))
			case !slices.Equal(sequences[0].IDs, c.IDs):
				t.Errorf("%s, %s: tokens differ:\n%q\n%q", m.Name, c.Name, decoded(t, e, sequences[0].IDs),
					decoded(t, e, c.IDs))
			default:
				counts[compareMasks(t, e, m.Name+", "+c.Name, sequences[0], c.Mask)]++
			}
		}
	}

	t.Log(counts)
}

// compareMasks compares a mask with that of transformers, which may also cover the white space around
// a turn and the assistant prefix.
func compareMasks(t *testing.T, e *chatdata.Encoder, name string, s chatdata.Sequence, mask []int) string {
	var more []int
	for i, learn := range s.Learn {
		switch {
		case learn && mask[i] == 0:
			t.Errorf("%s: token %d, %q, is learned here alone\n%s", name, i, decoded(t, e, s.IDs[i:i+1]), e.Show(s))
			return "masks differ"
		case !learn && mask[i] != 0:
			more = append(more, s.IDs[i])
		}
	}

	if len(more) == 0 {
		return "equal masks"
	}

	if text := decoded(t, e, more); strings.TrimSpace(text) != "" {
		t.Logf("%s: %q is learned there alone", name, text)
		return "more is learned there"
	}

	return "equal but for white space around a turn"
}

func decoded(t *testing.T, e *chatdata.Encoder, ids []int) string {
	t.Helper()
	text, err := e.Tokenizer.DecodeWhole(ids)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func encoderOf(t *testing.T, m masksOf) *chatdata.Encoder {
	t.Helper()
	config, err := json.Marshal(map[string]string{"bos_token": m.BOS, "eos_token": m.EOS})
	if err != nil {
		t.Fatal(err)
	}

	tok, err := hf.Parse([]byte(m.Tokenizer), config)
	if err != nil {
		t.Fatalf("%s: %v", m.Name, err)
	}

	template, err := chat.Parse(m.Source, config)
	if err != nil {
		t.Errorf("%s: %v", m.Name, err)
		return nil
	}

	end := m.End
	if len(end) == 0 {
		end = []int{tok.EndOfDocument()}
	}

	return &chatdata.Encoder{Tokenizer: tok, Template: template, End: end, Now: time.Now()}
}

// encodeLine encodes the only line of a file.
func encodeLine(e *chatdata.Encoder, line string) ([]chatdata.Sequence, error) {
	for x, err := range chatdata.Read(strings.NewReader(line), "test.jsonl") {
		if err != nil {
			return nil, err
		}
		return e.Encode(x)
	}
	return nil, errors.New("no example")
}
