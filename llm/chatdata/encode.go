package chatdata

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
)

// Tokenizer is the interface between an Encoder and a model's tokenizer. Package
// [github.com/kasmina-go/kasmina/llm/tokenizer/hf] implements it.
type Tokenizer interface {
	// Encode returns the tokens of a text. Names of special tokens in the text are encoded as these
	// tokens.
	Encode(text []byte) []int
	// DecodeWhole returns the text of the tokens, including special ones.
	DecodeWhole(ids []int) ([]byte, error)
	// Affixes returns the tokens that begin and end a text that is not a conversation.
	Affixes() (before, after []int)
	// Token returns a token as it is written in the tokenizer's file.
	Token(id int) (string, bool)
	IsSpecial(id int) bool
}

// An Encoder converts examples to tokens. It is safe for concurrent use.
type Encoder struct {
	Tokenizer Tokenizer
	Template  *chat.Template // may be nil if no example is a conversation

	// End lists the tokens that stop generation. The first one ends texts and completions that are not
	// conversations.
	End []int

	// MaxTokens is the maximum number of tokens in a sequence, or 0 for no limit.
	MaxTokens int

	// Now is the date for templates that write one. Keep it constant for the whole run, so that a run
	// resumed on another day sees the same text.
	Now time.Time
}

// A Sequence is a tokenized text with a mask of the tokens to learn.
type Sequence struct {
	File    string
	Line    int
	Parquet bool // whether Line is the number of a row of a parquet file

	IDs   []int
	Learn []bool // Learn[i] reports whether the model is trained to predict IDs[i]
}

// Location returns the place of the example in its file, such as "chat.jsonl:3" or "chat.parquet, row 3".
func (s Sequence) Location() string { return location(s.File, s.Line, s.Parquet) }

// Learned returns the number of learned tokens.
func (s Sequence) Learned() int {
	n := 0
	for _, learn := range s.Learn {
		if learn {
			n++
		}
	}
	return n
}

// Encode returns the sequences of an example. A preference pair yields one for the chosen answer and
// one for the rejected answer; other examples usually yield a single sequence.
//
// Conversations are rendered with the chat template. The tokens to learn are found by rendering the
// messages before each turn of the assistant. A turn starts after the assistant prefix that the
// template adds for generation, and includes the end token, so the model learns exactly the tokens it
// will have to generate. If the assistant speaks first, its turn starts with its words.
//
// Some templates change the rendering of a message once another message follows. Such a conversation
// becomes several sequences, one for each turn of the assistant, rendered as for generation.
//
// The error is a *[Problem] if the example is at fault, that is, if it exceeds MaxTokens, if there is
// nothing to learn, if the template rejects the conversation, or if the template ends a turn of the
// assistant without one of the End tokens.
func (e *Encoder) Encode(x Example) ([]Sequence, error) {
	if len(e.End) == 0 {
		return nil, errors.New("chatdata: the encoder has no end token")
	}

	answers := []Content{x.Completion}
	if x.Format == Preference {
		answers = append(answers, x.Rejected)
	}

	var all []Sequence
	for _, answer := range answers {
		var sequences []Sequence
		var err error
		if answer.IsChat() {
			sequences, err = e.conversation(&x, answer)
		} else {
			sequences, err = e.text(&x, answer)
		}
		if err != nil {
			return nil, err
		}
		all = append(all, sequences...)
	}

	if x.Format == Preference && len(all) != len(answers) {
		return nil, x.problem("let both answers be one message of the assistant",
			"the template renders the turns of an answer separately")
	}

	if x.Format == Preference && !x.Completion.IsChat() {
		alignAnswers(all[0], all[1])
	}

	for _, s := range all {
		if err := e.check(&x, s); err != nil {
			return nil, err
		}
	}

	return all, nil
}

