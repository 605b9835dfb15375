package llm

import (
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/jsonfloat"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/state"
)

// A snapshotState holds the parts of a snapshot that are not tensors.
type snapshotState struct {
	Seeds     []state.Address `json:"seeds"`
	Config    Config          `json:"config"`
	Planted   []Planted       `json:"planted,omitempty"`
	LossScale *LossScale      `json:"loss_scale,omitempty"`
}

// A twinState holds the parts of a twin that are not tensors.
type twinState struct {
	Trial     []state.Address  `json:"trial"`
	Loader    data.LoaderState `json:"loader"`
	LossScale *LossScale       `json:"loss_scale,omitempty"`
	Lost      bool             `json:"lost,omitempty"`
	Sum       jsonfloat.Float  `json:"sum,omitempty"`
}

// Names of growth's values and tensors in a checkpoint.
const (
	growthName     = "growth"
	snapshotsValue = "snapshots"
	twinValue      = "twin"
	twinPrefix     = "twin."
	ratesName      = twinPrefix + "rates" // learning rates of the twin's outstanding steps
)

// snapshotPrefix returns the prefix of the names of a snapshot's tensors.
func snapshotPrefix(i int) string { return fmt.Sprintf("snapshot.%d.", i) }

// Name implements [Part].
func (g *growth) Name() string { return growthName }

// Save implements [Part]. Nothing is copied, because snapshots and twins are never modified in place.
func (g *growth) Save(w *CheckpointWriter) error {
	var states []snapshotState
	for i, s := range g.snapshots {
		states = append(states, snapshotState{Seeds: s.seeds, Config: s.Config, Planted: s.Planted, LossScale: s.scale})
		if err := s.save(w, snapshotPrefix(i)); err != nil {
			return err
		}
	}

	if len(states) > 0 {
		w.Value(snapshotsValue, states)
	}

	t := g.twin
	if t == nil {
		return nil
	}

	w.Value(twinValue, twinState{Trial: slices.Clone(t.trial), Loader: t.loader, LossScale: t.scale,
		Lost: t.lost, Sum: jsonfloat.Float(t.sum)})
	if err := t.save(w, twinPrefix); err != nil {
		return err
	}

	if len(t.rates) == 0 {
		return nil
	}

	return w.Tensor(ratesName, []int{len(t.rates)}, slices.Clone(t.rates))
}

// save adds the tensors of a branch to a checkpoint, with a prefix to their names.
func (b *branch) save(w *CheckpointWriter, prefix string) error {
	for _, p := range b.Params {
		if err := w.Tensor(prefix+p.Name, p.Value.Shape(), p.Value.Data()); err != nil {
			return err
		}
	}

	for _, m := range b.Moments {
		if err := w.Tensor(prefix+modelfile.OptimizerPrefix+m.Name, m.Shape, m.Data); err != nil {
			return err
		}
	}

	return nil
}

// Load implements [Part].
//
// Grow may still be called after Resume. Unless it has been, Run compares how the trainer and the resumed run
// grow.
func (g *growth) Load(r *CheckpointReader) (install func(), err error) {
	grew := r.run.Settings.Growth
	if g.options != nil || r.run.options.newSettings {
		r.differences = append(r.differences, g.settings().Differences(grew)...)
	}
	if r.run.options.newSettings {
		grew = nil
	}

	var loaded growthState
	if loaded.snapshots, err = g.loadSnapshots(r); err != nil {
		return nil, err
	}
	if loaded.twin, err = g.loadTwin(r); err != nil {
		return nil, err
	}

	r.run.growing = loaded
	return func() { g.growthState, g.reshaped, g.grew = loaded, nil, grew }, nil
}

func (g *growth) loadSnapshots(r *CheckpointReader) (all snapshots, err error) {
	if _, ok := r.values[snapshotsValue]; !ok {
		return nil, nil
	}

	var states []snapshotState
	if err := r.Value(snapshotsValue, &states); err != nil {
		return nil, err
	}

	for i, s := range states {
		if err := g.checkSnapshot(s, r.run.model.Config); err != nil {
			return nil, err
		}
		b, err := g.loadBranch(r, layout{s.Config, s.Planted}, snapshotPrefix(i), s.LossScale)
		if err != nil {
			return nil, err
		}
		all = append(all, snapshot{branch: b, seeds: s.Seeds})
	}

	return all, nil
}

