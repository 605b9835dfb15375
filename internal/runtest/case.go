// Package runtest generates training runs at random and checks that they keep the promises that
// package llm makes for every run.
//
// A [Case] describes a run completely: the model, the optimizer, how the model grows, and what
// interrupts or fails. Equal seeds generate equal cases. [Check] makes the run several times and
// compares the results:
//
//   - Two equal runs are equal.
//   - A resumed run equals an uninterrupted one.
//   - A run on several ranks equals a run in one process.
//   - Callbacks that evaluate, sample or save leave no trace.
//   - An operation that fails is reported and changes nothing, and the next attempt ends with the
//     bits of a run in which nothing failed.
//   - Parameters that should be frozen keep their bits.
//
// [Shrink] removes everything from a failing case that the failure does not need. [Campaign] does
// all of this for many cases, and is what the tests of several packages call.
package runtest

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// Case describes a run and what is checked of it. It is written as JSON, so that a case can be
// repeated after the generator has changed.
type Case struct {
	Seed      uint64     `json:"seed"` // of the parameters, the text, and the order of the data
	Model     llm.Config `json:"model"`
	Float64   bool       `json:"float64,omitempty"`
	Lattices  Lattices   `json:"lattices,omitzero"`
	Train     Train      `json:"train"`
	Optimizer Optimizer  `json:"optimizer"`
	Text      Text       `json:"text"`
	Growth    *Growth    `json:"growth,omitempty"`
	Orders    []Order    `json:"orders,omitempty"`

	// Checkpoint, if it is not nil, has the run write a checkpoint file.
	Checkpoint *Checkpoint `json:"checkpoint,omitempty"`
	Resumes    []Resume    `json:"resumes,omitempty"`
	Ranks      int         `json:"ranks,omitempty"`  // of another run, which must end alike; 0 for none
	Replay     bool        `json:"replay,omitempty"` // another run follows the record of growth
	Beside     []string    `json:"beside,omitempty"` // callbacks that must leave no trace: see besides
	Fault      *Fault      `json:"fault,omitempty"`
}

// Lattices holds the options of all lattices of a model.
type Lattices struct {
	Gated       int             `json:"gated,omitempty"` // epochs that a stage takes at least; 0 for no gates
	Embargo     int             `json:"embargo,omitempty"`
	Noise       float64         `json:"noise,omitempty"`
	Telemetry   state.Telemetry `json:"telemetry,omitzero"`
	Quarantine  bool            `json:"quarantine,omitempty"`
	Transitions int             `json:"transitions,omitempty"`
	History     int             `json:"history,omitempty"`
	Renormalize int             `json:"renormalize,omitempty"`
}

// Train holds what llm.TrainConfig does.
type Train struct {
	Steps      int     `json:"steps"`
	Batch      int     `json:"batch"`
	Accumulate int     `json:"accumulate,omitempty"`
	Clip       float64 `json:"clip,omitempty"`
	Epoch      int     `json:"epoch"`
	Recompute  bool    `json:"recompute,omitempty"`
	Budget     string  `json:"budget,omitempty"` // "tokens" or "flops", instead of a number of steps
	Anneal     bool    `json:"anneal,omitempty"`
	Cosine     bool    `json:"cosine,omitempty"`  // schedule with warmup
	Explode    int     `json:"explode,omitempty"` // step whose learning rate is far too high; 0 for none
}

// Optimizer describes an optimizer.
type Optimizer struct {
	Muon  bool    `json:"muon,omitempty"`
	LR    float64 `json:"lr"`
	Beta1 float64 `json:"beta1,omitempty"` // the betas are the default ones if this is 0
	Beta2 float64 `json:"beta2,omitempty"`
	Decay float64 `json:"decay,omitempty"`
	Spare bool    `json:"spare,omitempty"` // no decay of blueprints
	Group bool    `json:"group,omitempty"` // another learning rate for some parameters
}

// Text describes the tokens that a run learns from. A short text makes for several epochs of data.
type Text struct {
	Tokens int  `json:"tokens"`
	Rare   bool `json:"rare,omitempty"` // some tokens occur only once
}

// Growth describes a controller and how seeds are judged.
type Growth struct {
	Controller string  `json:"controller"` // see controllerOf
	Script     []Order `json:"script,omitempty"`
	Every      int     `json:"every,omitempty"`
	Validation bool    `json:"validation,omitempty"`
	Governed   bool    `json:"governed,omitempty"` // by a governor that takes most blueprints back
	Rewarm     int     `json:"rewarm,omitempty"`
	Fresh      bool    `json:"fresh,omitempty"` // moments of copied blocks
}

