package llm

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/llm/internal/block"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/op/chunks"
	"github.com/kasmina-go/kasmina/op/kvcache"
	"github.com/kasmina-go/kasmina/op/lowrank"
	"github.com/kasmina-go/kasmina/state"
)

// GraphKind selects the quantities that a graph computes.
type GraphKind uint8

// The kinds of graph.
const (
	ForTraining GraphKind = iota + 1 // the loss and its gradients; Kasmina layers gather telemetry
	ForLoss                          // the loss alone; lattices only count non-finite values
	// the logits of one position of each sequence; lattices only count non-finite values
	ForLogits
)

// Graph is a model's computation on one batch. All graphs of a model share the memory of its parameters,
// so only one goroutine may use them at a time.
type Graph struct {
	G       *gorgonia.ExprGraph
	Kind    GraphKind
	Batch   int            // sequences
	IDs     *gorgonia.Node // int [Batch·Seq]
	Targets *gorgonia.Node // int [Batch·Seq], negative where nothing is predicted; nil in ForLogits graphs
	Starts  *gorgonia.Node // int [Batch·Seq], Batch.Starts; nil without Config.Documents and in ForLogits graphs
	// Positions holds the position of each row, an int [Batch·Seq] like Batch.Positions. It is nil
	// unless the model uses learned position embeddings, in which case rows may have any position.
	Positions *gorgonia.Node
	Loss      *gorgonia.Node // mean cross-entropy in nats per token, or loss of pairs; nil in ForLogits graphs
	// Answers and Reference are the inputs of a graph with the loss of preference pairs: an int
	// [Batch·Seq] like Batch.Answers, and numbers [Batch·Seq] like Batch.Reference.
	Answers, Reference *gorgonia.Node
	// LogProbs [Batch·Seq] holds the log-probabilities of the targets in a graph with WithLogProbs.
	LogProbs *gorgonia.Node
	// Rows selects, in ForLogits graphs, the rows of Batch·Seq for which logits are computed: an
	// int [Batch], [Batch·Seq] with WithAllPositions, or [n] with WithRows(n).
	Rows *gorgonia.Node
	// Position is the position, int [1], of the single token of a ForLogits graph that caches the
	// keys and values of the tokens before it. It is nil in other graphs, which use Rows instead.
	Position *gorgonia.Node
	// Pages assigns the rows to sequences in pages: see [kvcache.Spans.PageTable]. It is nil in other graphs.
	Pages  *gorgonia.Node
	Logits *gorgonia.Node // [len(Rows), Vocab], in ForLogits graphs
	// Adapters selects an adapter of a set for each row, by its index. An index equal to the number of adapters
	// selects none. It is an int [len(IDs)], and nil without [WithAdapterSet].
	Adapters *gorgonia.Node
	// States holds the normalized states of the rows in a graph without an output layer; Logits is then nil.
	States *gorgonia.Node
	// Draws reports whether the machine should draw tokens from Logits and feed them to IDs.
	Draws  bool
	Params gorgonia.Nodes // one for each of the model's Params, followed by those of a set of adapters
	// Learning lists the Params with gradients in a ForTraining graph. These are all Params, only the
	// planted ones in a frozen model, or the parameters named by withGradients.
	Learning gorgonia.Nodes
	// Base holds the matrices of Params without a value. Machines get it with cpuops.WithWeights or
	// cudaops.WithWeights. It is nil if there are none, and for an Outline.
	Base *cpuops.Weights

	preference *op.Preference

	share   *gorgonia.Node // the batch's share of the loss of a step, if that is an input
	shares  int            // batches in a step, if share is an input
	key     *gorgonia.Node // int [1], random key of the dropout masks; nil without dropout
	listens bool           // built with withGradients
	blocks  *block.Builder // builder of its blocks
	keeps   bool           // its Outputs include keys and values
	seeds   graphSeeds
}

