// Package runtest generates random training runs and checks that they keep the guarantees of package
// llm.
//
// A [Case] describes a run completely: the model, the optimizer, the growth, and the interruptions and
// failures. Equal seeds generate equal cases. [Check] repeats the run in several ways and compares the
// results:
//
//   - Two equal runs are equal.
//   - A resumed run equals an uninterrupted one.
//   - A run on several ranks equals a run in one process.
//   - Callbacks that evaluate, sample or save leave no trace.
//   - A failed operation is reported and changes nothing, and after the next attempt the run is
//     identical to one without failures.
//   - Parameters that should be frozen keep their bits.
//
// [Shrink] simplifies a failing case as long as it keeps failing. [Campaign] checks many cases; the
// tests of several packages call it.
package runtest

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// Case describes a run and the properties to check. Its JSON form allows a case to be repeated even
// after the generator has changed.
type Case struct {
	Seed      uint64             `json:"seed"` // for the parameters, the text and the order of the data
	Model     llm.Config         `json:"model"`
	Float64   bool               `json:"float64,omitempty"`
	Kasmina   llm.KasminaOptions `json:"kasmina,omitzero"`
	Lattices  Lattices           `json:"lattices,omitzero"`
	Train     Train              `json:"train"`
	Optimizer Optimizer          `json:"optimizer"`
	Text      Text               `json:"text"`
	Tuning    Tuning             `json:"tuning,omitzero"`
	Parts     Parts              `json:"parts,omitzero"`
	Growth    *Growth            `json:"growth,omitempty"`
	Orders    []Order            `json:"orders,omitempty"`

	// Checkpoint describes the checkpoint that the run writes, or is nil for none.
	Checkpoint *Checkpoint `json:"checkpoint,omitempty"`
	Resumes    []Resume    `json:"resumes,omitempty"`
	Ranks      int         `json:"ranks,omitempty"`     // ranks of a second run, which must end with equal results; 0 for none
	Replay     bool        `json:"replay,omitempty"`    // a second run replays the record of growth
	Callbacks  []string    `json:"callbacks,omitempty"` // callbacks that must leave no trace: see callbackNames
	Fault      *Fault      `json:"fault,omitempty"`
}

// Lattices holds the options of all lattices of a model.
type Lattices struct {
	Gated       int             `json:"gated,omitempty"` // minimal number of epochs in a stage; 0 for no gates
	Embargo     int             `json:"embargo,omitempty"`
	Noise       float64         `json:"noise,omitempty"`
	Telemetry   state.Telemetry `json:"telemetry,omitzero"`
	Quarantine  bool            `json:"quarantine,omitempty"`
	Transitions int             `json:"transitions,omitempty"`
	History     int             `json:"history,omitempty"`
	Renormalize int             `json:"renormalize,omitempty"`
}

// Train corresponds to llm.TrainConfig.
type Train struct {
	Steps      int     `json:"steps"`
	Batch      int     `json:"batch"`
	Accumulate int     `json:"accumulate,omitempty"`
	Clip       float64 `json:"clip,omitempty"`
	Epoch      int     `json:"epoch"`
	Recompute  bool    `json:"recompute,omitempty"`
	// RecomputeMLPs is the number of blocks in which only the MLP is recomputed.
	RecomputeMLPs int `json:"recompute_mlps,omitempty"`

	Frozen   bool   `json:"frozen,omitempty"`
	Directed bool   `json:"directed,omitempty"`
	Merge    bool   `json:"merge,omitempty"`  // with the callback llm.MergeAtEnd
	Budget   string `json:"budget,omitempty"` // "tokens" or "flops", instead of a number of steps
	Anneal   bool   `json:"anneal,omitempty"`
	Cosine   bool   `json:"cosine,omitempty"`  // schedule with warmup
	Explode  int    `json:"explode,omitempty"` // step whose learning rate is far too high; 0 for none
}

// Optimizer describes an optimizer.
type Optimizer struct {
	Muon  bool    `json:"muon,omitempty"` // instead of AdamW
	Lion  bool    `json:"lion,omitempty"`
	Bits8 bool    `json:"bits8,omitempty"` // AdamW with 8-bit moments
	LR    float64 `json:"lr"`
	Beta1 float64 `json:"beta1,omitempty"` // 0 means the default betas
	Beta2 float64 `json:"beta2,omitempty"`
	Decay float64 `json:"decay,omitempty"`
	Spare bool    `json:"spare,omitempty"` // exclude blueprints from weight decay
	Group bool    `json:"group,omitempty"` // another learning rate for some parameters
}

// Text describes the training text. A short text is read several times.
type Text struct {
	Tokens int  `json:"tokens"`
	Rare   bool `json:"rare,omitempty"` // some tokens occur only once
	// Packed divides the text into conversations. The model learns only some tokens of each.
	Packed bool `json:"packed,omitempty"`
	// Pairs, unless it is nil, divides the text into preference pairs and trains on them with this loss.
	Pairs *op.Preference `json:"pairs,omitempty"`
}

