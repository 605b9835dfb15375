package llm

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/parallel"
)

// maxGrown bounds how often a model's stack can have grown.
const maxGrown = 1 << 10

// checkGrown returns an error unless the blocks can have become what they are as Grown says.
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
			return fmt.Errorf("llm: Config.Grown: growth %d has an order of %d blocks from %d, "+
				"want %d from fewer", i, len(g.Order), before, blocks)
		case g.Seed < 0 || g.Seed >= c.Depth || g.Size < 1 || g.Step < 0:
			return fmt.Errorf("llm: Config.Grown: growth %d is of seed %d, size %d, at step %d, "+
				"and Depth is %d", i, g.Seed, g.Size, g.Step, c.Depth)
		}
		blocks = before
	}
	if at := slices.Index(c.origin().Kasmina, blueprints.NewBlock); at >= 0 {
		return fmt.Errorf("llm: Config.Kasmina names block %d, which Config.Grown has as a new "+
			"one, behind which no Kasmina layer stands", c.Kasmina[at])
	}
	return nil
}

// grow returns the configuration with a growth more. A Kasmina layer stays behind the first copy of
// its block.
func (c Config) grow(g Grown) Config {
	c.Blocks = reordered(c.blocks(), g.Order)
	c.Layers = len(g.Order)
	c.Grown = append(slices.Clone(c.Grown), g)
	c.Kasmina = slices.Clone(c.Kasmina)
	for i, b := range c.Kasmina {
		c.Kasmina[i] = slices.Index(g.Order, b)
	}
	return c
}

// numParams returns how many tensors the parameters are.
func (c Config) numParams() (n int) {
	for range c.params() {
		n++
	}
	return n
}

// sameBlocks reports whether two configurations of one origin have the same blocks.
func (c Config) sameBlocks(d Config) bool {
	return c.Layers == d.Layers && slices.Equal(c.Kasmina, d.Kasmina) && slices.Equal(c.blocks(),
		d.blocks()) && slices.EqualFunc(c.Grown,
		d.Grown, func(a, b Grown) bool {
			return a.Seed == b.Seed && slices.Equal(a.Order, b.Order)
		})
}

// origin returns the configuration that the model began with.
func (c Config) origin() Config {
	c.Kasmina = slices.Clone(c.Kasmina)
	all := c.blocks()
	for i := len(c.Grown) - 1; i >= 0; i-- {
		order := c.Grown[i].Order
		all = restored(all, order)
		for k, b := range c.Kasmina {
			if b != blueprints.NewBlock {
				c.Kasmina[k] = order[b]
			}
		}
		c.Layers = slices.Max(order) + 1
	}
	c.Grown, c.Blocks = nil, pattern(all)
	return c
}

// source returns the parameter, before a growth, that a parameter has its values from, or "" for
// one that starts anew.
func (g Grown) source(name string) string {
	rest, found := strings.CutPrefix(name, blocksPrefix)
	number, rest, dot := strings.Cut(rest, ".")
	block, err := strconv.Atoi(number)
	if !found || !dot || err != nil {
		return name
	}
	if from := g.Order[block]; from != blueprints.NewBlock {
		return blockPrefix(from) + rest
	}
	return ""
}

// grown returns the parameters of a model that grows from c to next. Those that the model keeps
// share their memory with before, unless they are copied; those that are new start as NewModel has
// them, but for what writes to the residual stream, which is 0: so a new block is the identity.
// That is the last norm where there is one, since the gradient of a norm of 0 is without bounds.
func (m *Model) grown(g Grown, next Config) []Param {
	var params []Param
	var copies []int
	taken := map[string]bool{}
	for p := range next.params() {
		from := g.source(p.name)
		own := Param{Name: p.name}
		switch {
		case from == "":
			own.Value = newParam(m.Dtype(), p.shape, p.fresh(uint64(g.Step), len(params)))
		case taken[from]:
			own.Value = m.Params[m.byName[from]].Value
			copies = append(copies, len(params))
		default:
			own.Value = m.Params[m.byName[from]].Value
		}
		taken[from] = true
		params = append(params, own)
	}
	parallel.Each(len(copies), func(i int) {
		p := &params[copies[i]]
		p.Value = p.Value.Clone().(*tensor.Dense)
	})
	return params
}

// fresh returns the numbers that a parameter of a new block starts with.
func (p paramSpec) fresh(step uint64, number int) func() float64 {
	if p.closed != nil {
		return func() float64 { return *p.closed }
	}
	r := rand.New(rand.NewPCG(step, uint64(number)))
	return func() float64 { return p.start + p.deviation*r.NormFloat64() }
}

// become gives a model another configuration and its parameters.
func (m *Model) become(c Config, params []Param) {
	m.Config, m.Params, m.byName = c, params, make(map[string]int, len(params))
	for i, p := range params {
		m.byName[p.Name] = i
	}
	m.shape++
	m.changes.Add(1)
}
