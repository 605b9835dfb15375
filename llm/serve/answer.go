package serve

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kasmina-go/kasmina/internal/stoptext"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/grammar"
	"github.com/kasmina-go/kasmina/llm/sampler"
)

// A job is a request in terms of the model.
type job struct {
	model   *Model
	choices []choice
	prompt  int // number of tokens in all prompts
	stream  bool

	stop    []string   // texts that end an answer
	end     []int      // tokens that end an answer
	reasons bool       // whether to separate reasoning from the answer
	thinks  bool       // whether the prompt ends with the mark at the start of the reasoning
	tools   callFormat // format of the tool calls that the answer may contain
	names   []string   // names of the functions that can be called
	oneTool bool       // whether the first call ends the answer

	matcher *grammar.Matcher // limits the answer to the texts that the request permits; nil without a limit
}

// A choice describes one answer to a request.
type choice struct {
	prompt   []int
	limit    int // maximum number of tokens to draw
	sampling sampler.Config
}

// A piece is a part of an answer.
type piece struct {
	choice    int
	reasoning string
	text      string
	tokens    []token // the tokens of the text, if requested
	call      *toolCall
	end       *ending // in the last piece
}

// A token is a token of an answer with its log-probabilities.
type token struct {
	sampler.TokenProb
	top   []sampler.TokenProb
	start int // number of bytes of the answer before it
}

// A toolCall is a request of the model to call a function.
type toolCall struct {
	name      string
	arguments string // a JSON object
}

// An ending describes the end of an answer.
type ending struct {
	reason   string // endStop, endLength or endTools
	stopText string // stop text that ended the answer, if any
	drawn    int    // number of tokens
	cached   int    // number of tokens of the prompt that an earlier text had computed
}

// These are OpenAI's names of the reasons.
const (
	endStop   = "stop"
	endLength = "length"
	endTools  = "tool_calls"
)

// A result is a complete answer.
type result struct {
	reasoning string
	text      string
	tokens    []token
	calls     []toolCall
	ending
}

// add appends a piece.
func (r *result) add(p piece) {
	r.reasoning += p.reasoning
	r.text += p.text
	r.tokens = append(r.tokens, p.tokens...)
	if p.call != nil {
		r.calls = append(r.calls, *p.call)
	}
	if p.end != nil {
		r.ending = *p.end
	}
}

// run computes the answers to a job and calls emit with each piece, from a single goroutine. If it
// returns an error, all generators have stopped.
func (s *Server) run(ctx context.Context, j *job, emit func(piece) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	pieces := make(chan piece)
	next := make(chan int, len(j.choices))
	for i := range j.choices {
		next <- i
	}
	close(next)

	var workers sync.WaitGroup
	for range min(len(j.choices), s.options.Slots) {
		workers.Go(func() {
			for i := range next {
				err := s.answer(ctx, j, i, func(p piece) error {
					p.choice = i
					select {
					case pieces <- p:
						return nil
					case <-ctx.Done():
						return context.Cause(ctx)
					}
				})
				if err != nil {
					cancel(err) // keeps the first error
					return
				}
			}
		})
	}

	go func() {
		workers.Wait()
		close(pieces)
	}()
	for p := range pieces {
		if err := emit(p); err != nil {
			cancel(err)
			for range pieces {
			}
			break
		}
	}

	err := context.Cause(ctx)
	cancel(nil)
	return err
}

// collect computes complete answers.
func (s *Server) collect(ctx context.Context, j *job) ([]result, error) {
	results := make([]result, len(j.choices))
	return results, s.run(ctx, j, func(p piece) error {
		results[p.choice].add(p)
		return nil
	})
}

// answer computes one answer and calls emit with its pieces.
func (s *Server) answer(ctx context.Context, j *job, i int, emit func(piece) error) (err error) {
	defer func() {
		// A fault of the generator ends the answer and not the server.
		if p := recover(); p != nil {
			err = fmt.Errorf("the generator panicked: %v", p)
		}
	}()

	c := j.choices[i]
	draw, err := sampler.New(c.sampling)
	if err != nil {
		return err
	}
	draw.Observe(c.prompt...)
	if j.matcher != nil {
		draw.Constrain(j.matcher.New())
	}
	decoder := j.model.Tokenizer.NewDecoder(true)
	if err := decoder.Prime(c.prompt); err != nil {
		return err
	}

	var cached atomic.Int64
	ctx = llm.WithReuse(ctx, &cached)
	out := &output{job: j, emit: emit, cutter: stoptext.Cutter{Stops: j.stop}, calls: j.finder()}
	switch {
	case j.matcher != nil: // which permits no reasoning
		out.think.part = answering
	case j.thinks:
		out.think.part = thinking
	}
	end := ending{reason: endLength}
	s.metrics.prompt(len(c.prompt))
	if c.limit > 0 {
		for id, err := range j.model.Generator.Generate(ctx, c.prompt, c.limit, draw) {
			if err != nil {
				return err
			}
			end.drawn++
			s.metrics.token()
			if slices.Contains(j.end, id) {
				end.reason = endStop
				break
			}

			text, err := decoder.Next(id)
			if err != nil {
				return err
			}
			if c.sampling.LogProbs {
				out.note(id, draw)
			}
			if err := out.write(text); err != nil {
				if errors.Is(err, errStopped) {
					end.reason = endStop
					break
				}
				return err
			}
			if draw.Done() {
				end.reason = endStop
				break
			}
		}
	}

	if err := out.write(decoder.Flush()); err != nil && !errors.Is(err, errStopped) {
		return err
	}
	end.cached = int(cached.Load())
	s.metrics.cached.Add(cached.Load())
	return out.finish(end)
}

