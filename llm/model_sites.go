package llm

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// Fits returns an error if a blueprint cannot grow at a seed on a weight or in the stream.
func (s slotStore) Fits(g state.Germination, size int) error {
	// The network calls Fits while its lattices are locked.
	if err := checkMade(s.Model); err != nil {
		return err
	}

	sites, at := s.Model.Config.Sites(), g.Layer-len(s.Model.Config.Kasmina)
	if at < 0 || at >= len(sites) {
		return fmt.Errorf("llm: %w: layer %d has no seeds at weights, in the stream or in depth",
			state.ErrArgument, g.Layer)
	}

	site := sites[at]
	if site == blueprints.Depth {
		return nil
	}

	_, err := s.Model.Config.SeedParams(Planted{Site: site, Seed: g.Seed,
		Kind: g.Kind.String(), Size: size})
	if err != nil {
		return errors.Join(state.ErrArgument, err)
	}

	return nil
}

// frozenPlanted returns what ForgetFrozen clears for a lattice at a site other than chunks, and the seeds that
// learn now.
func (s slotStore) frozenPlanted(l *state.Lattice, before []bool, known bool) (frozen []ParamRange, now []bool,
	err error) {
	var pass state.Pass
	l.Begin(&pass, false)
	now = make([]bool, len(pass.Stage))
	for i, stage := range pass.Stage {
		now[i] = stage.Learns()
	}

	site := l.Site()
	for _, p := range s.Model.Planted {
		if p.Site != site || now[p.Seed] || known && p.Seed < len(before) && !before[p.Seed] {
			continue
		}
		specs, err := s.Model.Config.SeedParams(p)
		if err != nil {
			return nil, nil, err
		}
		for _, spec := range specs {
			frozen = append(frozen, ParamRange{spec.Name, 0, s.Model.Param(spec.Name).Size()})
		}
	}

	return frozen, now, nil
}

// LayerAt returns the index in Model.Kasmina of the lattice of a site, or -1 if the site has no lattice.
// Chunks have a lattice for each entry of Config.Kasmina, and LayerAt returns the first, 0.
func (m *Model) LayerAt(site blueprints.Site) int {
	if site == blueprints.Chunk && checkMade(m) == nil && len(m.Config.Kasmina) > 0 {
		return 0
	}
	if i := slices.Index(m.Config.Sites(), site); i >= 0 && checkMade(m) == nil {
		return len(m.Config.Kasmina) + i
	}
	return -1
}