// Updates reports whether runs of the graph lead to updates, that is, whether it is a ForTraining
// graph with gradients of parameters that learn.
func (g *Graph) Updates() bool { return g != nil && len(g.Learning) > 0 && !g.listens }

// Frozen returns the Params without gradients in a ForTraining graph.
func (g *Graph) Frozen() (frozen gorgonia.Nodes) {
	if g == nil {
		return nil
	}
	for _, p := range g.Params {
		if !slices.Contains(g.Learning, p) {
			frozen = append(frozen, p)
		}
	}
	return frozen
}

// GraphOption changes how a graph is built.
type GraphOption func(*graphBuilder)

// WithRecompute makes the backward pass of a ForTraining graph recompute each block from its input
// instead of keeping the block's activations. This saves memory at the cost of about a third more
// computation.
func WithRecompute() GraphOption { return func(b *graphBuilder) { b.recompute = true } }

// WithRecomputedMLPs is like [WithRecompute] for the MLPs of the first n blocks, and nothing else. An MLP usually
// holds more than half of a block's activations, so n controls how much memory is saved in exchange for time.
func WithRecomputedMLPs(n int) GraphOption { return func(b *graphBuilder) { b.recomputedMLPs = n } }

// WithFrozen restricts the gradients of a ForTraining graph to the parameters of blueprints planted at
// weights and in the stream, as [TrainConfig.Frozen] does.
func WithFrozen() GraphOption { return func(b *graphBuilder) { b.frozen = true } }

// WithTuned restricts the gradients of a ForTraining graph to the named parameters and those of adapters,
// as [TrainConfig.Tuned] does.
func WithTuned(patterns ...string) GraphOption {
	return func(b *graphBuilder) { b.tuned = patterns }
}

// withLossShare differentiates 1/n of the loss, so that the gradients of n batches add up to the gradient
// of their mean loss.
func withLossShare(n int) GraphOption { return func(b *graphBuilder) { b.shares = n } }

// withTokenMean turns the share of withLossShare into an input, which Let sets to the share of the batch.
// The gradients of batches with different numbers of targets then add up to the gradient of the mean over
// all targets.
func withTokenMean() GraphOption { return func(b *graphBuilder) { b.tokenMean = true } }

// WithPreference makes a graph with a loss compute the mean loss of preference pairs instead of the
// cross-entropy, as [TrainConfig.Preference] does.
func WithPreference(p op.Preference) GraphOption { return func(b *graphBuilder) { b.preference = &p } }

// WithLogProbs makes a ForLoss graph compute the log-probability of each target instead of the loss.
func WithLogProbs() GraphOption { return func(b *graphBuilder) { b.logProbs = true } }

// withGradients limits the gradients to the named parameters, whether they learn or not. It is meant
// for measuring gradients, and such graphs never lead to updates.
func withGradients(params ...string) GraphOption {
	return func(b *graphBuilder) { b.wanted = params }
}

// WithAllPositions makes a ForLogits graph compute the logits of all positions instead of one per
// sequence.
func WithAllPositions() GraphOption { return func(b *graphBuilder) { b.everywhere = true } }

// WithRows makes a ForLogits graph compute the logits of n rows, which Graph.Rows selects, instead of one
// row per sequence. If n is 0, WithRows has no effect.
func WithRows(n int) GraphOption { return func(b *graphBuilder) { b.selected = n } }

// BuildGraph builds a model's computation on batches of the given number of sequences. A ForTraining
// graph includes the gradients of all parameters that learn.
func BuildGraph(m ModelParts, kind GraphKind, batch int, opts ...GraphOption) (*Graph, error) {
	if batch < 1 || batch > maxField {
		return nil, fmt.Errorf("llm: a batch of %d sequences, want 1 to %d", batch, maxField)
	}

	c := m.Config
	b := &graphBuilder{ModelParts: m, g: gorgonia.NewGraph(), kind: kind,
		blocks: block.Builder{Shape: c.BlockShape(), Seq: c.Seq},
		nodes:  map[string]*gorgonia.Node{}}
	for _, opt := range opts {
		opt(b)
	}

	if b.selected < 0 {
		return nil, fmt.Errorf("llm: WithRows(%d): want a number of rows, or 0 for one row per sequence",
			b.selected)
	}

	if err := m.KasminaOptions.check(); err != nil {
		return nil, err
	}

	g, err := b.build(batch)
	if err != nil {
		return nil, fmt.Errorf("llm: building the model: %w", err)
	}

	return g, nil
}