// Growth describes a controller and the judgment of seeds.
type Growth struct {
	Controller string  `json:"controller"` // see controllerOf
	Script     []Order `json:"script,omitempty"`
	Every      int     `json:"every,omitempty"`
	Validation bool    `json:"validation,omitempty"`
	Governed   bool    `json:"governed,omitempty"` // with a governor that rolls most blueprints back
	Rewarm     int     `json:"rewarm,omitempty"`
	Fresh      bool    `json:"fresh,omitempty"` // clear the moments of copied blocks
}

// Order is a list of commands that take effect together. Step is a number of steps or, in the script of a
// controller, of epochs.
type Order struct {
	Step     int             `json:"step"`
	Via      string          `json:"via,omitempty"` // "submit" or "steer"; Network.Do otherwise
	Commands []state.Command `json:"commands"`
}

// Checkpoint describes a callback made by llm.Checkpoint.
type Checkpoint struct {
	Every      int  `json:"every,omitempty"`
	Background bool `json:"background,omitempty"`
	Apart      bool `json:"apart,omitempty"`
	Parts      bool `json:"parts,omitempty"` // each rank writes a separate file
}

// Resume describes how a run is resumed from the checkpoint of a step.
type Resume struct {
	Step int `json:"step"`
	// Into names the trainer that resumes: "fresh", "loaded" (with the model that LoadModel returns),
	// "same" (after training to the end), or "other" (after a different run).
	Into string `json:"into"`
	// Lenient accepts other settings, although there are none.
	Lenient bool `json:"lenient,omitempty"`
}

// Fault describes the only failure of a run.
type Fault struct {
	Op string `json:"op"` // see faultOps
	// At chooses the call that fails. Of n calls of Op in the run, it is the one with index n·At, rounded
	// down.
	At float64 `json:"at"`
	// Resuming places the failure in a Resume instead of a Run.
	Resuming bool `json:"resuming,omitempty"`
	// Early makes the first callback fail instead of the last.
	Early bool `json:"early,omitempty"`
	// Diverged makes the error wrap llm.ErrDiverged.
	Diverged bool `json:"diverged,omitempty"`
	// Lasting makes all later calls of Op fail as well, until the run ends, so that the state from before
	// often cannot be restored.
	Lasting bool `json:"lasting,omitempty"`
}

// String returns the case as JSON, for the flag -case.
func (c Case) String() string {
	text, err := json.Marshal(c)
	if err != nil {
		return fmt.Sprintf("seed %d, which cannot be encoded: %v", c.Seed, err)
	}
	return string(text)
}

// Parse returns the case of a string returned by Case.String.
func Parse(text string) (c Case, err error) {
	if err = json.Unmarshal([]byte(text), &c); err != nil {
		return c, fmt.Errorf("runtest: the case %.60q: %w", text, err)
	}
	return c, nil
}

// clone returns a copy that Shrink can modify.
func (c Case) clone() Case {
	c.Orders, c.Resumes = slices.Clone(c.Orders), slices.Clone(c.Resumes)
	c.Callbacks = slices.Clone(c.Callbacks)
	if c.Growth != nil {
		g := *c.Growth
		g.Script = slices.Clone(g.Script)
		c.Growth = &g
	}

	if c.Fault != nil {
		f := *c.Fault
		c.Fault = &f
	}

	if c.Checkpoint != nil {
		k := *c.Checkpoint
		c.Checkpoint = &k
	}

	return c
}

