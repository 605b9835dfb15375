package llm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/op/kvcache"
	"github.com/kasmina-go/kasmina/op/lowrank"
)

// BatcherOptions configures a [Batcher]. Zero values select the defaults.
type BatcherOptions struct {
	// Texts is the maximum number of texts extended by a token in one pass over the model. The
	// default is 32.
	Texts int
	// Rows is the maximum number of tokens in a pass. Longer prompts take several passes, in which
	// other texts continue to be extended. The default is 128.
	Rows int
	// Kept is the number of tokens of earlier texts whose keys and values stay cached, for later
	// texts with the same beginning, such as the turns of a conversation. By default, the cache takes
	// up to 512 MiB, or holds 1024 tokens if these take more. A negative number disables it. Batchers of
	// an [Inference] ignore it and use Tokens instead.
	Kept int
	// Adapters are low-rank adapters for the model. Texts with different adapters, or with none, share
	// passes; see [Batcher.Adapted]. Batchers of an [Inference] on a device use [Inference.Adapters] instead.
	Adapters []*Adapter
	// Tokens is the number of tokens whose keys and values fit in the cache of a batcher of an
	// [Inference]. The cache holds the current texts and, as long as there is room, earlier ones. The
	// default is 1024 tokens for each of Texts, or the model's context if that is more.
	Tokens int
	// Lookup, if not 0, speeds up texts that repeat earlier parts of themselves: a pass may check up to Lookup
	// proposed tokens of a text, which are copied from its earlier part (Saxena, "Prompt lookup decoding", 2023).
	// The generated tokens are the same as without Lookup, except that on a GPU, rounding errors depend on the
	// number of tokens in a pass. With Lookup, the host draws the tokens.
	Lookup int
}

// Batcher continues any number of texts at the same time. Each pass over the model computes one token
// for every waiting text, so the weights are read only once for all texts. Texts may join and leave
// between any two passes (Yu et al., "Orca: A Distributed Serving System for Transformer-Based
// Generative Models", 2022).
//
// Any number of goroutines may use a Batcher at the same time. While a trainer runs, each pass waits for the
// end of the current step.
type Batcher struct {
	// Exactly one of model, compact and inference is set. The inference is closed with the batcher.
	model     *Model
	compact   *CompactModel
	inference *Inference
	pages     *kvcache.Pages // of the inference; otherwise nil
	config    Config
	options   BatcherOptions
	stop      func(error)
	stopped   context.Context
	done      chan struct{}

	mu      sync.Mutex
	waiting []*batchJob
	embeds  []*embedJob
	arrived chan struct{} // receives a value when a job is added to the waiting ones

	// The following fields belong to the goroutine that runs the passes.
	graphs    map[passShape]Runner
	embedders map[scoreShape]Runner
	spans     kvcache.Spans
	adapters  *selectable // of the model in its last state
	selected  lowrank.Selection
	rowSet    []int        // adapters of the rows of a pass on a device
	kept      []*batchText // most recently used first
	seen      uint64       // number of changes of the model at the last pass
	shape     uint64       // state of the model's blocks at the last pass
	attached  []attachedSeed
	last      time.Duration // time of the last pass
	passes    int
	landed    time.Time // when the last flight ended
}

// passShape is the shape of a graph for a pass: the number of tokens, the number of tokens that get
// logits, and the number of positions (0 means all).
type passShape struct{ rows, wanted, positions int }

// withSpans makes a ForLogits graph process the given number of tokens of arbitrary sequences, which
// spans describes. Config.Seq, or the window of WithWindow, limits the positions.
func withSpans(rows int, spans *kvcache.Spans) GraphOption {
	return func(b *graphBuilder) { b.spanRows, b.blocks.Spans = rows, spans }
}

// A batchText is the part of a text that has been computed.
type batchText struct {
	tokens   []int
	adapter  int
	sequence *kvcache.Sequence
	seen     uint64 // changes of the model when it was computed
	evicted  bool   // its pages belong to other texts
	drawn    *int   // the token that follows, if the device has drawn it before a job asked
}