// ModelParts holds the parts of a model that graphs are built from. All graphs of a model share its
// parameters' memory.
type ModelParts struct {
	Config         Config
	Planted        []Planted
	KasminaOptions KasminaOptions
	Params         []Param
	Base           *cpuops.Weights // matrices whose Params have no Value; may be nil
	Kasmina        *state.Network  // lattices; the first ones belong to the entries of Config.Kasmina
	Seeds          []SeedLayer     // applied to all texts, on CPUs only and without gradients
}

// Param is a parameter of a model. It has no value in an [Outline], or if it is a matrix in the model's Base.
type Param struct {
	Name  string
	Value *tensor.Dense
}

// Outline returns the parts of a model for graphs without values, such as for a model that exists only on
// a device. The parameters of such graphs have names and shapes. An outline has no seeds.
func Outline(c Config) ModelParts {
	m := ModelParts{Config: c}
	for p := range c.Specs() {
		m.Params = append(m.Params, Param{Name: p.Name})
	}
	return m
}

// dtype returns the type of the model's floating-point values.
func (m ModelParts) dtype() tensor.Dtype {
	if v := m.Params[0].Value; v != nil {
		return v.Dtype()
	}
	return tensor.Float32
}

// addParams adds a node for each parameter.
func (b *graphBuilder) addParams() error {
	i := 0
	layout := layout{b.Config, b.Planted}
	for s := range layout.Specs() {
		if i == len(b.Params) || b.Params[i].Name != s.Name {
			return fmt.Errorf("parameter %d is not %s, which the configuration has there", i, s.Name)
		}
		var n *gorgonia.Node
		if v := b.Params[i].Value; v != nil {
			n = gorgonia.NodeFromAny(b.g, v, gorgonia.WithName(s.Name))
		} else {
			n = gorgonia.NewTensor(b.g, tensor.Float32, len(s.Shape),
				gorgonia.WithShape(s.Shape...), gorgonia.WithName(s.Name))
		}
		b.nodes[s.Name] = n
		b.out.Params = append(b.out.Params, n)
		i++
	}

	if len(b.Config.Kasmina)+len(b.Planted) > 0 && b.Kasmina == nil {
		return errors.New("an outline has no seeds, but its configuration has some")
	}

	return nil
}

// newParamValue returns a tensor filled with the numbers that next returns, or with zeros if next is nil.
func newParamValue(dt tensor.Dtype, shape []int, next func() float64) *tensor.Dense {
	n := tensor.Shape(shape).TotalSize()
	if dt == tensor.Float32 {
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(drawNumbers[float32](n, next)))
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(drawNumbers[float64](n, next)))
}

func drawNumbers[T float32 | float64](n int, next func() float64) []T {
	x := make([]T, n)
	if next != nil {
		for i := range x {
			x[i] = T(next())
		}
	}
	return x
}

