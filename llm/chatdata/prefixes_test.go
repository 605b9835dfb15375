package chatdata_test

import (
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
	"github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

//go:generate python3 testdata/prefixes.py

// A prefixCorpus is a file written by testdata/prefixes.py.
type prefixCorpus struct {
	Tokenizer     string
	Conversations map[string]struct {
		Messages, Tools json.RawMessage
		Variables       map[string]json.RawMessage
	}
	Templates []struct {
		Name, Source string
		Ends         []int
		Cases        map[string]struct {
			Sequences []learnedTokens
			Error     string
		}
	}
}

// learnedTokens describes a sequence: the number of its tokens and the ranges that are learned.
type learnedTokens struct {
	Tokens  int
	Learned [][2]int
}

func learnedIn(s chatdata.Sequence) learnedTokens {
	l := learnedTokens{Tokens: len(s.IDs)}
	for i, learn := range s.Learn {
		switch n := len(l.Learned); {
		case !learn:
		case n > 0 && l.Learned[n-1][1] == i:
			l.Learned[n-1][1]++
		default:
			l.Learned = append(l.Learned, [2]int{i, i + 1})
		}
	}
	return l
}

const specialTokens = `{"bos_token":"<bos>","eos_token":"<eos>"}`

// compare encodes all conversations with all templates. It fails the test for every sequence whose tokens to learn
// differ, and counts the outcomes.
func (c prefixCorpus) compare(t *testing.T) map[string]int {
	tok, err := hf.Parse([]byte(c.Tokenizer), []byte(specialTokens))
	require.NoError(t, err)

	counts := map[string]int{}
	for _, published := range c.Templates {
		template, err := chat.Parse(published.Source, []byte(specialTokens))
		if err != nil { // part of a template
			for name, want := range published.Cases {
				require.NotEmpty(t, want.Error, "%s, %s: %v", published.Name, name, err)
			}
			continue
		}
		counts["templates"]++

		e := &chatdata.Encoder{Tokenizer: tok, Template: template, End: published.Ends,
			Now: time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC)}
		agreed := 0
		for _, name := range slices.Sorted(maps.Keys(published.Cases)) {
			conversation, want := c.Conversations[name], published.Cases[name]
			line, err := json.Marshal(map[string]any{"messages": conversation.Messages, "tools": conversation.Tools,
				"chat_template_kwargs": conversation.Variables})
			require.NoError(t, err)

			sequences, err := encodeLine(e, string(line))
			var p *chatdata.Problem
			switch {
			case err != nil && !errors.As(err, &p):
				t.Errorf("%s, %s: %v", published.Name, name, err)
				continue
			case err != nil && want.Error != "":
				counts["refused in both"]++
				continue
			case err != nil:
				counts["refused here alone"]++
				t.Logf("%s, %s: refused here: %s", published.Name, name, p.What)
				continue
			case want.Error != "":
				counts["refused there alone"]++
				t.Logf("%s, %s: refused there: %s\n%s", published.Name, name, want.Error, e.Show(sequences[0]))
				continue
			}

			var got []learnedTokens
			for _, s := range sequences {
				got = append(got, learnedIn(s))
			}
			if !slices.EqualFunc(got, want.Sequences, func(a, b learnedTokens) bool {
				return a.Tokens == b.Tokens && slices.Equal(a.Learned, b.Learned)
			}) {
				counts["different"]++
				t.Errorf("%s, %s: got %v, want %v", published.Name, name, got, want.Sequences)
				for _, s := range sequences {
					t.Log(e.Show(s))
				}
				continue
			}
			counts["equal"]++
			agreed++
		}
		if agreed > 0 {
			counts["templates with equal masks"]++
		}
	}
	return counts
}

func readPrefixes(t *testing.T, path string) (c prefixCorpus) {
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &c))
	return c
}

// TestPrefixes compares the tokens to learn with those that a program in Python finds by rendering prefixes with
// transformers.
func TestPrefixes(t *testing.T) {
	counts := readPrefixes(t, filepath.Join("testdata", "prefixes.json")).compare(t)
	t.Log(counts)
	require.Greater(t, counts["equal"], 40)
}

// TestPublishedPrefixes is TestPrefixes with the templates of published models. It requires the file written by
// testdata/prefixes.py for a folder of them.
func TestPublishedPrefixes(t *testing.T) {
	folder := os.Getenv("KASMINA_CHAT_CORPUS")
	if folder == "" {
		t.Skip("KASMINA_CHAT_CORPUS names no folder of published templates, which are not part of this repository: see testdata/prefixes.py")
	}
	t.Log(readPrefixes(t, filepath.Join(folder, "prefixes.json")).compare(t))
}