// checkSnapshot returns an error unless a snapshot can belong to the trainer's model. now is the model's
// configuration in the checkpoint.
func (g *growth) checkSnapshot(s snapshotState, now Config) error {
	if err := (layout{s.Config, s.Planted}).Check(); err != nil {
		return fmt.Errorf("the snapshot from before the model grew: %w", err)
	}

	if have, want := s.Config.Origin(), g.t.Model.Config.Origin(); !have.SameBlocks(want) {
		return fmt.Errorf("%w: a snapshot belongs to another model",
			ErrArchitecture)
	}

	if len(s.Seeds) == 0 {
		return fmt.Errorf("%w: a snapshot belongs to no seed", ErrArchitecture)
	}

	sameGrowth := func(a, b Grown) bool {
		return a.Seed == b.Seed && a.Stream == b.Stream && slices.Equal(a.Order, b.Order)
	}
	grown := len(s.Config.Grown)
	if len(now.Grown) < grown || !slices.EqualFunc(now.Grown[:grown], s.Config.Grown, sameGrowth) {
		return fmt.Errorf("%w: the snapshot from before seed %d grew contains %d growths, "+
			"which are not the first growths of the model", ErrArchitecture,
			s.Seeds[0].Seed, grown)
	}

	for _, at := range s.Seeds {
		l := g.t.Model.Kasmina.Lattice(at.Layer)
		if l == nil || l.Site() == blueprints.Chunk || at.Seed < 0 || at.Seed >= l.Seeds() {
			return fmt.Errorf("%w: a snapshot is from before seed %d grew, and layer %d has no "+
				"such seed that can grow", ErrArchitecture, at.Seed, at.Layer)
		}
	}

	return nil
}

// loadTwin reads the twin of the model. A run that continues with other data drops the twin, whose
// outstanding steps would need the earlier data.
func (g *growth) loadTwin(r *CheckpointReader) (*twin, error) {
	if _, ok := r.values[twinValue]; !ok {
		return nil, nil
	}

	var s twinState
	if err := r.Value(twinValue, &s); err != nil {
		return nil, err
	}

	if loader := r.run.Loader; s.Loader.Data != loader.Data || s.Loader.Seed != loader.Seed {
		return nil, nil
	}

	for _, seed := range s.Trial {
		l := g.t.Model.Kasmina.Lattice(seed.Layer)
		if l == nil || seed.Seed < 0 || seed.Seed >= l.Seeds() {
			return nil, fmt.Errorf("%w: seed %d of layer %d is on trial, and the model has no such seed",
				ErrArchitecture, seed.Seed, seed.Layer)
		}
	}

	w := &twin{trial: s.Trial, loader: s.Loader, lost: s.Lost, sum: float64(s.Sum)}
	if w.lost {
		return w, nil
	}

	var err error
	if w.branch, err = g.loadBranch(r, r.run.model.layout, twinPrefix, s.LossScale); err != nil {
		return nil, err
	}

	if !slices.Contains(r.Tensors(), ratesName) {
		return w, nil
	}

	shape, rates, err := r.Tensor(ratesName)
	if err != nil {
		return nil, err
	}

	if w.rates, _ = rates.([]float64); w.rates == nil || len(w.rates) > r.run.Step {
		return nil, fmt.Errorf("the outstanding steps of the model's twin have shape %v, but the run has made only %d",
			shape, r.run.Step)
	}

	if !isFinite(w.rates) {
		return nil, fmt.Errorf("the learning rates of the model's twin are not finite")
	}

	return w, nil
}

// loadBranch reads a branch of a model with layout l.
func (g *growth) loadBranch(r *CheckpointReader, l layout, prefix string, scale *LossScale) (b branch,
	err error) {
	prefix = modelfile.PartPrefix + growthName + "." + prefix
	b.scale, b.layout = scale, l
	if b.Params, err = paramsIn(r.ctx, g.t.Model, r.file, l, prefix, omitsNothing); err != nil {
		return b, err
	}
	b.Moments, err = momentsIn(r.ctx, r.file, prefix+modelfile.OptimizerPrefix)
	return b, err
}
