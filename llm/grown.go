package llm

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/kasmina-go/kasmina/blueprints"
)

// maxGrown limits the number of growths of a model's stack.
const maxGrown = 1 << 10

// checkGrown returns an error unless the recorded growths can have produced the model's blocks.
func (c Config) checkGrown() error {
	if c.Depth < 0 || c.Depth > maxGrown {
		return fmt.Errorf("llm: Config.Depth is %d, want 0 to %d", c.Depth, maxGrown)
	}

	if len(c.Grown) > maxGrown {
		return fmt.Errorf("llm: Config.Grown has %d growths, want at most %d",
			len(c.Grown), maxGrown)
	}

	blocks := c.Layers
	for i := len(c.Grown) - 1; i >= 0; i-- {
		g := c.Grown[i]
		before := slices.Max(append(g.Order, blueprints.NewBlock)) + 1
		switch {
		case len(g.Order) != blocks || before < 1 || before >= blocks ||
			slices.Min(g.Order) < blueprints.NewBlock:
			return fmt.Errorf("llm: Config.Grown: growth %d arranges %d blocks from %d, "+
				"want %d from fewer", i, len(g.Order), before, blocks)
		case g.Seed < 0 || g.Seed >= c.Seeded(g.Site()) || g.Size < 1 || g.Step < 0:
			return fmt.Errorf("llm: Config.Grown: growth %d is of seed %d of site %v, size %d, at "+
				"step %d, and there are %d such seeds", i, g.Seed, g.Site(), g.Size, g.Step,
				c.Seeded(g.Site()))
		}
		blocks = before
	}

	if at := slices.Index(c.Origin().Kasmina, blueprints.NewBlock); at >= 0 {
		return fmt.Errorf("llm: Config.Kasmina names block %d, which Config.Grown lists as a new "+
			"block: new blocks have no Kasmina layer", c.Kasmina[at])
	}

	return nil
}

// Site returns the site of the growth's seed.
func (g Grown) Site() blueprints.Site {
	if g.Stream {
		return blueprints.Stream
	}
	return blueprints.Depth
}

// Grow returns the configuration after another growth. A Kasmina layer stays with the first copy of
// its block.
func (c Config) Grow(g Grown) Config {
	c = c.moved(g.Order)
	c.Blocks = reorderedBlocks(c.blocks(), g.Order)
	c.Layers = len(g.Order)
	c.Grown = append(slices.Clone(c.Grown), g)
	c.Kasmina = slices.Clone(c.Kasmina)
	for i, b := range c.Kasmina {
		c.Kasmina[i] = slices.Index(g.Order, b)
	}
	return c
}

// boundaries reports for each block whether the operator of Boundary precedes it, because it follows a
// block that came at the same place or later before a growth.
func (c Config) boundaries() []bool {
	if c.Boundary == 0 {
		return make([]bool, c.Layers)
	}

	before := make([]bool, c.Origin().Layers)
	for _, g := range c.Grown {
		after, last := make([]bool, len(g.Order)), blueprints.NewBlock
		for i, from := range g.Order {
			if from == blueprints.NewBlock {
				continue
			}
			after[i] = from <= last || before[from]
			last = from
		}
		before = after
	}

	return before
}

// SameBlocks reports whether two configurations of the same origin have the same blocks.
func (c Config) SameBlocks(d Config) bool {
	return c.Layers == d.Layers && slices.Equal(c.Kasmina, d.Kasmina) &&
		slices.Equal(c.blocks(), d.blocks()) && slices.Equal(c.Weights, d.Weights) &&
		slices.Equal(c.Streams, d.Streams) && c.Adapter.sameLayers(d.Adapter) &&
		slices.EqualFunc(c.Grown, d.Grown, func(a, b Grown) bool {
			return a.Seed == b.Seed && a.Stream == b.Stream && slices.Equal(a.Order, b.Order)
		})
}

// Origin returns the model's configuration before any growth.
func (c Config) Origin() Config {
	c.Kasmina = slices.Clone(c.Kasmina)
	all := c.blocks()
	for i := len(c.Grown) - 1; i >= 0; i-- {
		order := c.Grown[i].Order
		all = restoredBlocks(all, order)
		c = c.unmoved(order)
		for k, b := range c.Kasmina {
			if b != blueprints.NewBlock {
				c.Kasmina[k] = order[b]
			}
		}
		c.Layers = slices.Max(order) + 1
	}

	c.Grown, c.Blocks = nil, blockPattern(all)
	if c.Adapter.Growing {
		c.Adapter.Targets, c.Adapter.Ranks, c.Adapter.Alphas = nil, nil, nil
	}
	return c
}

// Source returns a parameter's name before the growth, or "" for a parameter of a new block. Copies
// of a block have the same source.
func (g Grown) Source(name string) string {
	block, rest, ok := blockOf(name)
	if !ok {
		return name
	}
	if from := g.Order[block]; from != blueprints.NewBlock {
		return blockPrefix(from) + rest
	}
	return ""
}

// firstCopy returns a parameter's name after the growth. If its block has several copies, this is the
// name in the first one.
func (g Grown) firstCopy(name string) string {
	block, rest, ok := blockOf(name)
	if !ok {
		return name
	}
	if to := slices.Index(g.Order, block); to >= 0 {
		return blockPrefix(to) + rest
	}
	return ""
}

// blockOf splits the name of a parameter of a block into the block's number and the rest.
func blockOf(name string) (block int, rest string, ok bool) {
	rest, found := strings.CutPrefix(name, blocksPrefix)
	number, rest, dot := strings.Cut(rest, ".")
	block, err := strconv.Atoi(number)
	return block, rest, found && dot && err == nil
}
