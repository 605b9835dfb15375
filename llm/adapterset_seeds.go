package llm

import (
	"fmt"
	"maps"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/op"
)

// A stackedBlock identifies the stacked seeds of one kind after one block.
type stackedBlock struct {
	block int
	kind  blueprints.Kind
}

// prefix returns the prefix of the names of the stacked parameters.
func (b stackedBlock) prefix() string { return fmt.Sprintf("%sseeds.%v", blockPrefix(b.block), b.kind) }

// stackSeeds stacks the seeds of all adapters, like the low-rank adapters of a layer. All seeds of one kind after a block
// share the matrices a and b. If row r uses adapter k, they compute
//
//	y[r] = x[r] + (s[k] ⊙ f(x[r]·aᵀ))·bᵀ
//
// where f is the identity for the kind LowRank, and silu for ChunkMLP. s[k] holds the factors of adapter k's seeds, and
// zeros for the seeds of other adapters. Each row of a and each column of b belongs to one seed, and is zero outside the
// seed's chunk.
func (s *AdapterSet) stackSeeds(c Config, all *selectable) error {
	for _, i := range slices.Sorted(maps.Keys(all.seeds)) {
		ranks := map[blueprints.Kind]int{}
		for k, l := range all.seeds[i] {
			if l == nil {
				continue
			}
			for _, seed := range l.Seeds {
				if seed.Kind != blueprints.LowRank && seed.Kind != blueprints.ChunkMLP {
					return fmt.Errorf("adapter %d: after block %d, it has a seed of the kind %v, and on a GPU, texts can choose "+
						"only LowRank and ChunkMLP", k, i, seed.Kind)
				}
				ranks[seed.Kind] += len(seed.Weights.([]float32)) / 2 / (c.Dim / l.Chunks)
			}
		}

		for _, kind := range slices.Sorted(maps.Keys(ranks)) {
			rank := (ranks[kind] + setMultiple - 1) / setMultiple * setMultiple
			a, b, shares := make([]float32, rank*c.Dim), make([]float32, c.Dim*rank), make([]float32, (s.n+1)*rank)
			from := 0
			for k, l := range all.seeds[i] {
				if l == nil {
					continue
				}
				width := c.Dim / l.Chunks
				for _, seed := range l.Seeds {
					if seed.Kind != kind {
						continue
					}
					w := seed.Weights.([]float32)
					m := len(w) / 2 / width
					for j := range m {
						copy(a[(from+j)*c.Dim+seed.Chunk*width:], w[j*width:][:width])
						shares[k*rank+from+j] = float32(seed.Alpha * seed.Scale)
					}
					for row := range width {
						copy(b[(seed.Chunk*width+row)*rank+from:], w[m*width+row*m:][:m])
					}
					from += m
				}
			}

			at := stackedBlock{i, kind}
			s.seeds = append(s.seeds, at)
			s.values[at.prefix()+endingSetA] = setParam{[]int{rank, c.Dim}, a}
			s.values[at.prefix()+endingSetB] = setParam{[]int{c.Dim, rank}, b}
			s.values[at.prefix()+endingSetShares] = setParam{[]int{s.n + 1, rank}, shares}
		}
	}
	return nil
}

// stackedSeeds holds the nodes of a stackedBlock.
type stackedSeeds struct {
	a, b, shares *gorgonia.Node
	kind         blueprints.Kind
}

// addSetSeeds adds nodes for the parameters of the set's seeds.
func (b *graphBuilder) addSetSeeds(node func(name string) *gorgonia.Node) {
	b.stackedSeeds = map[int][]stackedSeeds{}
	for _, at := range b.set.seeds {
		s := stackedSeeds{node(at.prefix() + endingSetA), node(at.prefix() + endingSetB), node(at.prefix() + endingSetShares),
			at.kind}
		b.stackedSeeds[at.block] = append(b.stackedSeeds[at.block], s)
	}
}

// apply applies the seeds of each row's adapter to x.
func (s stackedSeeds) apply(x, adapters *gorgonia.Node) (*gorgonia.Node, error) {
	shares, err := op.Embedding(adapters, s.shares)
	if err != nil {
		return nil, err
	}
	h, err := op.Linear(x, s.a)
	if err != nil {
		return nil, err
	}
	if s.kind == blueprints.ChunkMLP {
		h, err = op.SiLUMul(h, shares)
	} else {
		h, err = gorgonia.HadamardProd(h, shares)
	}
	if err != nil {
		return nil, err
	}
	if h, err = op.Linear(h, s.b); err != nil {
		return nil, err
	}
	return gorgonia.Add(x, h)
}
