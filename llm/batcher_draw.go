package llm

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/internal/cpu/sampling"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/op/kvcache"
)

// A flight is a forward pass followed by token draws on the device. It lasts until the host has read the
// tokens.
//
// While a flight is in progress, the batcher starts the next one for the same texts. Its inputs are the
// tokens of the first flight, which only the device knows at that time. When these tokens reach the host
// and the texts request their next tokens, the second flight is already computing them. A text may be at
// most one such pass ahead of its requests.
type flight struct {
	runner    Runner
	chosen    []batchShare
	finishing []*batchJob // jobs that get a token or logits; nil until a text requests its token
	texts     []*batchText
	rows      []int // rows of the finishing jobs' last tokens
	began     time.Time
	wait      func() ([]int, error)
}

// mostAhead is the maximum number of tokens that the device computes before a text requests them.
const mostAhead = 2

// draws reports whether the device draws at least one of the tokens that follow the finishing jobs.
func draws(g *Graph, finishing []*batchJob) bool {
	return g.Draws && slices.ContainsFunc(finishing, func(j *batchJob) bool { return j.plan != nil })
}

// draws reports whether the batcher's machines draw tokens. They do not if Lookup extends texts by
// proposed tokens, because the host compares the proposals with its own draws.
func (b *Batcher) draws() bool {
	return b.inference != nil && b.inference.DrawsOnDevice && b.options.Lookup == 0
}

// Drawer returns a function that draws the next token of a text, or nil if the host draws all tokens from
// the logits of Decoder.
func (b *Batcher) Drawer() (DrawFunc, error) { return b.drawerOf(noAdapter) }

// drawerOf implements Drawer for the model with an adapter.
func (b *Batcher) drawerOf(adapter int) (DrawFunc, error) {
	if !b.draws() {
		return nil, nil
	}

	var text *batchText
	begun := false
	var by *sampler.Sampler
	var revision uint64 // the sampler's revision after the last token
	return func(ctx context.Context, tokens []int, s *sampler.Sampler, last bool) (int, error) {
		if err := b.check(tokens); err != nil {
			return 0, err
		}

		j := &batchJob{ctx: ctx, tokens: slices.Clone(tokens), adapter: adapter, text: text, plan: s.Plan(),
			last: last, fresh: s != by || s.Revision() != revision}
		if !begun {
			j.reused, begun = reuseCounter(ctx), true
		}
		text = nil
		if err := b.submit(j); err != nil {
			return 0, err
		}

		if j.logits == nil && j.token < 0 { // the sampler returns an error that describes the logits
			j = &batchJob{ctx: ctx, tokens: j.tokens, adapter: adapter, text: j.text}
			if err := b.submit(j); err != nil {
				return 0, err
			}
		}
		id := j.token
		if j.logits != nil {
			var err error
			if id, err = drawToken(j.logits, s); err != nil {
				return 0, err
			}
		} else {
			s.Accept(id)
		}
		text, by, revision = j.text, s, s.Revision()
		return id, nil
	}, nil
}

// launch starts a flight. from lists the rows of the preceding flight that supply the input tokens. It is
// nil if the host has set the inputs.
func (b *Batcher) launch(f *flight, from []int) error {
	m, ok := f.runner.Machine.(drawingMachine)
	if !ok {
		return fmt.Errorf("llm: a %T draws no tokens", f.runner.Machine)
	}
	if err := f.runner.seeds.steer(); err != nil {
		return err
	}

	pass := sampling.Pass{From: from, Rows: f.rows}
	entries := 0
	for _, j := range f.finishing {
		var rule *sampling.Rule
		if j.plan != nil {
			rule = j.plan.Next(from != nil)
			if entries += len(rule.Entries); entries > sampling.MostEntries {
				rule, j.plan = nil, nil
			}
		}
		pass.Rules = append(pass.Rules, rule)
		f.texts = append(f.texts, j.text)
	}

	f.began = time.Now()
	var err error
	if f.wait, err = m.Draw(b.stopped, pass); err != nil {
		return err
	}

	b.spans.Finish()
	for _, c := range f.chosen {
		c.text.drawn = nil
		if from != nil {
			c.text.tokens = append(c.text.tokens, unknownToken)
		} else {
			c.text.tokens = append(c.text.tokens, c.next()...)
		}
	}
	return nil
}

// fly starts the flight after f if possible, and then ends f. It returns the number of jobs to expect and
// the next flight.
func (b *Batcher) fly(f *flight) (expected int, next *flight) {
	b.gather(f)
	next, from, err := b.follow(f)
	var tokens []int
	if err == nil {
		tokens, err = f.wait()
	}
	var logits any
	if needsLogits := slices.ContainsFunc(f.finishing, func(j *batchJob) bool { return j != nil && j.plan == nil }); err == nil &&
		needsLogits {
		logits, err = readLogits(f.runner)
	}
	b.last = min(time.Since(f.began), time.Since(b.landed))
	b.landed = time.Now()
	b.passes++

	if err != nil {
		for _, c := range f.chosen {
			c.text.sequence.Release()
			c.text.evicted = true
		}
		jobs := slices.DeleteFunc(slices.Clone(f.finishing), func(j *batchJob) bool { return j == nil })
		return b.finish(failed(jobs, err)), nil
	}

	var finished []*batchJob
	for i, t := range f.texts {
		// The token is the input of the next flight, if the text takes part in it.
		follows := slices.Index(from, i) >= 0
		if follows {
			t.tokens[len(t.tokens)-1] = tokens[i]
		} else {
			t.drawn = &tokens[i]
		}

		j := f.finishing[i]
		switch {
		case j == nil:
			continue
		case j.plan == nil:
			j.logits = b.rowOf(logits, i, f.runner.Logits.Shape()[1])
			t.drawn = nil
		default:
			j.token = tokens[i]
			if !follows {
				t.drawn = nil
			}
		}
		b.keep(t)
		finished = append(finished, j)
	}

	return b.finish(finished), next
}