// A batchJob is a request for the logits that follow a text.
type batchJob struct {
	ctx     context.Context
	tokens  []int         // the whole text, followed by the proposed tokens
	draft   int           // number of proposed tokens
	ahead   []any         // logits after the proposed tokens
	adapter int           // index, or noAdapter
	text    *batchText    // keys and values of some first tokens; nil before the first pass
	plan    *sampler.Plan // draws the token on the device; nil to return the logits
	fresh   bool          // the plan differs from that of the text's previous job
	last    bool          // no job for the same text will follow
	reused  *atomic.Int64 // see WithReuse; nil unless this is the text's first job
	logits  any
	token   int // if plan is not nil and logits is nil; negative if the device cannot draw it
	err     error
	done    chan struct{}
}

// errBatcherClosed is the cause of the errors of texts that a closed Batcher cannot continue.
var errBatcherClosed = errors.New("the batcher has been closed")

// NewBatcher returns a batcher for a model. Close frees its memory.
func NewBatcher(m *Model, o BatcherOptions) (*Batcher, error) {
	if err := checkMade(m); err != nil {
		return nil, fmt.Errorf("llm: NewBatcher: %w", err)
	}

	return newBatcherOf(&Batcher{model: m, config: m.Config}, o)
}

// NewCompactBatcher returns a batcher for a compact model. Close frees its memory. The logits of a text do
// not depend on other texts.
func NewCompactBatcher(m *CompactModel, o BatcherOptions) (*Batcher, error) {
	return newBatcherOf(&Batcher{compact: m, config: m.parts.Config}, o)
}

// newDeviceBatcher returns a batcher that computes on an inference's machines, which must support
// [kvcache.PagedAttention].
func newDeviceBatcher(i *Inference, o BatcherOptions) (*Batcher, error) {
	m, err := i.parts()
	switch {
	case err != nil:
	case i.outline == nil:
		err = errors.New("the model is on the host and the machines are not, which no batcher supports: load the " +
			"model with package llm/gpu")
	case len(o.Adapters) > 0:
		err = errors.New("the adapters must be loaded next to the model on the device, with package llm/gpu")
	}
	if err != nil {
		return nil, fmt.Errorf("llm: NewBatcher: %w", err)
	}

	o.Tokens = cmp.Or(o.Tokens, max(m.Config.Seq, 1024*cmp.Or(o.Texts, defaultTexts)))
	if o.Tokens < m.Config.Seq {
		return nil, fmt.Errorf("llm: NewBatcher: the cache holds %d tokens, and a text can have %d: choose a "+
			"smaller context or a larger cache", o.Tokens, m.Config.Seq)
	}
	o.Kept = math.MaxInt // earlier texts stay until their pages are needed
	pages, err := kvcache.NewPages((o.Tokens + kvcache.PageTokens - 1) / kvcache.PageTokens)
	if err != nil {
		return nil, fmt.Errorf("llm: NewBatcher: %w", err)
	}
	return newBatcherOf(&Batcher{inference: i, pages: pages, config: m.Config}, o)
}

// defaultTexts is the default of BatcherOptions.Texts.
const defaultTexts = 32

// newBatcherOf completes a batcher for its model.
func newBatcherOf(b *Batcher, o BatcherOptions) (*Batcher, error) {
	o.Texts, o.Rows = cmp.Or(o.Texts, defaultTexts), cmp.Or(o.Rows, 128)
	o.Kept = cmp.Or(o.Kept, max(1024, keptBytes/bytesPerToken(b.parts())))
	if o.Texts < 1 || o.Rows < o.Texts {
		return nil, fmt.Errorf("llm: NewBatcher: %d texts and %d rows, want at least one text and as many "+
			"rows as texts", o.Texts, o.Rows)
	}
	if o.Lookup < 0 || o.Lookup >= o.Rows {
		return nil, fmt.Errorf("llm: NewBatcher: Lookup is %d, want at least 0 and less than the %d rows", o.Lookup, o.Rows)
	}

	b.options, b.arrived, b.done = o, make(chan struct{}, 1), make(chan struct{})
	b.graphs = map[passShape]Runner{}
	var stop context.CancelCauseFunc
	b.stopped, stop = context.WithCancelCause(context.Background())
	b.stop = stop

	// Fail now rather than at the first text if the model cannot be computed in batches.
	if err := b.prepare(); err != nil {
		return nil, errors.Join(fmt.Errorf("llm: NewBatcher: %w", err), b.closeGraphs(), b.pages.Close())
	}

	go b.run()
	return b, nil
}