type graphBuilder struct {
	ModelParts
	g         *gorgonia.ExprGraph
	kind      GraphKind
	recompute bool
	// recomputedMLPs is the number of blocks, from the first, whose MLPs are recomputed.
	recomputedMLPs int
	// everywhere requests the logits of all positions.
	everywhere bool
	selected   int // number of rows that get logits; 0 for one per sequence
	shares     int
	tokenMean  bool
	tuned      []string // only these and adapters learn; nil for all
	frozen     bool     // only the parameters of planted blueprints learn
	wanted     []string // parameters to differentiate; nil for all that learn
	preference *op.Preference
	logProbs   bool
	blocks     block.Builder // builder for sequences of up to Config.Seq; its Position is set for cached decoding
	cached     bool          // whether to add a Position
	spanRows   int           // rows of a graph with blocks.Spans
	adapters   *selectable   // from which selection chooses for each row
	selection  *lowrank.Selection
	states     bool // whether to output states instead of logits
	set        *AdapterSet
	stacked    map[string]block.Stacked // of the set, by layer
	// stackedSeeds are the seeds of the set, by the block before them.
	stackedSeeds map[int][]stackedSeeds
	keeps        bool // whether to output keys and values for a cached graph
	draws        bool // whether the machine draws tokens
	out          *Graph
	nodes        map[string]*gorgonia.Node // parameters by name
}

func (b *graphBuilder) build(batch int) (*Graph, error) {
	c, rows := b.Config, batch*b.blocks.Seq
	out := &Graph{G: b.g, Kind: b.kind, Batch: batch, Base: b.Base, preference: b.preference, blocks: &b.blocks,
		keeps: b.keeps, Draws: b.draws}
	b.out = out
	if b.cached {
		rows = 1
		b.blocks.Position = gorgonia.NewTensor(b.g, tensor.Int, 1, gorgonia.WithShape(1),
			gorgonia.WithName("position"))
		out.Position = b.blocks.Position
	}
	if b.blocks.Spans != nil {
		rows = b.spanRows
	}
	if b.blocks.Pages != nil {
		columns := 1 + (b.blocks.Seq+kvcache.PageTokens-1)/kvcache.PageTokens
		out.Pages = gorgonia.NewTensor(b.g, tensor.Int, 2, gorgonia.WithShape(rows, columns),
			gorgonia.WithName("pages"))
		b.blocks.Table = out.Pages
	}

	out.IDs = gorgonia.NewTensor(b.g, tensor.Int, 1, gorgonia.WithShape(rows),
		gorgonia.WithName("ids"))
	if c.Documents && b.kind != ForLogits {
		out.Starts = gorgonia.NewTensor(b.g, tensor.Int, 1, gorgonia.WithShape(rows),
			gorgonia.WithName("starts"))
	}

	if err := b.addParams(); err != nil {
		return nil, err
	}

	if err := b.plant(); err != nil {
		return nil, err
	}
	b.addSet(rows)

	x, err := b.embedding()
	if err == nil && c.EmbedScale != 0 {
		x, err = gorgonia.Mul(x, b.number(c.EmbedScale))
	}

	if err == nil && c.Positions > 0 {
		x, err = b.positions(x)
	}

	embedded, boundaries := x, c.boundaries()
	for i := range c.Layers {
		out.seeds.streams = append(out.seeds.streams, x)
		if err == nil && boundaries[i] {
			x, err = b.boundary(x, embedded)
		}
		if err == nil {
			x, err = b.block(i, x)
		}
	}
	if err != nil {
		return nil, err
	}

	out.seeds.streams = append(out.seeds.streams, x)
	if b.kind == ForLogits && !b.cached {
		wanted := batch
		switch {
		case b.everywhere:
			wanted = rows
		case b.selected > 0:
			wanted = b.selected
		}
		out.Rows = gorgonia.NewTensor(b.g, tensor.Int, 1, gorgonia.WithShape(wanted),
			gorgonia.WithName("rows"))
		if x, err = op.Embedding(out.Rows, x); err != nil { // works for the rows of any matrix
			return nil, err
		}
	}

	if x, err = b.blocks.Norm(x, b.nodes[normName],
		b.nodes[NormBiasName]); err != nil {
		return nil, err
	}

	if b.states {
		out.States = x
		return out, nil
	}

	head := b.nodes[headName]
	if !c.Untied {
		head = b.nodes[embedName]
	}

	switch b.kind {
	case ForLogits:
		out.Logits, err = b.logits(x, head)
		return out, err
	case ForTraining, ForLoss:
		out.Targets = gorgonia.NewTensor(b.g, tensor.Int, 1, gorgonia.WithShape(rows),
			gorgonia.WithName("targets"))
		if err := b.loss(x, head); err != nil || b.kind == ForLoss {
			return out, err
		}
		return out, b.differentiate(out)
	}

	return nil, errors.New("unknown kind of graph")
}