// Features returns the names of the features in the case, for statistics.
func (c Case) Features() (all []string) {
	add := func(has bool, name string) {
		if has {
			all = append(all, name)
		}
	}
	m, t, o := c.Model, c.Train, c.Optimizer
	add(true, fmt.Sprintf("%d blocks", m.Layers))
	add(!o.Muon && !o.Lion && !o.Bits8, "AdamW")
	add(o.Beta1 > 0 && o.Beta2 <= o.Beta1*o.Beta1, "AdamW, β₂ ≤ β₁²")
	add(o.Muon, "Muon")
	add(o.Lion, "Lion")
	add(o.Bits8, "AdamW with 8-bit moments")
	add(o.Decay > 0, "weight decay")
	add(o.Group, "parameter groups")
	add(c.Float64, "float64")
	add(t.Clip > 0, "clipping")
	add(t.Accumulate > 1, "accumulation")
	add(t.Recompute, "recomputation")
	add(t.RecomputeMLPs > 0, "recomputation of MLPs")
	add(t.Budget != "", "budget of "+t.Budget)
	add(t.Anneal, "annealing")
	add(t.Cosine, "schedule with warmup")
	add(t.Explode > 0, "a step that diverges")
	add(c.Text.Tokens < 400, "several epochs of data")
	add(c.Text.Packed, "packed conversations")
	if p := c.Text.Pairs; p != nil {
		add(true, "preference pairs: "+string(p.Kind))
	}

	u := c.Tuning
	add(!u.Adapter.IsZero(), "adapters")
	add(u.Adapter.Magnitude, "adapters with magnitudes")
	add(u.Adapter.Dropout > 0, "adapters with dropout")
	add(slices.Contains(u.Adapter.Targets, llm.EmbeddingLayer) || slices.Contains(u.Adapter.Targets, llm.OutputLayer),
		"adapters of outer layers")
	add(u.Seeds != "", "chunk seeds as adapters")
	add(len(u.Tuned) > 0, "tuned parameters")
	add(u.OmitBase, "checkpoints without frozen parameters")
	add(u.Base != "", "frozen matrices in "+u.Base)

	p := c.Parts
	add(p.EMA > 0, "part: EMA")
	add(p.Patience > 0, "part: EarlyStopping")
	add(p.Best, "part: BestCheckpoint")
	add(p.Retention != nil, "part: Retention")
	add(p.RankGrowth != nil, "part: RankGrowth")
	add(p.RankGrowth != nil && p.Retention != nil, "part: RankGrowth with Retention")
	add(c.Text.Pairs != nil, "part: References")
	add(m.KVHeads > 0 && m.KVHeads < m.Heads, "grouped queries")
	add(m.Untied, "untied")
	add(m.QKVBias, "biases")
	add(m.QKNorm, "norms of heads")
	add(m.PostNorms, "post-norms")
	add(m.NormPlusOne, "norms plus one")
	add(m.GELU, "GELU")
	add(m.LayerNorm, "layer norms")
	add(m.Positions > 0, "learned positions")
	add(m.WideQKNorm, "norms over all heads")
	add(m.EmbedScale != 0, "scaled embeddings")
	add(len(m.Blocks) > 0, "windows")
	add(m.Documents, "documents")
	add(m.ZeroOutputs, "outputs that start at 0")
	add(t.Frozen, "frozen host")
	add(t.Directed, "directed LoRA")
	add(t.Merge, "merged at the end")
	add(len(m.Kasmina) > 0, "site: chunks")
	add(len(m.Weights) > 0, "site: weights")
	add(len(m.Streams) > 0, "site: stream")
	add(m.Depth > 0, "site: depth")
	add(m.Boundary > 0, "boundaries of copies")
	add(c.Kasmina != llm.KasminaOptions{}, "options of Kasmina layers")
	add(c.Lattices.Gated > 0, "gates")
	add(c.Lattices.Noise > 0, "noise of α")
	add(c.Lattices.Telemetry != state.Telemetry{}, "other telemetry")
	add(c.Lattices.Quarantine, "quarantine")
	for _, via := range []string{"", "submit", "steer"} {
		add(slices.ContainsFunc(c.Orders, func(o Order) bool { return o.Via == via }),
			"commands by "+map[string]string{"": "Do", "submit": "Submit", "steer": "Steer"}[via])
	}

	for _, kind := range []blueprints.Kind{blueprints.Stack, blueprints.Interleave,
		blueprints.NewBlocks, blueprints.Middle, blueprints.LoRA, blueprints.Attention, blueprints.Perceptron} {
		add(c.plants(kind), "blueprint: "+kind.String())
	}

	if g := c.Growth; g != nil {
		add(true, "controller: "+g.Controller)
		add(g.Validation, "twin and validation")
		add(g.Every > 1, "rare comparisons")
		add(g.Governed, "strict governor")
		add(g.Rewarm > 0, "learning rate that climbs back")
		add(g.Fresh, "fresh moments")
	}

	if k := c.Checkpoint; k != nil {
		add(true, "Checkpoint")
		add(k.Background, "Checkpoint in the background")
		add(k.Apart, "Checkpoint in two files")
		add(k.Parts && c.Ranks > 0, "Checkpoint in parts")
	}

	for _, into := range resumeTargets {
		add(slices.ContainsFunc(c.Resumes, func(r Resume) bool { return r.Into == into }),
			"resumed by a "+into+" trainer")
	}
	add(slices.ContainsFunc(c.Resumes, func(r Resume) bool { return r.Lenient }), "resumed with WithNewSettings")

	add(c.Replay && c.Growth != nil, "replayed")
	add(c.Ranks > 0, fmt.Sprintf("%d ranks", c.Ranks))
	for _, b := range c.Callbacks {
		add(true, "callback: "+b)
	}

	if f := c.Fault; f != nil {
		name := "fault: " + f.Op
		if f.Resuming {
			name += " while resuming"
		}
		if f.Lasting {
			name += ", lasting"
		}
		add(true, name)
	}

	return all
}

// plants reports whether an order plants a blueprint of the kind.
func (c Case) plants(kind blueprints.Kind) bool {
	orders := c.Orders
	if c.Growth != nil {
		orders = slices.Concat(orders, c.Growth.Script)
	}
	return slices.ContainsFunc(orders, func(o Order) bool {
		return slices.ContainsFunc(o.Commands, func(c state.Command) bool {
			return c.Action == state.Germinate && c.Request.Kind == kind
		})
	})
}