// keptBytes is the memory for the keys and values of earlier texts.
const keptBytes = 512 << 20

// bytesPerToken returns the memory that the keys and values of a token take.
func bytesPerToken(m ModelParts) int {
	c := m.Config.Default()
	return 2 * max(1, c.Layers*c.KVHeads*c.HeadDim) * int(m.dtype().Size())
}

// parts returns the parts to build graphs from.
func (b *Batcher) parts() ModelParts {
	switch {
	case b.inference != nil:
		return *b.inference.outline
	case b.compact != nil:
		return b.compact.parts
	}
	return b.model.Parts()
}

// Generator returns a generator. Its texts are computed together with the texts of the batcher's other
// generators, and several goroutines may use it at the same time.
func (b *Batcher) Generator() *Generator {
	g := GeneratorOf(b.config, b.Decoder)
	g.drawer = b.Drawer
	g.embed = b.embedderOf(noAdapter)
	return g
}

// Adapted returns a generator like Generator for the model with one of BatcherOptions.Adapters, or of the
// inference's Adapters.
func (b *Batcher) Adapted(adapter int) (*Generator, error) {
	n := len(b.options.Adapters)
	if b.inference != nil {
		n = b.inference.Adapters.Len()
	}
	if adapter < 0 || adapter >= n {
		return nil, fmt.Errorf("llm: Batcher.Adapted: there is no adapter %d of %d", adapter, n)
	}
	g := GeneratorOf(b.config, func() (func(ctx context.Context, tokens []int) (any, error), error) {
		return b.decoder(adapter)
	})
	g.drawer = func() (DrawFunc, error) { return b.drawerOf(adapter) }
	g.embed = b.embedderOf(adapter)
	return g, nil
}

// embedderOf returns Embed for the generator of the model with an adapter.
func (b *Batcher) embedderOf(adapter int) func(context.Context, [][]int, Pooling) ([][]float64, error) {
	return func(ctx context.Context, texts [][]int, p Pooling) ([][]float64, error) {
		return b.embed(ctx, texts, adapter, p)
	}
}

// Decoder returns a function that computes the logits for the token that follows a text. See
// [Engine].
func (b *Batcher) Decoder() (func(ctx context.Context, tokens []int) (any, error), error) {
	return b.decoder(noAdapter)
}

// decoder implements Decoder for the model with an adapter.
func (b *Batcher) decoder(adapter int) (func(ctx context.Context, tokens []int) (any, error), error) {
	var text *batchText
	begun := false
	repeats := newLookup(b.options.Lookup)
	return func(ctx context.Context, tokens []int) (any, error) {
		if err := b.check(tokens); err != nil {
			return nil, err
		}
		j := &batchJob{ctx: ctx, tokens: slices.Clone(tokens), adapter: adapter, text: text}
		if !begun {
			j.reused, begun = reuseCounter(ctx), true
		}
		if b.options.Lookup > 0 {
			if logits, ok := repeats.logits(tokens, b.changes()); ok {
				return logits, nil
			}
			draft := repeats.propose(tokens, b.config.Seq-len(tokens))
			j.tokens, j.draft = append(j.tokens, draft...), len(draft)
		}
		text = nil // until the job has ended without an error
		if err := b.submit(j); err != nil {
			return nil, err
		}
		text = j.text
		repeats.record(j.tokens, j.ahead, j.text.seen)
		return j.logits, nil
	}, nil
}

// changes returns the number of changes of the model so far.
func (b *Batcher) changes() uint64 {
	if b.model == nil {
		return 0
	}
	return changesOf(b.model)
}

// submit adds a job and waits for its end.
func (b *Batcher) submit(j *batchJob) error {
	j.done = make(chan struct{})
	b.mu.Lock()
	b.waiting = append(b.waiting, j)
	b.mu.Unlock()
	select {
	case b.arrived <- struct{}{}:
	default:
	}

	select {
	case <-j.done:
	case <-j.ctx.Done():
		return context.Cause(j.ctx)
	case <-b.done: // after the last pass
		return context.Cause(b.stopped)
	}
	return j.err
}

// check returns an error if there are no tokens, too many for the model, or some outside its vocabulary.
func (b *Batcher) check(tokens []int) error {
	if n := len(tokens); n == 0 || n > b.config.Seq {
		return fmt.Errorf("there are %d tokens, want 1 to %d", n, b.config.Seq)
	}
	return b.config.Knows(slices.Values(tokens))
}

