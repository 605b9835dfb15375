package llm

import "slices"

// A lookup proposes continuations of a text: the tokens that followed an earlier occurrence of its last tokens (prompt
// lookup). A pass computes the logits after all proposed tokens at once, so that correct proposals save passes. Proposals
// do not change the text, because every token is drawn from the logits that follow the actual text.
type lookup struct {
	most  int // largest number of proposed tokens
	count int // number of tokens to propose next
	pause int // number of tokens before the next proposal
	waits int // number of tokens to pause after the next failure

	text   []int  // of the last pass, with the proposed tokens
	seen   uint64 // number of changes of the model before the last pass
	ahead  []any  // logits after the proposed tokens
	served int    // number of tokens of the last proposal that turned out right
}

const (
	matchedTokens = 3 // tokens that an earlier occurrence must share
	firstProposal = 4
	longestPause  = 64
)

// newLookup returns a lookup that proposes at most the given number of tokens.
func newLookup(most int) *lookup {
	return &lookup{most: most, count: min(most, firstProposal), waits: 1}
}

// logits returns the logits after a text if the last pass has computed them. seen is the number of changes of the model so
// far.
func (l *lookup) logits(tokens []int, seen uint64) (any, bool) {
	first := len(l.text) - len(l.ahead) + 1 // number of tokens before the first stored logits
	i := len(tokens) - first
	if l.seen != seen || i < 0 || i >= len(l.ahead) || !slices.Equal(l.text[:len(tokens)], tokens) {
		return nil, false
	}
	l.served = i + 1
	return l.ahead[i], true
}

// propose returns up to limit tokens that are likely to follow.
func (l *lookup) propose(tokens []int, limit int) []int {
	l.learn()
	if l.pause > 0 {
		l.pause--
		return nil
	}

	end := len(tokens) - matchedTokens
	if end < 1 {
		return nil
	}

	last := tokens[end:]
	for at := end - 1; at >= 0; at-- {
		if tokens[at+2] == last[2] && tokens[at+1] == last[1] && tokens[at] == last[0] {
			// Beyond the end of the text, repeat the continuation, as if the text were periodic.
			next := tokens[at+matchedTokens:]
			proposed := make([]int, min(l.count, limit))
			for i := range proposed {
				proposed[i] = next[i%len(next)]
			}
			return proposed
		}
	}
	return nil
}

// learn adapts the length of proposals to the success of the last one.
func (l *lookup) learn() {
	proposed := len(l.ahead)
	l.ahead = nil
	switch {
	case proposed == 0:
	case l.served == 0:
		l.count = min(l.most, firstProposal)
		l.pause, l.waits = l.waits, min(2*l.waits, longestPause)
	case l.served == proposed:
		l.count, l.waits = min(2*l.count, l.most), 1
	default:
		l.count, l.waits = max(1, min(l.served+1, l.most)), 1
	}
	l.served = 0
}

// record stores the logits after each proposed token. text includes these tokens.
func (l *lookup) record(text []int, ahead []any, seen uint64) {
	l.text, l.ahead, l.seen, l.served = text, ahead, seen, 0
}