// readLogits returns the logits of the last run.
func readLogits(r Runner) (any, error) {
	if m, ok := r.Machine.(logitsReader); ok {
		return m.Read(r.Logits)
	}
	v, err := r.Machine.Value(r.Logits)
	if err != nil {
		return nil, err
	}
	return v.Data(), nil
}

// gather waits for the texts of a flight to request its tokens, but at most half as long as the last pass
// took, so that the next flight can start in time.
func (b *Batcher) gather(f *flight) {
	deadline := time.Now().Add(b.last / 2)
	for slices.Contains(f.finishing, nil) && b.stopped.Err() == nil {
		b.attach(f)
		left := time.Until(deadline)
		if !slices.Contains(f.finishing, nil) || left <= 0 {
			return
		}
		late := time.NewTimer(left)
		select {
		case <-b.arrived:
		case <-late.C:
		case <-b.stopped.Done():
		}
		late.Stop()
	}
}

// attach assigns the rows of a flight to the waiting jobs that request their tokens.
func (b *Batcher) attach(f *flight) {
	b.mu.Lock()
	jobs := slices.Clone(b.waiting)
	b.mu.Unlock()
	for _, j := range jobs {
		i := slices.Index(f.texts, j.text)
		if j.text == nil || i < 0 || f.finishing[i] != nil || j.plan == nil || j.fresh ||
			!slices.Equal(j.text.tokens, j.tokens) {
			continue
		}
		j.plan.Next(false) // the flight draws this token
		f.finishing[i] = j
	}
}

// claimAll hands out tokens that the device has already drawn, and returns the jobs that received one.
func (b *Batcher) claimAll(jobs []*batchJob) (claimed []*batchJob) {
	for _, j := range jobs {
		t := j.text
		if t == nil || t.drawn == nil || t.evicted || j.plan == nil || j.fresh || !slices.Equal(t.tokens, j.tokens) {
			continue
		}
		j.token, t.drawn = *t.drawn, nil
		claimed = append(claimed, j)
	}
	return claimed
}

// follow starts the next flight for the texts that have requested their tokens of f and continue. It
// returns nil if no text continues, if other jobs are waiting, or if the flight would need a different
// graph. from lists the rows of f that supply the input tokens.
func (b *Batcher) follow(f *flight) (next *flight, from []int, err error) {
	b.mu.Lock()
	others := len(b.embeds) > 0 || slices.ContainsFunc(b.waiting, func(j *batchJob) bool {
		return j.ctx.Err() == nil && !slices.Contains(f.finishing, j)
	})
	b.mu.Unlock()
	if others || b.stopped.Err() != nil || len(f.chosen) != len(f.finishing) {
		return nil, nil, nil
	}

	next = &flight{runner: f.runner}
	var jobs []*batchJob
	var spans []kvcache.Span
	b.rowSet = nil
	positions := 0
	for i, j := range f.finishing {
		if j == nil || j.plan == nil || j.last || j.ctx.Err() != nil || len(j.text.tokens) >= b.config.Seq {
			continue
		}
		if !b.reserve(j.text, 1, append(slices.Clone(f.chosen), next.chosen...)) {
			continue
		}
		positions = max(positions, len(j.text.tokens)+1)
		spans = append(spans, kvcache.Span{Sequence: j.text.sequence, Start: len(j.text.tokens), Rows: 1})
		next.chosen = append(next.chosen, batchShare{j, 1})
		next.rows = append(next.rows, len(next.rows))
		b.rowSet = append(b.rowSet, j.adapter)
		from, jobs = append(from, i), append(jobs, j)
	}
	if len(jobs) == 0 {
		return nil, nil, nil
	}

	if shape := b.passShape(len(jobs), len(jobs), positions); b.graphs[shape].Machine != f.runner.Machine {
		return nil, nil, nil
	}
	if err := b.spans.Set(spans...); err != nil {
		return nil, nil, err
	}
	if err := b.letUnknown(f.runner.Graph, len(jobs)); err != nil {
		return nil, nil, err
	}

	next.finishing = jobs
	if err := b.launch(next, from); err != nil {
		return nil, nil, err
	}
	next.finishing = make([]*batchJob, len(jobs)) // no text has requested its token yet
	return next, from, nil
}

// letUnknown feeds the graph rows that take their tokens from the preceding pass.
func (b *Batcher) letUnknown(g *Graph, rows int) error {
	selected := make([]int, rows)
	for i := range selected {
		selected[i] = i
	}
	return b.letRows(g, make([]int, g.IDs.Shape()[0]), selected)
}