// Close stops the batcher and frees its memory. Texts that are being continued get an error.
func (b *Batcher) Close() error {
	b.stop(errBatcherClosed)
	<-b.done
	err := errors.Join(b.closeGraphs(), b.pages.Close())
	b.kept = nil
	if b.inference != nil {
		err = errors.Join(err, b.inference.Close())
	}
	return err
}

func (b *Batcher) closeGraphs() (err error) {
	for key, r := range b.graphs {
		err = errors.Join(err, r.close())
		delete(b.graphs, key)
	}
	return errors.Join(err, b.closeEmbedders())
}

// run makes passes until the batcher is closed.
func (b *Batcher) run() {
	defer close(b.done)
	expected := 0 // texts that got logits in the last pass and are likely to ask for more at once
	for {
		jobs, ok := b.next(expected)
		if !ok {
			return
		}

		b.embedSome()
		if len(jobs) == 0 {
			expected = 0
			continue
		}

		if claimed := b.claimAll(jobs); len(claimed) > 0 {
			expected = b.finish(claimed)
			continue
		}

		began := time.Now()
		finished, f, err := b.pass(jobs)
		b.last = time.Since(began)
		b.passes++
		if err != nil {
			finished = failed(jobs, err)
		}
		expected = b.finish(finished)
		for f != nil {
			expected, f = b.fly(f)
		}
	}
}

// failed sets the error of jobs.
func failed(jobs []*batchJob, err error) []*batchJob {
	for _, j := range jobs {
		j.err = err
	}
	return jobs
}

// finish ends jobs, and returns the number of jobs to expect at once.
func (b *Batcher) finish(finished []*batchJob) (expected int) {
	for _, j := range finished {
		close(j.done)
	}

	b.mu.Lock()
	defer b.mu.Unlock()
	b.waiting = slices.DeleteFunc(b.waiting, func(j *batchJob) bool { return slices.Contains(finished, j) })
	return len(finished) + len(b.waiting)
}

// next waits for jobs and returns all waiting ones. The texts of the last pass request their next token
// only after drawing one, so next gives them a moment to do so.
func (b *Batcher) next(expected int) (jobs []*batchJob, ok bool) {
	patience := min(b.last/10, time.Millisecond)
	deadline := time.Now().Add(patience)
	for {
		b.mu.Lock()
		b.waiting = slices.DeleteFunc(b.waiting, func(j *batchJob) bool { return j.ctx.Err() != nil })
		jobs = slices.Clone(b.waiting)
		embeds := len(b.embeds) > 0
		b.mu.Unlock()
		if embeds {
			return jobs, b.stopped.Err() == nil
		}

		var late <-chan time.Time
		if len(jobs) > 0 {
			left := time.Until(deadline)
			if len(jobs) >= min(expected, b.options.Texts) || left <= 0 {
				return jobs, b.stopped.Err() == nil
			}
			late = time.After(left)
		}

		select {
		case <-b.arrived:
		case <-late:
		case <-b.stopped.Done():
			return nil, false
		}
	}
}