// embedding adds the vectors of the tokens, with the adapter of the embedding if it has one.
func (b *graphBuilder) embedding() (*gorgonia.Node, error) {
	x, err := op.Embedding(b.out.IDs, b.nodes[embedName])
	if err != nil || !b.Config.adapts(EmbeddingLayer) {
		return x, err
	}

	h, err := op.Embedding(b.out.IDs, b.nodes[EmbeddingLayer+block.EndingEmbeddingA])
	if err != nil {
		return nil, err
	}
	if h, err = gorgonia.Mul(h, b.number(b.Config.Adapter.ScaleOf(EmbeddingLayer))); err != nil {
		return nil, err
	}
	if h, err = op.Linear(h, b.nodes[EmbeddingLayer+block.EndingEmbeddingB]); err != nil {
		return nil, err
	}
	return gorgonia.Add(x, h)
}

// logits adds the output layer, with its adapter if it has one.
func (b *graphBuilder) logits(x, head *gorgonia.Node) (*gorgonia.Node, error) {
	a, ok := b.Config.headAdapter(b.kind == ForTraining)
	if !ok {
		return op.Linear(x, head)
	}

	params := map[string]*gorgonia.Node{}
	for _, ending := range []string{block.EndingA, block.EndingB, block.EndingMagnitude} {
		params[ending] = b.nodes[OutputLayer+ending]
	}
	var key *gorgonia.Node
	if a.Dropout > 0 {
		key = b.dropoutKey()
	}
	return b.blocks.Head(x, head, key, a, params)
}

// loss adds the loss, or the log-probabilities of the targets, from the final states x.
func (b *graphBuilder) loss(x, head *gorgonia.Node) (err error) {
	out, frozen := b.out, b.freezes(b.Config.headParam())
	if b.Config.adapts(OutputLayer) {
		if b.preference != nil || b.logProbs {
			return errors.New("preference pairs need an output layer without an adapter: leave out the target " +
				OutputLayer)
		}
		logits, err := b.logits(x, head)
		if err == nil {
			out.Loss, err = op.CrossEntropy(logits, out.Targets)
		}
		return err
	}
	if b.preference == nil && !b.logProbs {
		loss := op.LinearCrossEntropy
		if frozen {
			loss = op.FrozenLinearCrossEntropy
		}
		out.Loss, err = loss(x, head, out.Targets)
		return err
	}

	logProbs := op.LinearLogProbs
	if frozen {
		logProbs = op.FrozenLinearLogProbs
	}
	y, err := logProbs(x, head, out.Targets)
	if err != nil {
		return err
	}

	if b.logProbs {
		out.LogProbs = y
		return nil
	}

	rows := gorgonia.WithShape(y.Shape()[0])
	out.Answers = gorgonia.NewTensor(b.g, tensor.Int, 1, rows, gorgonia.WithName("answers"))
	out.Reference = gorgonia.NewTensor(b.g, b.dtype(), 1, rows, gorgonia.WithName("reference"))
	out.Loss, err = op.PreferenceLoss(y, out.Reference, out.Answers, *b.preference)
	return err
}

// TakePreferences returns the figures of all preference pairs that the graph has computed since the last
// call.
func (g *Graph) TakePreferences() (f op.PreferenceFigures) {
	if g == nil || g.Loss == nil {
		return f
	}
	if o, ok := g.Loss.Op().(*op.PreferenceLossOp); ok {
		f = o.TakeFigures()
	}
	return f
}

