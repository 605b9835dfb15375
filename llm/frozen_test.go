package llm

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// withoutDecay is the optimisers that move parameters by gradients and what they remember of these alone.
var withoutDecay = map[string]func() (optim.Optimizer, error){
	"adamw": func() (optim.Optimizer, error) { return optim.NewAdamW(optim.WithLR(0.01), optim.WithWeightDecay(0)) },
	"muon": func() (optim.Optimizer, error) {
		return optim.NewMuon(optim.WithLR(0.01), optim.WithWeightDecay(0), optim.WithAdamW(optim.WithLR(0.01), optim.WithWeightDecay(0)))
	},
}

// TestFrozenSlots wants a slot to keep its bits from the step on at which its last seed ceases to learn, however it does: no
// momentum moves it. A run that is resumed from just before goes on with the same bits.
func TestFrozenSlots(t *testing.T) {
	const layer, seed, slot, frozenAt, steps = 1, 1, 1, 5, 12
	for name, optimizer := range withoutDecay {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "run.safetensors")
			var seen []state.SlotParams
			run := func(tr *Trainer) *Trainer {
				tr.On(func(e Event) error {
					if e.Kind != StepEnd {
						return nil
					}
					p, err := slots{tr.Model}.Read(layer, slot)
					seen = append(seen, p)
					if e.Step == frozenAt { // behind the network's back
						err = errors.Join(err, tr.Model.Kasmina.Lattice(layer).Transition(seed, state.Culled), tr.Save(path))
					}
					return err
				})
				if err := tr.Run(context.Background()); err != nil {
					t.Fatal(err)
				}
				return tr
			}
			straight := run(newTrainer(t, trainerOptions{config: tiny(), steps: steps, optimizer: optimizer}))
			for i, p := range seen[1:] {
				if step := i + 2; same(p, seen[i]) != (step > frozenAt) {
					t.Errorf("step %d: the slot is %v after %v", step, p, seen[i])
				}
			}
			resumed := newTrainer(t, trainerOptions{config: tiny(), steps: steps, optimizer: optimizer})
			if err := resumed.Resume(t.Context(), path); err != nil {
				t.Fatal(err)
			}
			checkSame(t, straight, run(resumed))
		})
	}
}

// TestNewBlueprintWithoutMomentum wants nothing to be remembered of a slot that another blueprint takes over.
func TestNewBlueprintWithoutMomentum(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 4})
	if err := tr.Run(context.Background()); err != nil {
		t.Fatal(err)
	}
	width := tr.Model.Config.slotWidth()
	// live counts what is remembered of slot 1 of a layer.
	live := func(layer int) (n int) {
		for _, s := range tr.Optimizer.State() {
			x, ok := s.Data.([]float32)
			p := blockPrefix(tr.Model.Config.Kasmina[layer])
			switch {
			case !ok:
				continue
			case strings.HasPrefix(s.Name, p+kasminaWeights):
				x = x[width : 2*width]
			case strings.HasPrefix(s.Name, p+kasminaScales):
				x = x[1:2]
			default:
				continue
			}
			for _, v := range x {
				if v != 0 {
					n++
				}
			}
		}
		return n
	}
	if live(0) == 0 || live(1) == 0 {
		t.Fatal("nothing is remembered of a slot that learns")
	}
	n := tr.Model.Kasmina
	err := n.Do(state.Command{Action: state.Move, Layer: 1, Seed: 1, To: state.Culled},
		state.Command{Action: state.Germinate, Layer: 1, Seed: 0, Request: state.GerminationRequest{Slot: 1, Kind: blueprints.ConvFilter}},
		state.Command{Action: state.Move, Layer: 1, Seed: 0, To: state.Training})
	if err != nil {
		t.Fatal(err)
	}
	if live(1) != 0 || live(0) == 0 {
		t.Errorf("of the new blueprint's slot %d numbers are remembered, of the other layer's %d", live(1), live(0))
	}
}