// alignAnswers makes both answers of a pair start at the same token, the earlier of the two starts. The
// starts differ if the first token of one answer also covers the end of the prompt. TRL does the same.
func alignAnswers(chosen, rejected Sequence) {
	first := min(slices.Index(chosen.Learn, true), slices.Index(rejected.Learn, true))
	for _, s := range []Sequence{chosen, rejected} {
		for i := max(0, first); i < len(s.Learn) && !s.Learn[i]; i++ {
			s.Learn[i] = true
		}
	}
}

// check reports a sequence that is too long or has nothing to learn.
func (e *Encoder) check(x *Example, s Sequence) error {
	var p *Problem
	switch {
	case e.MaxTokens > 0 && len(s.IDs) > e.MaxTokens:
		p = x.problem("shorten it, train on longer sequences, or leave it out",
			"it has %d tokens, but only %d fit, so the answer would be cut off", len(s.IDs), e.MaxTokens)
	case s.Learned() == 0:
		p = x.problem("add an answer of the assistant", "there is nothing to learn")
	default:
		return nil
	}

	p.Show = e.Show(s)
	return p
}

// text encodes a text, or a prompt with its completion.
func (e *Encoder) text(x *Example, answer Content) ([]Sequence, error) {
	before, _ := e.Tokenizer.Affixes()
	full := x.Prompt.Text + answer.Text
	ids := e.Tokenizer.Encode([]byte(full))
	start, err := e.tokensBefore(ids, full, len(x.Prompt.Text))
	if err != nil {
		return nil, x.problem("", "%v", err)
	}

	if len(ids) == 0 || !slices.Contains(e.End, ids[len(ids)-1]) {
		ids = append(ids, e.End[0])
	}

	s := Sequence{File: x.File, Line: x.Line, Parquet: x.Parquet, IDs: slices.Concat(before, ids)}
	s.Learn = make([]bool, len(s.IDs))
	for i := len(before) + start; i < len(s.IDs); i++ {
		s.Learn[i] = i > 0 // nothing predicts the first token
	}

	return []Sequence{s}, nil
}

// conversation encodes the prompt followed by the answer. The mask covers the assistant's turns in the
// answer.
func (e *Encoder) conversation(x *Example, answer Content) ([]Sequence, error) {
	if e.Template == nil {
		return nil, x.problem(`give "prompt" and "completion" as strings, or use a model that has a chat `+
			`template`, "it is a conversation, and the model has no chat template")
	}

	messages := slices.Concat(x.Prompt.Messages, answer.Messages)
	var turns []int // the assistant's messages to learn
	for i := len(x.Prompt.Messages); i < len(messages); i++ {
		if messages[i].Role == "assistant" {
			turns = append(turns, i)
		}
	}

	if len(turns) == 0 {
		return nil, x.problem(`add a message with the role "assistant"`, "the assistant says nothing")
	}

	r := renderer{e: e, x: x, messages: messages}
	full, err := r.render(len(messages), false)
	if err != nil {
		return nil, err
	}

	s := Sequence{File: x.File, Line: x.Line, Parquet: x.Parquet, IDs: e.Tokenizer.Encode([]byte(full))}
	s.Learn = make([]bool, len(s.IDs))
	for n, i := range turns {
		next := len(messages)
		if n+1 < len(turns) {
			next = turns[n+1]
		}
		switch err := r.learn(&s, full, i, next); {
		case errors.Is(err, errUnstable):
			return r.separate(turns)
		case err != nil:
			return nil, err
		}
	}

	return []Sequence{s}, nil
}

// Prompt returns the text that the model continues to answer an example. For a conversation, that is
// everything before the last turn of the assistant, followed by the template's generation prompt. For a
// completion, it is the prompt, and for plain text "".
func (e *Encoder) Prompt(x Example) (string, error) {
	if !x.Completion.IsChat() {
		return x.Prompt.Text, nil
	}

	if e.Template == nil {
		return "", errors.New("chatdata: the model has no chat template")
	}

	messages := slices.Concat(x.Prompt.Messages, x.Completion.Messages)
	n := len(messages) // those before the assistant's turn
	for i, m := range messages {
		if m.Role == "assistant" {
			n = i
		}
	}

	r := renderer{e: e, x: &x, messages: messages}
	return r.render(n, true)
}