// pass computes tokens of the given jobs, and returns the jobs that now have their logits. If the device draws tokens
// in the pass, pass returns while it is in flight.
func (b *Batcher) pass(jobs []*batchJob) (finished []*batchJob, f *flight, err error) {
	if b.model != nil {
		defer take(b.model)()
	}
	if err := b.prepare(); err != nil {
		return nil, nil, err
	}

	chosen := b.choose(jobs)
	if len(chosen) == 0 {
		return nil, nil, errors.New("the cache has no room for any text")
	}
	spans := make([]kvcache.Span, len(chosen))
	var finishing []*batchJob
	var lastRows []int // the rows of their last tokens, and of the proposed ones
	rows, positions := 0, 0
	var adapters []int // of the rows
	for i, c := range chosen {
		positions = max(positions, len(c.text.tokens)+c.rows)
		adapters = append(adapters, slices.Repeat([]int{c.adapter}, c.rows)...)
		spans[i] = kvcache.Span{Sequence: c.text.sequence, Start: len(c.text.tokens), Rows: c.rows}
		rows += c.rows
		if len(c.text.tokens)+c.rows == len(c.tokens) {
			finishing = append(finishing, c.batchJob)
			for row := rows - 1 - c.draft; row < rows; row++ {
				lastRows = append(lastRows, row)
			}
		}
	}
	if err := b.spans.Set(spans...); err != nil {
		return nil, nil, err
	}
	b.selected.Set(adapters)
	b.rowSet = adapters

	r, err := b.graph(rows, len(lastRows), positions)
	if err != nil {
		return nil, nil, err
	}
	if err := b.let(r.Graph, chosen, lastRows); err != nil {
		return nil, nil, err
	}
	if draws(r.Graph, finishing) {
		f = &flight{runner: r, chosen: chosen, finishing: finishing, rows: lastRows}
		return nil, f, b.launch(f, nil)
	}
	var logits any
	if len(finishing) > 0 {
		logits, err = r.logits(b.stopped)
	} else if err = r.run(b.stopped); err == nil && b.inference != nil {
		// The machine of the next pass may be another one, which does not wait for this one.
		_, err = r.Machine.Value(r.Rows)
	}
	if err != nil {
		return nil, nil, err
	}

	b.spans.Finish()
	for _, c := range chosen {
		c.text.tokens = append(c.text.tokens, c.next()...)
	}
	row := 0
	for _, j := range finishing {
		j.logits = b.rowOf(logits, row, r.Logits.Shape()[1])
		for i := range j.draft {
			j.ahead = append(j.ahead, b.rowOf(logits, row+1+i, r.Logits.Shape()[1]))
		}
		row += 1 + j.draft
		b.keep(j.text)
	}

	return finishing, nil, nil
}

// A batchShare is a job's share of a pass, given as the number of tokens to process after those
// already computed.
type batchShare struct {
	*batchJob
	rows int
}

// next returns the tokens of the share.
func (c batchShare) next() []int { return c.tokens[len(c.text.tokens):][:c.rows] }

// choose divides the rows of a pass among the jobs. Texts that need only one more token come first,
// so that long prompts do not hold them up. The remaining rows go to the prompts that have waited
// longest.
func (b *Batcher) choose(jobs []*batchJob) (chosen []batchShare) {
	left := b.options.Rows
	drop := func(j *batchJob, proposed int) {
		j.tokens, j.draft = j.tokens[:len(j.tokens)-proposed], j.draft-proposed
	}
	assign := func(j *batchJob, rows int) {
		// The pass that reaches the last token of a text computes its proposed tokens, too, or drops them.
		if short := rows - left; short > 0 && short <= j.draft {
			drop(j, short)
			rows = left
		}
		if n := min(rows, left); n > 0 && b.reserve(j.text, n, chosen) {
			chosen, left = append(chosen, batchShare{j, n}), left-n
		}
	}

	var prompts []*batchJob
	share := b.options.Rows / min(len(jobs), b.options.Texts) // leaves a row for every text
	for _, j := range jobs {
		drop(j, max(0, j.draft+1-share))
		b.locate(j)
		if b.pages != nil {
			b.keep(j.text)
		}
		switch missing := len(j.tokens) - len(j.text.tokens); {
		case missing > 1+j.draft:
			prompts = append(prompts, j)
		case len(chosen) < b.options.Texts:
			assign(j, missing)
		}
	}
	for _, j := range prompts {
		if j.text.evicted { // for one of the texts that were chosen before it
			b.locate(j)
			b.keep(j.text)
		}
		assign(j, len(j.tokens)-len(j.text.tokens))
	}

	return chosen
}

// reserve ensures that the cache has room for more tokens of a text. If necessary, it evicts texts that are
// not among the chosen ones, least recently used first.
func (b *Batcher) reserve(t *batchText, tokens int, chosen []batchShare) bool {
	if b.pages == nil {
		return true
	}

	for t.sequence.Reserve(len(t.tokens)+tokens) != nil {
		last := len(b.kept) - 1
		for last >= 0 && (b.kept[last] == t || slices.ContainsFunc(chosen, func(c batchShare) bool {
			return c.text == b.kept[last]
		})) {
			last--
		}
		if last < 0 {
			return false
		}
		b.kept[last].sequence.Release()
		b.kept[last].evicted = true
		b.kept = slices.Delete(b.kept, last, last+1)
	}

	return true
}

