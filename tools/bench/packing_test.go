package main

import (
	"testing"

	"github.com/kasmina-go/kasmina/llm"
)

// TestPacking measures a small model, and checks that a padded chat fills a row and that packed chats share rows.
func TestPacking(t *testing.T) {
	s := size{"tiny", llm.Config{Vocab: 32, Dim: 8, Layers: 1, Heads: 2, FF: 8, Seq: 256, Documents: true}.Default(), 1, false}
	chats := s.chats()
	tokens := tokensOf(chats)
	packed, err := s.pass(chats, 1, llm.CPUEngine())
	if err != nil {
		t.Fatal(err)
	}
	padded, err := s.pass(s.padded(chats), 1, llm.CPUEngine())
	if err != nil {
		t.Fatal(err)
	}

	if want := len(chats) * s.config.Seq; padded.Tokens != want {
		t.Errorf("%d tokens with padding, want %d", padded.Tokens, want)
	}
	if packed.Tokens < tokens || packed.Tokens > tokens*11/10 {
		t.Errorf("%d packed tokens for chats of %d tokens", packed.Tokens, tokens)
	}
	if packed.Us <= 0 || padded.Us <= 0 {
		t.Errorf("%v µs packed and %v µs padded", packed.Us, padded.Us)
	}

	s.batch = 4
	if longest := s.paddedToLongest(chats); longest < tokens || longest > len(chats)*s.config.Seq {
		t.Errorf("%d tokens if padded to the longest chat of each batch", longest)
	}
}