// errUnstable reports that a template renders messages differently once more messages follow.
var errUnstable = errors.New("the template renders messages differently once more messages follow")

// A renderer renders the first messages of a conversation.
type renderer struct {
	e        *Encoder
	x        *Example
	messages []Message
}

// render renders the first n messages, followed by the assistant prefix if the assistant is to speak
// next.
func (r *renderer) render(n int, assistant bool) (string, error) {
	if n == 0 {
		return "", nil
	}

	list := make([]json.RawMessage, n)
	for i, m := range r.messages[:n] {
		list[i] = m.JSON
	}

	text, err := json.Marshal(list)
	if err != nil {
		return "", r.x.problem("", "%v", err)
	}

	o := chat.Options{AddGenerationPrompt: assistant, Now: r.e.Now, Variables: map[string]any{}}
	for name, value := range r.x.Variables {
		o.Variables[name] = value
	}

	if r.x.Tools != nil {
		o.Variables["tools"] = r.x.Tools
	}

	out, err := r.e.Template.RenderJSON(text, o)
	if err != nil {
		return "", r.x.problem("change the conversation to one that the model's chat template accepts",
			"the chat template refuses its first %d messages (%v)", n, err)
	}

	return out, nil
}

// learn marks the tokens of message i, written by the assistant, in the sequence for the full
// conversation. next is the index of the assistant's next message.
func (r *renderer) learn(s *Sequence, full string, i, next int) error {
	begin, err := r.begin(full, i)
	if err != nil {
		return err
	}

	// Find the end token of the turn. If the messages up to this turn are rendered as in the full
	// conversation, it is the last end token in them, even if the assistant's words contain another
	// one. Otherwise, it is the first end token after the start of the turn.
	finished, err := r.render(i+1, false)
	if err != nil {
		return err
	}

	limit, stable := len(finished), strings.HasPrefix(full, finished)
	if !stable {
		limit = len(full)
		if next < len(r.messages) {
			if limit, err = r.begin(full, next); err != nil {
				return err
			}
		}
	}

	from, err := r.e.tokensBefore(s.IDs, full, begin)
	if err != nil {
		return r.x.problem("", "%v", err)
	}

	to, err := r.e.tokensBefore(s.IDs, full, limit)
	if err != nil {
		return r.x.problem("", "%v", err)
	}

	turn := s.IDs[from:max(from, to)]
	end := slices.IndexFunc(turn, r.e.isEnd)
	if stable {
		end = r.e.lastEnd(turn)
	}

	if end < 0 {
		p := r.x.problem("use a template or a generation_config.json in which a token of eos_token_id ends "+
			"the assistant's turns", "the template ends message %d, which is the assistant's, without a token "+
			"at which the model stops (%s)", i+1, r.e.endNames())
		p.Show = full
		return p
	}

	for j := from; j <= from+end; j++ {
		s.Learn[j] = j > 0
	}

	return nil
}

// begin returns the length of the part of the full conversation that precedes the assistant's words in
// message i.
func (r *renderer) begin(full string, i int) (int, error) {
	if i == 0 {
		return commonPrefix(full, r.opening()), nil
	}

	invited, err := r.render(i, true)
	if err != nil {
		return 0, err
	}

	if strings.HasPrefix(full, invited) {
		return len(invited), nil
	}

	// Some templates prompt the assistant to think, with words missing from the finished turn. The
	// common prefix of both must include all earlier messages.
	context, err := r.render(i, false)
	if err != nil {
		return 0, err
	}

	common := commonPrefix(full, invited)
	if !strings.HasPrefix(full, context) || common < len(context) {
		return 0, errUnstable
	}

	return common, nil
}