// locate assigns to a job a text that holds a proper prefix of the job's tokens.
func (b *Batcher) locate(j *batchJob) {
	length := len(j.tokens) - j.draft
	if t := j.text; t != nil && t.seen == b.seen && !t.evicted {
		common := min(commonPrefix(t.tokens, j.tokens), length-1)
		switch ahead := len(t.tokens) - common; {
		case ahead > 0 && ahead <= b.options.Lookup && b.pages == nil:
			// Some proposed tokens were wrong.
			t.tokens = t.tokens[:common]
			t.sequence.Truncate(common)
		case ahead > 0 && ahead <= max(mostAhead, b.options.Lookup) && b.pages != nil && t.sequence.Rewind(common):
			// Some proposed tokens were wrong, or the device has drawn tokens that the text did not get.
			t.tokens, t.drawn = t.tokens[:common], nil
		}
		if common == len(t.tokens) {
			t.drawn = nil
			return
		}
	}

	most, longest := 0, &batchText{sequence: b.newSequence()}
	for _, t := range b.kept {
		if t.adapter != j.adapter {
			continue
		}
		if n := min(commonPrefix(t.tokens, j.tokens), length-1); n > most {
			most, longest = n, t
		}
	}
	prefix := longest.sequence.Prefix(most)
	if j.reused != nil {
		j.reused.Store(int64(prefix.Len()))
	}
	j.text = &batchText{tokens: slices.Clone(longest.tokens[:prefix.Len()]), adapter: j.adapter,
		sequence: prefix, seen: b.seen}
}

// newSequence returns a sequence without tokens.
func (b *Batcher) newSequence() *kvcache.Sequence {
	if b.pages != nil {
		return b.pages.NewSequence()
	}
	return &kvcache.Sequence{}
}

// commonPrefix returns the number of tokens that two texts share at their start.
func commonPrefix(a, b []int) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// keep makes a text available to later ones with the same beginning, and evicts the least recently
// used ones.
func (b *Batcher) keep(t *batchText) {
	b.kept = slices.DeleteFunc(b.kept, func(k *batchText) bool { return k == t })
	b.kept = slices.Insert(b.kept, 0, t)
	tokens := 0
	for i, k := range b.kept {
		if tokens += len(k.tokens); tokens > b.options.Kept {
			clear(b.kept[i:])
			b.kept = b.kept[:i]
			return
		}
	}
}

// prepare detects changes to the model since the last pass and discards what they invalidate.
func (b *Batcher) prepare() error {
	if b.model == nil {
		if b.adapters == nil && b.compact != nil { // a compact model does not change
			var err error
			if b.adapters, err = selectableOf(b.parts(), b.options.Adapters, b.compact.norms); err != nil {
				return err
			}
		}
		_, err := b.graph(1, 1, 1)
		return err
	}

	if now := changesOf(b.model); now != b.seen || len(b.graphs) == 0 {
		if err := pull(b.model, paramNames(b.model)...); err != nil {
			return err
		}
		b.seen, b.kept = now, nil
		var err error
		if b.adapters, err = selectableOf(b.model.Parts(), b.options.Adapters, b.model.norms); err != nil {
			return err
		}
		if err := b.closeGraphs(); err != nil {
			return err
		}
	}

	shape, attached := shapeOf(b.model), attachedTo(b.model.Kasmina)
	if b.shape != shape || !slices.Equal(b.attached, attached) {
		b.shape, b.attached = shape, attached
		if err := b.closeGraphs(); err != nil {
			return err
		}
	}

	_, err := b.graph(1, 1, 1)
	return err
}

// mostGraphs is the number of cached graphs with different numbers of rows.
const mostGraphs = 24

// fewestPositions is the smallest number of positions of a graph for an inference.
const fewestPositions = 1024

// passShape returns the shape of the graph for a pass.
func (b *Batcher) passShape(rows, wanted, positions int) passShape {
	shape := passShape{roundRows(rows), roundRows(max(1, wanted)), 0}
	if b.options.Lookup > 0 { // which makes the number of rows with logits vary
		shape.wanted = min(shape.rows, 1<<bits.Len(uint(max(1, wanted)-1)))
	}
	if b.pages != nil {
		// Fewer graphs are worth more than fewer rows, which hardly save time on a device. Prompts can finish
		// in addition to the texts that are continued.
		shape.wanted = min(shape.rows, roundRows(max(wanted, b.options.Texts)))
		shape.positions = kvcache.Room(max(positions, fewestPositions), b.config.Seq)
	}
	return shape
}