// errStopped reports that a stop text, or a tool call, has ended an answer.
var errStopped = errors.New("the answer has ended")

// An output turns the text of an answer into pieces.
type output struct {
	*job
	emit   func(piece) error
	cutter stoptext.Cutter
	think  thinkFinder
	calls  finder

	written  int // bytes passed to the cutter
	released int // bytes that the cutter returned
	tokens   []token
	stopText string
	stopped  bool
	called   bool
}

// note stores the log-probabilities of a token before its text is written.
func (o *output) note(id int, s *sampler.Sampler) {
	o.tokens = append(o.tokens, token{sampler.TokenProb{ID: id, LogProb: s.LogProb()},
		slices.Clone(s.Top()), o.written})
}

// write emits the text up to the first byte that may belong to a stop text or a tool call.
func (o *output) write(text []byte) error {
	if o.stopped {
		return errStopped
	}

	o.written += len(text)
	released, stop, found := o.cutter.Add(string(text))
	o.released += len(released)
	if err := o.release(released); err != nil {
		return err
	}

	if found {
		o.stopText, o.stopped = stop, true
		return errStopped
	}
	return nil
}

// release emits text that is before any stop text.
func (o *output) release(text string) error {
	var tokens []token
	for len(o.tokens) > 0 && o.tokens[0].start < o.released {
		tokens, o.tokens = append(tokens, o.tokens[0]), o.tokens[1:]
	}

	if o.reasons {
		var reasoning string
		reasoning, text = o.think.add(text)
		if err := o.separate(reasoning, &tokens); err != nil {
			return err
		}
	}
	return o.emitAnswer(text, tokens)
}

// separate emits reasoning, with the tokens of the text in which it was found.
func (o *output) separate(reasoning string, tokens *[]token) error {
	if reasoning == "" {
		return nil
	}
	p := piece{reasoning: reasoning, tokens: *tokens}
	*tokens = nil
	return o.send(p)
}

// emitAnswer emits a part of the answer after the reasoning.
func (o *output) emitAnswer(text string, tokens []token) error {
	if o.tools == unknownCalls {
		return o.send(piece{text: text, tokens: tokens})
	}

	for _, p := range o.calls.add(text) {
		p.tokens, tokens = tokens, nil
		if err := o.send(p); err != nil {
			return err
		}
		if o.called = o.called || p.call != nil; o.called && o.oneTool {
			o.stopped = true
			return errStopped
		}
	}
	return o.send(piece{tokens: tokens})
}

// send emits a piece that is not empty.
func (o *output) send(p piece) error {
	if p.text == "" && p.reasoning == "" && p.call == nil && len(p.tokens) == 0 {
		return nil
	}
	return o.emit(p)
}

// finish emits the rest of the text and the last piece.
func (o *output) finish(end ending) error {
	end.stopText = o.stopText
	if !o.stopped {
		rest := o.cutter.Rest()
		o.released = o.written + 1 // includes tokens without text
		if err := o.release(rest); err != nil && !errors.Is(err, errStopped) {
			return err
		}
	}

	if o.reasons {
		reasoning, text := o.think.flush()
		var tokens []token
		if err := o.separate(reasoning, &tokens); err != nil {
			return err
		}
		if err := o.emitAnswer(text, nil); err != nil && !errors.Is(err, errStopped) {
			return err
		}
	}

	if o.tools != unknownCalls && !(o.stopped && o.oneTool && o.called) {
		for _, p := range o.calls.flush() {
			if err := o.send(p); err != nil {
				return err
			}
			o.called = o.called || p.call != nil
		}
	}

	if o.called && end.reason == endStop {
		end.reason = endTools
	}
	return o.emit(piece{end: &end})
}
