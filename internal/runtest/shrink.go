package runtest

import (
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/llm"
)

// Shrink simplifies a case as far as the function fails still returns true. It stops after the given
// time.
func Shrink(c Case, fails func(Case) bool, patience time.Duration) Case {
	end := time.Now().Add(patience)
	for {
		smaller := false
		for _, try := range simpler(c) {
			if time.Now().After(end) {
				return c
			}
			if fails(try) {
				c, smaller = try, true
				break
			}
		}
		if !smaller {
			return c
		}
	}
}

// simpler returns cases that lack one element of c, with the most complex elements removed first.
func simpler(c Case) (all []Case) {
	add := func(change func(*Case)) {
		next := c.clone()
		change(&next)
		if next.String() != c.String() {
			all = append(all, next)
		}
	}

	add(func(c *Case) { c.Fault = nil })
	if c.Fault != nil {
		add(func(c *Case) { c.Fault.Lasting = false })
	}
	add(func(c *Case) { c.Resumes = nil })
	for i := range c.Resumes {
		add(func(c *Case) { c.Resumes = slices.Delete(c.Resumes, i, i+1) })
	}

	add(func(c *Case) { c.Ranks = 0 })
	add(func(c *Case) { c.Replay = false })
	add(func(c *Case) { c.Ranks = min(c.Ranks, 2) })
	add(func(c *Case) { c.Callbacks = nil })
	for i := range c.Callbacks {
		add(func(c *Case) { c.Callbacks = slices.Delete(c.Callbacks, i, i+1) })
	}

	add(func(c *Case) { c.Checkpoint = nil })
	if c.Checkpoint != nil {
		add(func(c *Case) { c.Checkpoint.Background = false })
		add(func(c *Case) { c.Checkpoint.Apart = false })
		add(func(c *Case) { c.Checkpoint.Parts = false })
		add(func(c *Case) { c.Checkpoint.Every = 0 })
	}

	add(func(c *Case) { c.Growth = nil })
	add(func(c *Case) { c.Orders = nil })
	if c.Growth != nil {
		add(func(c *Case) { c.Growth.Validation = false })
		add(func(c *Case) { c.Growth.Every = 0 })
		add(func(c *Case) { c.Growth.Governed = false })
		add(func(c *Case) { c.Growth.Rewarm = 0 })
		add(func(c *Case) { c.Growth.Fresh = false })
		for i := range c.Growth.Script {
			add(func(c *Case) { c.Growth.Script = slices.Delete(c.Growth.Script, i, i+1) })
		}
	}

	for i := range c.Orders {
		add(func(c *Case) { c.Orders = slices.Delete(c.Orders, i, i+1) })
	}

	add(func(c *Case) { c.Parts.EMA = 0 })
	add(func(c *Case) { c.Parts.Patience = 0 })
	add(func(c *Case) { c.Parts.Best = false })
	add(func(c *Case) { c.Parts.Retention = nil })
	add(func(c *Case) { c.Parts.RankGrowth = nil })
	add(func(c *Case) { c.Parts.RankGrowth, c.Tuning = nil, Tuning{} })
	add(func(c *Case) { c.Tuning.Base = "" })
	add(func(c *Case) { c.Tuning.OmitBase = false })
	if a := c.Tuning.Adapter; len(a.Targets) > 1 {
		add(func(c *Case) { c.Tuning.Adapter.Targets = a.Targets[:1] })
		add(func(c *Case) { c.Tuning.Adapter.Targets = a.Targets[1:] })
	}
	if a := c.Tuning.Adapter; !a.IsZero() {
		add(func(c *Case) {
			c.Tuning.Adapter = llm.LoRA{Rank: a.Rank, Alpha: a.Alpha, Targets: a.Targets, Growing: a.Growing}
		})
		add(func(c *Case) { c.Tuning.Adapter.Rank = 1 })
	}

	add(func(c *Case) { c.Text.Packed = false })
	add(func(c *Case) { c.Text.Pairs = nil })
	for i := range c.Resumes {
		add(func(c *Case) { c.Resumes[i].Lenient = false })
	}

	for i, o := range c.Orders {
		if o.Via != "" {
			add(func(c *Case) { c.Orders[i].Via = "" })
		}
	}

	add(func(c *Case) { c.Lattices = Lattices{} })
	add(func(c *Case) { c.Kasmina = llm.KasminaOptions{} })
	add(func(c *Case) { c.Model.Weights, c.Train.Frozen, c.Train.Directed = nil, false, false })
	add(func(c *Case) { c.Train.Frozen, c.Train.Directed = false, false })
	add(func(c *Case) { c.Train.Directed = false })
	add(func(c *Case) { c.Train.Merge = false })
	for _, change := range []func(*llm.Config){
		func(c *llm.Config) { c.Kasmina, c.Seeds, c.SlotWidth = nil, 0, 0 },
		func(c *llm.Config) { c.Weights = nil },
		func(c *llm.Config) { c.Streams = nil },
		func(c *llm.Config) { c.Depth, c.Boundary = 0, 0 },
		func(c *llm.Config) { c.Boundary = 0 },
		func(c *llm.Config) { c.Traits = llm.Traits{} },
		func(c *llm.Config) { c.Documents, c.ZeroOutputs = false, false },
		func(c *llm.Config) { c.Untied = false },
		func(c *llm.Config) { c.LoRAAlpha = 0 },
		func(c *llm.Config) { c.KVHeads = 0 },
		func(c *llm.Config) { c.Dim = 8 },
		func(c *llm.Config) { c.Layers = 1 },
		func(c *llm.Config) { c.Kasmina = c.Kasmina[:min(1, len(c.Kasmina))] },
		func(c *llm.Config) { c.Streams = c.Streams[:min(1, len(c.Streams))] },
		func(c *llm.Config) { c.Weights = c.Weights[:min(1, len(c.Weights))] },
		func(c *llm.Config) { c.Depth = min(1, c.Depth) },
	} {
		add(func(c *Case) { change(&c.Model) })
	}

	add(func(c *Case) { c.Float64 = false })
	o := c.Optimizer
	add(func(c *Case) { c.Optimizer.Muon, c.Optimizer.Lion, c.Optimizer.Bits8 = false, false, false })
	add(func(c *Case) { c.Optimizer = Optimizer{Muon: o.Muon, Lion: o.Lion, Bits8: o.Bits8, LR: o.LR} })
	add(func(c *Case) { c.Text.Rare = false })
	add(func(c *Case) { c.Text.Tokens = 1000 })
	t := c.Train
	for _, plain := range []Train{
		{Steps: t.Steps, Batch: t.Batch, Accumulate: t.Accumulate, Clip: t.Clip, Epoch: t.Epoch},
		{Steps: t.Steps, Batch: t.Batch, Epoch: t.Epoch},
		{Steps: t.Steps, Batch: 1, Epoch: t.Epoch},
	} {
		add(func(c *Case) { c.Train = plain })
	}

	for _, steps := range []int{t.Steps / 2, t.Steps - 1} {
		if steps > 0 {
			add(func(c *Case) { c.Train.Steps = steps })
		}
	}

	return all
}