// graph returns a graph with at least the given number of rows, of rows with logits, and of positions.
func (b *Batcher) graph(rows, wanted, positions int) (Runner, error) {
	shape := b.passShape(rows, wanted, positions)
	if r, ok := b.graphs[shape]; ok {
		return r, nil
	}

	if len(b.graphs) == mostGraphs {
		if err := b.closeGraphs(); err != nil {
			return Runner{}, err
		}
	}

	draws := func(g *graphBuilder) { g.draws = b.draws() }
	opts := []GraphOption{draws, withSpans(shape.rows, &b.spans), WithRows(shape.wanted),
		withAdapters(b.adapters, &b.selected)}
	if b.pages != nil {
		opts = append(opts, WithWindow(shape.positions), func(g *graphBuilder) { g.blocks.Pages = b.pages },
			WithAdapterSet(b.inference.Adapters))
	}
	g, err := BuildGraph(b.parts(), ForLogits, 1, opts...)
	if err != nil {
		return Runner{}, err
	}
	r, err := b.runner(g)
	if err == nil {
		b.graphs[shape] = r
	}
	return r, err
}

// runner returns a machine for a graph.
func (b *Batcher) runner(g *Graph) (r Runner, err error) {
	r.Graph = g
	switch {
	case b.inference != nil:
		r.Machine, err = b.inference.Make(g)
	case b.compact != nil:
		r.Machine, err = b.compact.machine(g)
	default:
		return runnerOnCPU(g)
	}
	return r, err
}

// roundRows rounds up to a power of two or three quarters of one, so that few graphs serve all passes.
func roundRows(n int) int {
	power := 1
	for power < n {
		power *= 2
	}
	if power >= 4 && n <= power/4*3 {
		return power / 4 * 3
	}
	return power
}

// let feeds the shares' tokens to a graph, and selects the rows for which to compute logits. Any
// remaining rows belong to no text.
func (b *Batcher) let(g *Graph, chosen []batchShare, wanted []int) error {
	rows := g.IDs.Shape()[0]
	ids := make([]int, 0, rows)
	for _, c := range chosen {
		ids = append(ids, c.next()...)
	}
	return b.letRows(g, ids[:rows], wanted)
}

// letRows feeds ids to a graph, with the positions and pages of the current spans, and selects the rows for which to
// compute logits.
func (b *Batcher) letRows(g *Graph, ids, wanted []int) error {
	rows := len(ids)
	if err := gorgonia.Let(g.IDs, idTensor(ids)); err != nil {
		return err
	}

	if g.Positions != nil {
		if err := gorgonia.Let(g.Positions, idTensor(b.spans.Positions(rows))); err != nil {
			return err
		}
	}

	if g.Pages != nil {
		table, err := b.spans.PageTable(rows, g.Pages.Shape()[1])
		if err != nil {
			return err
		}
		if err := gorgonia.Let(g.Pages, tensor.New(tensor.WithShape(g.Pages.Shape()...),
			tensor.WithBacking(table))); err != nil {
			return err
		}
	}

	if err := b.letAdapters(g); err != nil {
		return err
	}

	selected := make([]int, g.Rows.Shape()[0])
	copy(selected, wanted)
	return gorgonia.Let(g.Rows, idTensor(selected))
}

// letAdapters feeds the adapters of the rows to a graph on a device.
func (b *Batcher) letAdapters(g *Graph) error {
	if g.Adapters == nil {
		return nil
	}
	all := slices.Repeat([]int{b.inference.Adapters.Len()}, g.Adapters.Shape()[0])
	for i, k := range b.rowSet {
		if k != noAdapter {
			all[i] = k
		}
	}
	return gorgonia.Let(g.Adapters, idTensor(all))
}

// rowOf returns a row of a matrix of logits. Later passes do not overwrite it.
func (b *Batcher) rowOf(logits any, row, width int) any {
	switch x := logits.(type) {
	case []float32:
		part := x[row*width:][:width:width]
		if b.inference == nil { // the logits of a device are a copy
			part = slices.Clone(part)
		}
		return part
	case []float64:
		return slices.Clone(x[row*width:][:width])
	}
	return nil
}