// positions adds to x the learned embedding of each row's position.
func (b *graphBuilder) positions(x *gorgonia.Node) (*gorgonia.Node, error) {
	at := b.blocks.Position
	switch {
	case at != nil:
	case b.out.Starts != nil || b.blocks.Spans != nil:
		b.out.Positions = gorgonia.NewTensor(b.g, tensor.Int, 1, gorgonia.WithShape(x.Shape()[0]),
			gorgonia.WithName("positions"))
		at = b.out.Positions
	default:
		all := make([]int, x.Shape()[0])
		for i := range all {
			all[i] = i % b.blocks.Seq
		}
		at = gorgonia.NodeFromAny(b.g, idTensor(all), gorgonia.WithName("positions"))
	}

	learned, err := op.Embedding(at, b.nodes[PositionsName])
	if err != nil {
		return nil, err
	}

	return gorgonia.Add(x, learned)
}

// trains reports whether the graph computes training steps. Only their measurements go into the lattices.
func (b *graphBuilder) trains() bool { return b.kind == ForTraining && b.wanted == nil }

// differentiate adds the gradients of the loss, divided by the number of batches in a step.
func (b *graphBuilder) differentiate(g *Graph) error {
	cost := g.Loss
	if b.shares > 1 {
		var err error
		share := b.number(1 / float64(b.shares))
		if b.tokenMean {
			share = gorgonia.NewScalar(b.g, b.dtype(), gorgonia.WithName("share"))
			g.share, g.shares = share, b.shares
		}
		if cost, err = gorgonia.Mul(cost, share); err != nil {
			return err
		}
	}

	for _, p := range g.Params {
		if b.wanted == nil && b.learns(p.Name()) || slices.Contains(b.wanted, p.Name()) {
			g.Learning = append(g.Learning, p)
		}
	}

	g.listens = b.wanted != nil
	if len(g.Learning) == 0 {
		return nil // a frozen model, and nothing is planted yet
	}

	hashOnes()
	if _, err := gorgonia.Grad(cost, g.Learning...); err != nil || b.wanted != nil {
		return err
	}

	return b.measure()
}

// hashOnes makes Gorgonia hash the constant nodes that all its graphs share. Otherwise it hashes them
// when a graph first uses them, and goroutines that differentiate separate graphs would race.
var hashOnes = sync.OnceFunc(func() {
	for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		x := gorgonia.NewScalar(gorgonia.NewGraph(), dt)
		_, _ = gorgonia.Grad(gorgonia.Must(gorgonia.Square(x)), x)
	}
})

// number returns a constant of the parameters' type.
func (b *graphBuilder) number(x float64) *gorgonia.Node {
	if b.dtype() == tensor.Float64 {
		return gorgonia.NewConstant(x)
	}
	return gorgonia.NewConstant(float32(x))
}

// learns reports whether a parameter learns.
func (b *graphBuilder) learns(param string) bool {
	return learning{b.frozen, b.tuned, !b.Config.Adapter.IsZero()}.includes(param)
}

// freezes reports whether a weight needs no gradient because of adapters or Tuned. In a frozen model with
// seeds, blueprints on a weight need its gradient.
func (b *graphBuilder) freezes(param string) bool {
	if b.wanted != nil { // gradients of adapters need none of the weights next to them
		return b.kind == ForTraining && !b.Config.Adapter.IsZero() && !slices.Contains(b.wanted, param)
	}
	return b.kind == ForTraining && !b.frozen && !b.learns(param)
}

// tuning describes which parameters of block i learn.
func (b *graphBuilder) tuning(i int) (t block.Tuning) {
	prefix := blockPrefix(i)
	for _, layer := range b.Config.layersOfBlock() {
		if b.freezes(prefix + layer + ".weight") {
			if t.Frozen == nil {
				t.Frozen = map[string]bool{}
			}
			t.Frozen[layer+".weight"] = true
		}
	}

	t.Selected, t.Selection = b.adapters.of(prefix), b.selection
	t.Stacked, t.Rows = b.stackedIn(prefix), b.out.Adapters
	t.Adapters = b.Config.adaptersOf(i)
	if b.kind != ForTraining {
		for k := range t.Adapters {
			t.Adapters[k].Dropout = 0
		}
	}

	return t
}

