package state

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
)

// Controller decides what becomes of the seeds of a network. After every epoch it is given the reports of all layers, and
// returns commands, each of which takes effect or is refused by itself. One that decides by the reports alone, as [Heuristic]
// does, goes on after a restart as if nothing had happened.
type Controller interface {
	Decide([]Report) []Command
}

// DryRun returns a controller that writes what c would do to w, a line for each command, and does nothing. Since nothing comes
// of what c decides, c decides the same again for as long as it sees the same.
func DryRun(c Controller, w io.Writer) Controller { return dryRun{c, w} }

type dryRun struct {
	Controller
	w io.Writer
}

func (d dryRun) Decide(reports []Report) []Command {
	for _, c := range d.Controller.Decide(reports) {
		fmt.Fprintf(d.w, "would do: %v\n", c)
	}
	return nil
}

// Heuristic is a controller that germinates the unhealthiest chunks, moves every blueprint on as soon as its gate opens, gives
// up those that have failed or whose gate stays shut for too long, and recycles their seeds. Make one with [NewHeuristic].
//
// A chunk is unhealthy by the largest of four ratios, if that is 1 or more:
//
//	hungry    norm of its gradient / (Hunger × median of the layer): the loss wants the chunk to change
//	dead      dead ratio / Dead
//	silent    Silence × median of the layer's variances / its variance
//	spiky     largest deviation from its mean / (Spike × its standard deviation)
//
// What it grows there follows: a hungry chunk gets the first of Capacity that the layer's slots are wide enough for, a dead one a
// Residual, which can shift it, and a silent or spiky one an AttentionGate, which can scale its features. It is grafted by
// DriftControlled where activations drift by more than Drift an epoch, by GradNormGated where the gradient is more than twice
// what makes a chunk hungry, and else by PerformanceLinked.
type Heuristic struct {
	MaxActive     int // blueprints that are alive and not fossilized, at most
	MaxParameters int // parameters in the slots of all living blueprints, at most
	PerEpoch      int // germinations in an epoch, at most
	Begin, End    int // germinations happen from epoch Begin on, and before epoch End
	Patience      int // epochs in a stage after which a blueprint is given up whose gate onward is still shut
	RampEpochs    int // epochs of a grafting that nothing speeds up or delays

	Hunger, Dead, Silence, Spike, Drift float64
	Capacity                            []blueprints.Kind // in order of preference
}

// NewHeuristic returns a controller with the given budgets, Begin 1, no End, PerEpoch a quarter of maxActive, Patience 200,
// RampEpochs 50, Hunger 1, Dead 0.5, Silence 0.1, Spike 30, Drift 0.1, and Capacity ChunkMLP, LowRank, ConvFilter. Its fields
// may be changed before it is used.
func NewHeuristic(maxActive, maxParameters int) *Heuristic {
	return &Heuristic{
		MaxActive: maxActive, MaxParameters: maxParameters, PerEpoch: max(1, maxActive/4), Begin: 1, End: math.MaxInt,
		Patience: 200, RampEpochs: 50,
		Hunger: 1, Dead: 0.5, Silence: 0.1, Spike: 30, Drift: 0.1,
		Capacity: []blueprints.Kind{blueprints.ChunkMLP, blueprints.LowRank, blueprints.ConvFilter},
	}
}

// Check returns an error that names a field which makes no sense.
func (h *Heuristic) Check() error {
	for _, f := range []struct {
		name  string
		value float64
	}{{"Hunger", h.Hunger}, {"Dead", h.Dead}, {"Silence", h.Silence}, {"Spike", h.Spike}, {"Drift", h.Drift}} {
		if !(f.value > 0) || !finite(f.value) {
			return fmt.Errorf("state.Heuristic: %w: %s is %v, want a finite number above 0", ErrArgument, f.name, f.value)
		}
	}
	var errs []error
	for _, err := range []error{inRange("MaxActive", h.MaxActive, 0, math.MaxInt), inRange("MaxParameters", h.MaxParameters, 0, math.MaxInt),
		inRange("PerEpoch", h.PerEpoch, 0, math.MaxInt), inRange("Patience", h.Patience, 1, math.MaxUint16-1),
		inRange("RampEpochs", h.RampEpochs, 1, math.MaxUint16)} {
		if err != nil {
			errs = append(errs, fmt.Errorf("state.Heuristic: %w: %w", ErrArgument, err))
		}
	}
	return errors.Join(errs...)
}

// Decide returns the commands for all layers, those on seeds that have a blueprint first.
func (h *Heuristic) Decide(reports []Report) (commands []Command) {
	active, parameters := 0, 0
	for layer := range reports {
		r := &reports[layer]
		for _, s := range r.Seeds {
			if s.Stage.alive() {
				parameters += r.SlotParameters
				if s.Stage != Fossilized {
					active++
				}
			}
			if c, due := h.next(s); due {
				c.Layer, c.Seed = layer, s.Seed
				commands = append(commands, c)
			}
		}
	}
	free := freeSlots(reports)
	for _, c := range h.candidates(reports) {
		r := &reports[c.layer]
		if active >= h.MaxActive || len(free[c.layer]) == 0 || parameters+r.SlotParameters > h.MaxParameters {
			continue
		}
		if c.rank >= h.PerEpoch {
			break
		}
		active, parameters = active+1, parameters+r.SlotParameters
		commands = append(commands, Command{Action: Germinate, Layer: c.layer, Seed: c.seed, Why: c.why,
			Request: GerminationRequest{Slot: free[c.layer][0], Kind: c.kind, Strategy: c.strategy}})
		free[c.layer] = free[c.layer][1:]
	}
	return commands
}
