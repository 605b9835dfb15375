package tasks

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/llm"
)

// A Tokenizer encodes and decodes texts, like the tokenizers of package llm/tokenizer/hf.
type Tokenizer interface {
	VocabSize() int
	BeginningOfText() int // negative if the tokenizer has no such token
	EndOfDocument() int   // negative if the tokenizer has no such token
	Encode(text []byte) []int
	EncodeWhole(text []byte) []int // with the tokens that surround every text
	EncodeOrdinary(text []byte) []int
	Decode(ids []int) ([]byte, error)
	DecodeWhole(ids []int) ([]byte, error) // with special tokens
}

// An encoder turns requests into tokens as lm-eval does.
type encoder struct {
	Tokenizer
	window int // longest sequence of the model

	prefix     int    // token before texts without a context, negative if none
	prefixText string // its text
	beginText  string // text of the beginning-of-text token, "" if none
	endText    string // text of the end-of-text token, "" if none
}

func newEncoder(t Tokenizer, window int) (*encoder, error) {
	e := &encoder{Tokenizer: t, window: window, prefix: t.BeginningOfText()}
	if e.prefix < 0 {
		e.prefix = t.EndOfDocument()
	}

	for _, token := range []struct {
		id   int
		text *string
	}{{e.prefix, &e.prefixText}, {t.BeginningOfText(), &e.beginText}, {t.EndOfDocument(), &e.endText}} {
		if token.id < 0 {
			continue
		}
		text, err := t.DecodeWhole([]int{token.id})
		if err != nil {
			return nil, err
		}
		*token.text = string(text)
	}
	return e, nil
}

// whole encodes a text and adds the tokens that surround every text, such as a beginning-of-text token. It
// adds none to a text that already starts with special, as many chat templates write it.
func (e *encoder) whole(text, special string) []int {
	if special != "" && strings.HasPrefix(text, special) {
		return e.Encode([]byte(text))
	}
	return e.EncodeWhole([]byte(text))
}

// errNoPrefix is the error for texts without a context if the tokenizer has no token to start with.
var errNoPrefix = errors.New("the text has no context, and the tokenizer has neither a beginning-of-text nor an " +
	"end-of-text token to use instead: define bos_token in tokenizer_config.json")

// continuations returns the texts to score for each request of an item. A Rolling request has one for each
// window.
func (e *encoder) continuations(item *Item) ([][]llm.Continuation, error) {
	switch item.Requests[0].Kind {
	case Choice, Ending:
		return e.prompts(item)
	}

	all := make([][]llm.Continuation, len(item.Requests))
	for i, r := range item.Requests {
		var err error
		switch r.Kind {
		case LogLikelihood:
			var c llm.Continuation
			c, err = e.pair(r.Context, r.Continuation)
			all[i] = []llm.Continuation{c}
		case Rolling:
			all[i], err = e.rolling(r.Continuation)
		}
		if err != nil {
			return nil, fmt.Errorf("request %d: %w", i+1, err)
		}
	}
	return all, nil
}

// pair encodes a continuation after its context. As in lm-eval, both are encoded together, and the scored
// tokens start after as many tokens as the context has when it is encoded alone, without white space at its
// end.
func (e *encoder) pair(context, continuation string) (llm.Continuation, error) {
	if context == "" {
		scored := e.Encode([]byte(continuation))
		switch {
		case e.prefix < 0:
			return llm.Continuation{}, errNoPrefix
		case len(scored) > 0 && scored[0] == e.prefix:
			return e.scored(scored[:1], scored[1:], continuation)
		}
		return e.scored([]int{e.prefix}, scored, continuation)
	}

	text := context + continuation
	before := e.whole(strings.TrimRightFunc(context, isSpace), e.prefixText)
	tokens := e.whole(text, e.prefixText)
	if len(before) == 0 { // the context is white space
		if e.prefix < 0 {
			return llm.Continuation{}, errNoPrefix
		}
		return e.scored([]int{e.prefix}, tokens, continuation)
	}
	n := min(len(before), len(tokens))
	return e.scored(before, tokens[n:], continuation)
}