// Order is a list of commands that take effect together. Step counts steps or, in the script of a
// controller, epochs.
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
	Parts      bool `json:"parts,omitempty"` // of several ranks each writes a file
}

// Resume describes how a run is resumed from the checkpoint of a step.
type Resume struct {
	Step int `json:"step"`
	// Into names the trainer that resumes: "fresh", "loaded" (of the model that LoadModel returns),
	// "same" (the one that has trained to the end), or "other" (one that has made another run).
	Into string `json:"into"`
}

// Fault describes the one thing that goes wrong in a run.
type Fault struct {
	Op string `json:"op"` // see faultOps
	// At chooses one of the n calls that the run makes of Op: the one at n·At, rounded down.
	At float64 `json:"at"`
	// Resuming has the failure happen during a Resume instead of a Run.
	Resuming bool `json:"resuming,omitempty"`
	// Early has a callback fail before all other callbacks have seen the event, and not after.
	Early bool `json:"early,omitempty"`
	// Diverged has the error wrap llm.ErrDiverged.
	Diverged bool `json:"diverged,omitempty"`
}

// String returns the case as JSON, as -case wants it.
func (c Case) String() string {
	text, err := json.Marshal(c)
	if err != nil {
		return fmt.Sprintf("seed %d, which cannot be written: %v", c.Seed, err)
	}
	return string(text)
}

// Parse reads what Case.String returned.
func Parse(text string) (c Case, err error) {
	if err = json.Unmarshal([]byte(text), &c); err != nil {
		return c, fmt.Errorf("runtest: the case %.60q: %w", text, err)
	}
	return c, nil
}

// clone returns a copy that shares nothing that Shrink changes.
func (c Case) clone() Case {
	c.Orders, c.Resumes = slices.Clone(c.Orders), slices.Clone(c.Resumes)
	c.Beside = slices.Clone(c.Beside)
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

// Features returns the names of all features that the case has, for counting.
func (c Case) Features() (all []string) {
	add := func(has bool, name string) {
		if has {
			all = append(all, name)
		}
	}
	m, t, o := c.Model, c.Train, c.Optimizer
	add(true, fmt.Sprintf("%d blocks", m.Layers))
	add(!o.Muon, "AdamW")
	add(!o.Muon && o.Beta1 > 0 && o.Beta2 <= o.Beta1*o.Beta1, "AdamW, β₂ ≤ β₁²")
	add(o.Muon, "Muon")
	add(o.Decay > 0, "weight decay")
	add(o.Group, "parameter groups")
	add(c.Float64, "float64")
	add(t.Clip > 0, "clipping")
	add(t.Accumulate > 1, "accumulation")
	add(t.Recompute, "recomputation")
	add(t.Budget != "", "budget of "+t.Budget)
	add(t.Anneal, "annealing")
	add(t.Cosine, "schedule with warmup")
	add(t.Explode > 0, "a step that diverges")
	add(c.Text.Tokens < 400, "several epochs of data")
	add(m.KVHeads > 0 && m.KVHeads < m.Heads, "grouped queries")
	add(m.Untied, "untied")
	add(m.QKVBias, "biases")
	add(m.QKNorm, "norms of heads")
	add(m.PostNorms, "post-norms")
	add(m.NormPlusOne, "norms plus one")
	add(m.GELU, "GELU")
	add(m.EmbedScale != 0, "scaled embeddings")
	add(len(m.Blocks) > 0, "windows")
	add(m.Documents, "documents")
	add(m.ZeroOutputs, "outputs that start at 0")
	add(m.Frozen, "frozen host")
	add(m.Directed, "directed LoRA")
	add(len(m.Kasmina) > 0, "site: chunks")
	add(len(m.Weights) > 0, "site: weights")
	add(len(m.Streams) > 0, "site: stream")
	add(m.Depth > 0, "site: depth")
	add(m.KasminaOptions != llm.KasminaOptions{}, "options of Kasmina layers")
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
	add(c.Replay && c.Growth != nil, "replayed")
	add(c.Ranks > 0, fmt.Sprintf("%d ranks", c.Ranks))
	for _, b := range c.Beside {
		add(true, "beside: "+b)
	}
	if f := c.Fault; f != nil {
		name := "fault: " + f.Op
		if f.Resuming {
			name += " while resuming"
		}
		add(true, name)
	}
	return all
}

// plants reports whether somebody is ordered to plant a kind.
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
