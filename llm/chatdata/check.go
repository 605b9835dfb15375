package chatdata

import (
	"encoding/json"
	"errors"
	"iter"
	"math/bits"
	"slices"
	"strings"
)

// A Report describes a data file as a model sees it.
type Report struct {
	Examples  map[Format]int
	Sequences []Sequence

	Tokens, Learned int

	// Problems list the examples that cannot be used, in the order of the file. Warnings list usable
	// examples that may not teach the model what their author expects.
	Problems, Warnings []*Problem
}

// Check encodes the examples of a data file, such as [ReadFile] yields. The name appears in problems
// of the whole file. Unless progress is nil, it is called after each example with the number of examples
// so far, and an error from it ends the check.
//
// Check returns an error only if reading or progress fails. Problems with examples are listed in the
// report.
func (e *Encoder) Check(examples iter.Seq2[Example, error], name string, progress func(examples int) error) (*Report,
	error) {
	report := &Report{Examples: map[Format]int{}}
	seen := map[string]int{} // the line or row of each example
	count := 0
	for x, err := range examples {
		if count++; progress != nil {
			if err := progress(count); err != nil {
				return nil, err
			}
		}

		var sequences []Sequence
		if err == nil {
			sequences, err = e.Encode(x)
		}
		var p *Problem
		switch {
		case errors.As(err, &p):
			report.Problems = append(report.Problems, p)
			continue
		case err != nil:
			return nil, err
		}

		report.Examples[x.Format]++
		report.Sequences = append(report.Sequences, sequences...)
		for _, s := range sequences {
			report.Tokens += len(s.IDs)
			report.Learned += s.Learned()
		}
		report.Warnings = append(report.Warnings, e.warnings(&x, sequences, seen)...)
	}

	if report.Examples[Preference] > 0 && len(report.Examples) > 1 {
		report.Problems = append(report.Problems, &Problem{File: name,
			What: "some examples are preference pairs and some are not",
			Fix:  "split the file, since the two are trained differently"})
	}

	if len(report.Examples) == 0 && len(report.Problems) == 0 {
		report.Problems = append(report.Problems, &Problem{File: name, What: "the file has no examples",
			Fix: "add some with " + formats})
	}

	return report, nil
}

// warnings returns what may surprise the author of an example. The map seen holds the numbers of the lines
// or rows of earlier examples, keyed by the fingerprints of their sequences.
func (e *Encoder) warnings(x *Example, sequences []Sequence, seen map[string]int) (all []*Problem) {
	warn := func(fix, format string, args ...any) {
		p := x.problem(fix, format, args...)
		p.Show = e.showAll(sequences)
		all = append(all, p)
	}

	key := fingerprint(sequences)
	if line, ok := seen[key]; ok {
		warn("remove one of them, unless it is meant to count twice", "it is equal to %s %d", x.unit(), line)
	} else {
		seen[key] = x.Line
	}

	for _, c := range []Content{x.Prompt, x.Completion, x.Rejected} {
		texts := []string{c.Text}
		for _, m := range c.Messages {
			texts = append(texts, m.Text)
		}
		for _, text := range texts {
			if name := e.specialToken(text); name != "" && x.Format != PlainText {
				warn("remove it, since the template writes the special tokens",
					"the text contains the special token %s", name)
			}
		}
	}

	learned := e.learnedText(sequences)
	for i, m := range x.Completion.Messages {
		if m.Role != "assistant" || len(m.Text) == 0 && !isString(m, "content") {
			continue
		}
		switch text := strings.TrimSpace(m.Text); {
		case text == "":
			warn("leave the example out, unless the model is to say nothing", "message %d is empty, so the "+
				"model learns to end its turn at once", i+1)
		case !strings.Contains(learned, text):
			warn("check whether the template is meant to leave it out, as some do with earlier thoughts",
				"the template does not write message %d as it stands", i+1)
		}
	}

	if n := len(x.Completion.Messages); n > 0 && x.Completion.Messages[n-1].Role != "assistant" {
		warn("remove what follows the last answer", "the conversation does not end with the assistant, so "+
			"the last messages teach nothing")
	}

	return all
}

// isString reports whether a member of a message is a string.
func isString(m Message, name string) bool {
	var members map[string]json.RawMessage
	err := json.Unmarshal(m.JSON, &members)
	return err == nil && len(members[name]) > 0 && members[name][0] == '"'
}

// specialToken returns the first special token in a text, or "".
func (e *Encoder) specialToken(text string) string {
	if text == "" {
		return ""
	}
	for _, id := range e.Tokenizer.Encode([]byte(text)) {
		if name, ok := e.Tokenizer.Token(id); ok && e.Tokenizer.IsSpecial(id) && strings.Contains(text, name) {
			return name
		}
	}
	return ""
}

// learnedText returns the text of the learned tokens.
func (e *Encoder) learnedText(sequences []Sequence) string {
	var ids []int
	for _, s := range sequences {
		for i, id := range s.IDs {
			if s.Learn[i] {
				ids = append(ids, id)
			}
		}
	}

	text, err := e.Tokenizer.DecodeWhole(ids)
	if err != nil {
		return ""
	}

	return string(text)
}

func (e *Encoder) showAll(sequences []Sequence) string {
	texts := make([]string, len(sequences))
	for i, s := range sequences {
		texts[i] = e.Show(s)
	}
	return strings.Join(texts, "\n")
}

// Longest returns the number of tokens of the longest sequence.
func (r *Report) Longest() int {
	n := 0
	for _, s := range r.Sequences {
		n = max(n, len(s.IDs))
	}
	return n
}

// A Bucket counts the sequences of at most Tokens tokens that were not counted by an earlier bucket.
type Bucket struct{ Tokens, Sequences int }

// Histogram counts the sequences by their lengths, in buckets that end at powers of two.
func (r *Report) Histogram() (all []Bucket) {
	for _, s := range r.Sequences {
		at := bits.Len(uint(max(0, len(s.IDs)-1)))
		for len(all) <= at {
			all = append(all, Bucket{Tokens: 1 << len(all)})
		}
		all[at].Sequences++
	}
	first := slices.IndexFunc(all, func(b Bucket) bool { return b.Sequences > 0 })
	return all[max(0, first):]
}