// scored joins a context and the tokens to score. If they exceed the window, the context loses its first
// tokens.
func (e *encoder) scored(context, scored []int, text string) (llm.Continuation, error) {
	switch {
	case len(scored) == 0:
		return llm.Continuation{}, fmt.Errorf("the continuation %.60q adds no token to its context, so it cannot "+
			"be scored: remove the item", text)
	case len(scored) > e.window:
		return llm.Continuation{}, fmt.Errorf("the continuation %.60q has %d tokens, and the model's window %d: "+
			"remove the item, or choose a larger window", text, len(scored), e.window)
	}

	tokens := slices.Concat(context, scored)
	return llm.Continuation{Tokens: tokens[max(0, len(tokens)-e.window-1):], Scored: len(scored)}, nil
}

// rolling divides a text into windows that together score each token once. The first window starts with the prefix
// token. The last window is as long as the others. It therefore begins with tokens that the previous window
// scores.
func (e *encoder) rolling(text string) (windows []llm.Continuation, err error) {
	tokens := e.whole(text, e.prefixText)
	if len(tokens) > 0 && e.prefix < 0 {
		return nil, errNoPrefix
	}

	for done := 0; done < len(tokens); {
		end := min(done+e.window, len(tokens))
		w := llm.Continuation{Scored: end - done}
		if done == 0 {
			w.Tokens = slices.Concat([]int{e.prefix}, tokens[:end])
		} else {
			w.Tokens = tokens[end-e.window-1 : end]
		}
		windows, done = append(windows, w), end
	}
	return windows, nil
}

// question encodes the context of a Generation. The context loses its first tokens if n more tokens would
// not fit into the window.
func (e *encoder) question(context string, n int) ([]int, error) {
	room := e.window - n
	if room < 1 {
		return nil, fmt.Errorf("the model's window has %d tokens, and an answer of %d tokens leaves no room "+
			"for the question: permit fewer answer tokens", e.window, n)
	}

	tokens := e.whole(context, e.beginText)
	if len(tokens) == 0 {
		return nil, errNoPrefix
	}
	return tokens[max(0, len(tokens)-room):], nil
}

// prompts encodes the prompts of an item of a CORE task. It scores the tokens after the common start of the
// prompts, or their common end.
func (e *encoder) prompts(item *Item) ([][]llm.Continuation, error) {
	if e.prefix < 0 {
		return nil, errNoPrefix
	}

	encoded := make([][]int, len(item.Requests))
	for i, r := range item.Requests {
		encoded[i] = slices.Concat([]int{e.prefix}, e.EncodeOrdinary([]byte(r.Context+r.Continuation)))
	}

	all := make([][]llm.Continuation, len(encoded))
	for i, tokens := range encoded {
		scored := 0
		switch {
		case item.Requests[i].Kind == Ending:
			scored = commonEnd(encoded)
		case len(encoded) > 1:
			scored = len(tokens) - commonStart(encoded)
		default:
			start := slices.Concat([]int{e.prefix}, e.EncodeOrdinary([]byte(item.Requests[i].Context)))
			if commonStart([][]int{start, tokens}) < len(start) {
				return nil, fmt.Errorf("the tokens of the prompt change when its continuation %.60q follows: "+
					"remove the item", item.Requests[i].Continuation)
			}
			scored = len(tokens) - len(start)
		}

		tokens = tokens[max(0, len(tokens)-e.window):]
		switch {
		case scored < 1:
			return nil, fmt.Errorf("all tokens of prompt %d are shared with other choices, so it cannot be scored: "+
				"remove the item", i+1)
		case scored >= len(tokens):
			return nil, fmt.Errorf("the continuation of prompt %d has %d tokens, and the model's window %d: "+
				"remove the item, or choose a larger window", i+1, scored, e.window)
		}
		all[i] = []llm.Continuation{{Tokens: tokens, Scored: scored}}
	}
	return all, nil
}

// commonStart returns the number of tokens that all sequences share at their start.
func commonStart(all [][]int) int {
	n := 0
	for ; ; n++ {
		for _, tokens := range all {
			if n == len(tokens) || tokens[n] != all[0][n] {
				return n
			}
		}
	}
}

// commonEnd returns the number of tokens that all sequences share at their end.
func commonEnd(all [][]int) int {
	n := 0
	for ; ; n++ {
		for _, tokens := range all {
			if n == len(tokens) || tokens[len(tokens)-1-n] != all[0][len(all[0])-1-n] {
				return n
			}
		}
	}
}
