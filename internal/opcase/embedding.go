package opcase

import (
	"math/rand/v2"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/op"
)

var embedding = &Op{
	Name: "Embedding",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, s := range matrices {
			cases = append(cases, embeddingCase(r, s[0], 5, s[1]))
		}
		return cases
	},
	Bench: &Bench{
		Shape: "rows, vocabulary, features",
		Small: []int{64, 20, 32}, Usual: []int{1024, 4096, 256},
		Elements: sum(product(1, 0, 2), product(1, 1, 2)), FLOPs: noFLOPs,
		Case: func(r *rand.Rand, s []int) (Case, error) {
			return embeddingCase(r, s[0], s[1], s[2]), nil
		},
	},
}

func embeddingCase(r *rand.Rand, rows, vocab, d int) Case {
	return Case{In: []Input{ids(r, rows, 0, vocab), Normal(r, vocab, d)},
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) { return op.Embedding(in[0], in[1]) },
		Want: func(in []Input) (y []float64) {
			for _, id := range in[0].IDs {
				y = append(y, in[1].Values[id*d:][:d]...)
			}
			return y
		}}
}
