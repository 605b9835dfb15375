// Package grammar restricts the tokens that a model can generate, so that the text follows a JSON schema or
// another grammar.
//
//	g, err := grammar.Schema(schema)                // the texts that are wanted
//	v := grammar.NewVocabulary(tokens, end)         // the texts of the model's tokens
//	m, err := v.Matcher(g)                          // can be used for many texts
//	s.Constrain(m.New())                            // s is the sampler of one text
//
// A pushdown automaton over bytes recognizes the beginnings of texts. The tokens that can follow in a state of
// the automaton are found by a walk through the vocabulary, and are kept for the next time.
package grammar

import (
	"errors"
	"fmt"
)

// A Grammar describes a set of texts. It is immutable.
type Grammar struct {
	build func() *node // returns nodes that nothing else uses
}

// ErrNothing reports that no text follows a grammar.
var ErrNothing = errors.New("grammar: no text follows the grammar")

// newGrammar returns a grammar, or an error if no text follows it.
func newGrammar(build func() *node) (*Grammar, error) {
	if !prune(build()) {
		return nil, ErrNothing
	}
	return &Grammar{build}, nil
}

// Object returns the grammar of all JSON objects.
func Object() *Grammar { return &Grammar{func() *node { return newCompiler(nil).members() }} }

// Text returns the grammar of a single text.
func Text(text string) *Grammar { return &Grammar{func() *node { return mark(text) }} }

// Sequence returns the grammar of texts with one part of each of the given grammars.
func Sequence(parts ...*Grammar) *Grammar {
	return &Grammar{func() *node { return newSequence(build(parts)...) }}
}

// Choice returns the grammar of the texts that follow any of the given grammars.
func Choice(parts ...*Grammar) *Grammar {
	return &Grammar{func() *node { return newChoice(build(parts)...) }}
}

// Repeat returns the grammar of at least least and at most most texts, one after the other. If most is
// negative, there is no upper limit.
func Repeat(part *Grammar, least, most int) *Grammar {
	return &Grammar{func() *node { return newRepetition(part.build(), least, most) }}
}

func build(parts []*Grammar) (all []*node) {
	for _, p := range parts {
		all = append(all, p.build())
	}
	return all
}

// Schema returns a grammar of JSON values that match a JSON schema. An unsupported keyword is an error.
//
// The grammar need not include every such value. Members have the order of the schema. An object has no
// members besides the ones in properties and required, unless additionalProperties is given. White space is
// limited, and numbers have at most 18 digits before and 15 after the decimal point. Regular expressions have
// the syntax of package regexp.
func Schema(schema []byte) (*Grammar, error) {
	document, err := decode(schema)
	if err != nil {
		return nil, fmt.Errorf("grammar: Schema: the schema is not JSON: %w", err)
	}
	if _, err := newCompiler(document).schema(document, ""); err != nil {
		return nil, fmt.Errorf("grammar: Schema: %w", err)
	}

	g, err := newGrammar(func() *node {
		n, err := newCompiler(document).schema(document, "")
		if err != nil {
			panic(err) // it has been compiled before
		}
		return n
	})
	if err != nil {
		return nil, errors.New("grammar: Schema: no value matches the schema")
	}
	return g, nil
}

func newCompiler(document any) *compiler {
	return &compiler{document: document, refs: map[string]*node{}}
}

// A Tokenizer knows the bytes that each token adds to a text. It returns nil for tokens that add nothing.
type Tokenizer interface{ Bytes(id int) []byte }

// VocabularyOf returns the vocabulary of a model with the given number of tokens. The tokens of end end a text.
func VocabularyOf(t Tokenizer, tokens int, end []int) *Vocabulary {
	texts := make([][]byte, tokens)
	for id := range texts {
		texts[id] = t.Bytes(id)
	}
	return NewVocabulary(texts, end)
}