// opening returns the text before the words of an assistant that speaks first, as far as it can be found. Many templates
// cannot render a conversation without messages, so opening renders two that differ only in these words.
func (r *renderer) opening() string {
	var texts [2]string
	for i, words := range []string{"a", "b"} {
		other := *r
		other.messages = slices.Clone(r.messages)
		other.messages[0].JSON = json.RawMessage(`{"role": "assistant", "content": "` + words + `"}`)

		var err error
		if texts[i], err = other.render(len(other.messages), false); err != nil {
			return ""
		}
	}

	return texts[0][:commonPrefix(texts[0], texts[1])]
}

// separate encodes each turn of the assistant as a separate sequence. The sequence consists of the
// messages before the turn, rendered as for generation, and the turn itself.
func (r *renderer) separate(turns []int) (all []Sequence, err error) {
	for _, i := range turns {
		full, err := r.render(i+1, false)
		if err != nil {
			return nil, err
		}
		s := Sequence{File: r.x.File, Line: r.x.Line, Parquet: r.x.Parquet, IDs: r.e.Tokenizer.Encode([]byte(full))}
		s.Learn = make([]bool, len(s.IDs))
		switch err := r.learn(&s, full, i, i+1); {
		case errors.Is(err, errUnstable):
			p := r.x.problem("use a chat template that renders what precedes the assistant's turn as it does "+
				"when it asks for the turn", "the template renders the messages before message %d differently "+
				"once the assistant has answered, so that its answer cannot be told apart", i+1)
			p.Show = full
			return nil, p
		case err != nil:
			return nil, err
		}
		all = append(all, s)
	}

	return all, nil
}

// tokensBefore returns the number of tokens that end at or before byte at of the text.
func (e *Encoder) tokensBefore(ids []int, text string, at int) (int, error) {
	if at == len(text) {
		return len(ids), nil
	}

	head := e.Tokenizer.Encode([]byte(text[:at]))
	n := 0
	for n < min(len(head), len(ids)) && head[n] == ids[n] {
		n++
	}

	if n == len(head) {
		return n, nil
	}

	// A token of the text crosses the boundary, or the tokens before it are split differently because
	// of what follows. Count the tokens that decode to no more than the head does.
	want, err := e.Tokenizer.DecodeWhole(head)
	if err != nil {
		return 0, err
	}

	for n < len(ids) {
		have, err := e.Tokenizer.DecodeWhole(ids[:n+1])
		if err != nil {
			return 0, err
		}
		if len(have) > len(want) {
			break
		}
		n++
	}

	return n, nil
}

// endNames lists the end tokens for a message.
func (e *Encoder) endNames() string {
	names := make([]string, len(e.End))
	for i, id := range e.End {
		name, ok := e.Tokenizer.Token(id)
		if !ok {
			name = fmt.Sprint("token ", id)
		}
		names[i] = name
	}
	return strings.Join(names, ", ")
}

// Show returns a sequence as text, with the learned parts between ⟦ and ⟧.
func (e *Encoder) Show(s Sequence) string {
	var text bytes.Buffer
	for start := 0; start < len(s.IDs); {
		end := start + 1
		for end < len(s.IDs) && s.Learn[end] == s.Learn[start] {
			end++
		}
		part, err := e.Tokenizer.DecodeWhole(s.IDs[start:end])
		if err != nil {
			part = fmt.Append(nil, s.IDs[start:end])
		}
		if s.Learn[start] {
			fmt.Fprintf(&text, "⟦%s⟧", part)
		} else {
			text.Write(part)
		}
		start = end
	}

	return text.String()
}

func commonPrefix(a, b string) int {
	n := 0
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}

func (e *Encoder) isEnd(id int) bool { return slices.Contains(e.End, id) }

// lastEnd returns the index of the last end token of a turn, or -1. In a run of end tokens, with only
// white space between them, it returns the first one, because generation stops there.
func (e *Encoder) lastEnd(turn []int) int {
	end := -1
	for i, id := range slices.Backward(turn) {
		if e.isEnd(id) {
			end = i
			continue
		}
		text, err := e.Tokenizer.DecodeWhole([]int{id})
		if end >= 0 && (err != nil || len(bytes.TrimSpace(text)) > 0) {
			break
		}
	}

	return end
}