// dropoutKey returns the input for the random key of the dropout masks.
func (b *graphBuilder) dropoutKey() *gorgonia.Node {
	if b.out.key == nil {
		b.out.key = gorgonia.NewTensor(b.g, tensor.Int, 1, gorgonia.WithShape(1),
			gorgonia.WithName("dropout key"))
	}
	return b.out.key
}

// boundary adds the operator of Config.Boundary.
func (b *graphBuilder) boundary(x, embedded *gorgonia.Node) (*gorgonia.Node, error) {
	x, err := b.blocks.Norm(x, b.nodes[normName], b.nodes[NormBiasName])
	if err != nil {
		return nil, err
	}

	share, err := gorgonia.Mul(embedded, b.number(b.Config.Boundary))
	if err != nil {
		return nil, err
	}

	return gorgonia.Add(x, share)
}

// block adds block i, any Kasmina layer after it, and the seeds in the stream after it.
func (b *graphBuilder) block(i int, x *gorgonia.Node) (*gorgonia.Node, error) {
	p := blockPrefix(i)
	inputs := gorgonia.Nodes{x}
	for _, name := range b.blocks.Params() {
		inputs = append(inputs, b.nodes[p+name])
	}

	tuning := b.tuning(i)
	for _, name := range tuning.Params() {
		inputs = append(inputs, b.nodes[p+name])
	}

	if tuning.Drops() {
		inputs = append(inputs, b.dropoutKey())
	}

	if b.out.Starts != nil {
		inputs = append(inputs, b.out.Starts)
	}

	build := func(in gorgonia.Nodes) (*gorgonia.Node, error) {
		return b.blocks.Build(in, b.Config.Attention(i), tuning)
	}
	var err error
	b.blocks.Recompute = nil
	if i < b.recomputedMLPs && !b.recompute && b.kind == ForTraining {
		b.blocks.Recompute = autodiff.Recompute
	}
	if b.recompute && b.kind == ForTraining {
		x, err = autodiff.Recompute(inputs, build)
	} else {
		x, err = build(inputs)
	}
	if err != nil {
		return nil, fmt.Errorf("block %d: %w", i, err)
	}

	for n, after := range b.Config.Kasmina {
		if after != i {
			continue
		}
		x, err = b.kasmina(n, x, b.nodes[p+kasminaWeights], b.nodes[p+kasminaScales])
		if err != nil {
			return nil, fmt.Errorf("the Kasmina layer after block %d: %w", i, err)
		}
	}

	if x, err = b.selectSeeds(i, x); err != nil {
		return nil, fmt.Errorf("the seeds after block %d: %w", i, err)
	}
	return b.streams(i, x)
}

// selectSeeds applies the chunk seeds of adapters after block i: ModelParts.Seeds to all texts, and then to each text the
// seeds that it has chosen.
func (b *graphBuilder) selectSeeds(i int, x *gorgonia.Node) (*gorgonia.Node, error) {
	var err error
	for _, l := range b.Seeds {
		if l.Block != i {
			continue
		}
		layer, err := l.layer()
		if err != nil {
			return nil, err
		}
		first := &lowrank.Selection{}
		first.Set(make([]int, x.Shape()[0]))
		if x, err = chunks.Apply(x, []*chunks.Layer{layer}, first); err != nil {
			return nil, err
		}
	}
	for _, s := range b.stackedSeeds[i] {
		if x, err = s.apply(x, b.out.Adapters); err != nil {
			return nil, err
		}
	}
	if all := b.adapters.seedsAfter(i); all != nil {
		return chunks.Apply(x, all, b.selection)
	}
	return x, nil
}
