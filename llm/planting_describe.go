package llm

import (
	"fmt"
	"strings"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// describePlanting describes changes to the blueprints at weights and in the stream. siteOf returns the
// site of a seed's lattice.
func describePlanting(planted []Planted, gone, merged []state.Address,
	siteOf func(state.Address) blueprints.Site) string {
	var all []string
	const most = 4 // number of seeds to name individually
	for i, q := range planted {
		if i == most {
			all = append(all, fmt.Sprintf("%d more planted", len(planted)-most))
			break
		}
		what := fmt.Sprintf("%s of size %d planted at seed %d of site %v", q.Kind, q.Size, q.Seed,
			q.Site)
		if kind, ok := blueprints.ByName(q.Kind); ok && !blueprints.Mergeable(kind) {
			what += " (no block computes it, so it can never be merged)"
		}
		all = append(all, what)
	}

	list := func(what string, seeds []state.Address) {
		for i, at := range seeds {
			if i == most {
				all = append(all, fmt.Sprintf("%d more %s", len(seeds)-most, what))
				break
			}
			all = append(all, fmt.Sprintf("seed %d of site %v %s", at.Seed, siteOf(at), what))
		}
	}

	list("removed", gone)
	list("merged into the model", merged)
	return strings.Join(all, "; ")
}
