package store

import (
	"strconv"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// place returns the location of a seed, or "" if its layer and number suffice.
func place(layers []llm.Lattice, layer, seed int) string {
	if layer < 0 || layer >= len(layers) || seed < 0 || seed >= len(layers[layer].Places) {
		return ""
	}
	return layers[layer].Places[seed]
}

// picture returns the layers for a picture of the lattices.
func picture(reports []state.Report, layers []llm.Lattice) []api.Layer {
	all := make([]api.Layer, len(reports))
	for i, r := range reports {
		n := len(r.Seeds)
		l := api.Layer{Name: "layer " + strconv.Itoa(i), Site: r.Site.String(), Slots: r.Slots,
			Stage: make([]byte, n),
			Alpha: make([]byte, n), Health: make([]byte, n), Kind: make([]byte, n)}
		if r.Site == blueprints.Chunk && l.Slots == 0 { // unknown
			l.Slots = n + 1
		}
		if i < len(layers) {
			l.Name, l.Group = layers[i].Name, layers[i].Group
		}
		for k := range r.Seeds {
			s := &r.Seeds[k]
			l.Stage[k], l.Kind[k] = byte(s.Stage), byte(s.Kind)
			l.Alpha[k], l.Health[k] = share(s.Alpha), health(s)
		}
		all[i] = l
	}
	return all
}

// share maps a number from 0 to 1 to a byte.
func share(x float64) byte {
	if !(x > 0) {
		return 0
	}
	return byte(min(x, 1)*255 + 0.5)
}

// health returns the fraction of live features as a byte, or 0 if NaN or Inf was encountered. An
// unmeasured seed counts as healthy.
func health(s *state.SeedReport) byte {
	if s.NonFiniteX+s.NonFiniteG > 0 {
		return 0
	}
	return share(1 - s.Health.DeadRatio)
}

// stages counts seeds by the names of their stages.
func stages(reports []state.Report) (counts map[string]int) {
	for _, r := range reports {
		for i := range r.Seeds {
			if counts == nil {
				counts = map[string]int{}
			}
			counts[r.Seeds[i].Stage.String()]++
		}
	}
	return counts
}

// seed converts the report of a seed.
func seed(r *state.Report, layer, number int) api.Seed {
	s := &r.Seeds[number]
	a := api.Seed{Layer: layer, Seed: number, Site: r.Site.String(), Stage: s.Stage.String(),
		Epochs: s.EpochsInStage, Slot: s.Slot, Size: s.Size, Alpha: api.Float(s.Alpha),
		Performance: api.Float(s.Performance), Stability: api.Float(s.Stability),
		Compared: s.Delta != 0 || s.Improvement != 0 || s.Stability != 0,
		Delta:    api.Float(s.Delta), Improvement: api.Float(s.Improvement),
		CanAdvance: s.CanAdvance, CanCull: s.CanCull, CanRecycle: s.CanRecycle,
		Drift: api.Float(s.Drift), Variance: api.Float(s.Health.Variance),
		Mean: api.Float(s.Health.Mean), Min: api.Float(s.Health.Min), Max: api.Float(s.Health.Max),
		DeadRatio: api.Float(s.Health.DeadRatio), SNR: api.Float(s.Health.SNR),
		RampOver: s.RampFinished, LastUpdate: s.LastUpdate, GradNorm: api.Float(s.Gradient.Norm),
		GradVar: api.Float(s.Gradient.Variance), GradMax: api.Float(s.Gradient.Max),
		NonFinite: s.NonFiniteX + s.NonFiniteG,
		Clips:     s.Clips}

	if s.Stage != state.Dormant {
		a.Kind = s.Kind.String()
	}
	for to := state.Dormant; to <= state.RolledBack; to++ {
		if s.Stage.CanBecome(to) {
			a.Next = append(a.Next, to.String())
		}
	}
	return a
}

// kinds returns the names of the blueprints that may grow at a site.
func kinds(site blueprints.Site) (names []string) {
	for _, k := range blueprints.KindsAt(site) {
		names = append(names, k.String())
	}
	return names
}
