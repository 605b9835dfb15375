package state

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state/graft"
)

// commandJSON is a command as files have it: with names in the place of numbers.
type commandJSON struct {
	Action   string       `json:"action"`
	Layer    int          `json:"layer"`
	Seed     int          `json:"seed"`
	To       string       `json:"to,omitempty"`
	Slot     int          `json:"slot,omitempty"`
	Kind     string       `json:"kind,omitempty"`
	Size     int          `json:"size,omitempty"`
	Strategy *graft.Saved `json:"strategy,omitempty"`
	Alpha    float64      `json:"alpha,omitempty"`
	Weights  []float64    `json:"weights,omitempty"`
	Scale    float64      `json:"scale,omitempty"`
	Why      string       `json:"why,omitempty"`
}

// MarshalJSON returns the command with the names of its action, stage, kind and strategy.
// Parameters that are not finite, or a strategy that cannot be stored, are an error.
func (c Command) MarshalJSON() ([]byte, error) {
	j := commandJSON{Action: c.Action.String(), Layer: c.Layer, Seed: c.Seed, Why: c.Why}
	switch c.Action {
	case Germinate:
		j.Slot, j.Kind, j.Size = c.Request.Slot, c.Request.Kind.String(), c.Request.Size
		if c.Request.Strategy != nil {
			e, err := graft.NewEntry(c.Request.Strategy)
			if err != nil {
				return nil, err
			}
			j.Strategy = &e.Saved
		}
	case Move:
		j.To = c.To.String()
	case SetAlpha:
		j.Alpha = c.Alpha
	case Load:
		j.Kind, j.Weights, j.Scale = c.Kind.String(), c.Params.Weights, c.Params.Scale
	}
	return json.Marshal(j)
}

// UnmarshalJSON is the inverse of MarshalJSON. Kinds and strategies are found by their names. An
// action, a stage or a field that is not known is an error.
func (c *Command) UnmarshalJSON(text []byte) error {
	var j commandJSON
	if err := json.Unmarshal(text, &j); err != nil {
		return err
	}
	action := slices.Index(actionNames[:], j.Action)
	if action < 1 {
		return fmt.Errorf("state: %w: the action is %.40q, want one of %q", ErrArgument, j.Action,
			actionNames[1:])
	}
	if j.Layer < 0 || j.Seed < 0 || j.Layer > math.MaxInt32 || j.Seed > math.MaxInt32 {
		return fmt.Errorf("state: %w: layer %d, seed %d, want numbers from 0",
			ErrArgument, j.Layer, j.Seed)
	}
	read := Command{Action: Action(action), Layer: j.Layer, Seed: j.Seed,
		Alpha: j.Alpha, Why: j.Why}
	var err error
	switch read.Action {
	case Germinate:
		read.Request = GerminationRequest{Slot: j.Slot, Size: j.Size}
		if read.Request.Kind, err = kindNamed(j.Kind); err == nil && j.Strategy != nil {
			var e graft.Entry
			e, err = j.Strategy.Load()
			read.Request.Strategy = e.Strategy
		}
	case Move:
		to := slices.Index(stageNames[:], j.To)
		if to < 0 {
			err = fmt.Errorf("state: %w: the stage is %.40q, want one of %q",
				ErrArgument, j.To, stageNames)
		}
		read.To = Stage(max(to, 0))
	case Load:
		read.Kind, err = kindNamed(j.Kind)
		read.Params = SlotParams{Weights: j.Weights, Scale: j.Scale}
	}
	if err == nil {
		*c = read
	}
	return err
}

func kindNamed(name string) (blueprints.Kind, error) {
	k, ok := blueprints.ByName(name)
	if !ok {
		return 0, fmt.Errorf("state: %w: %w %.40q", ErrArgument, blueprints.ErrUnknownKind, name)
	}
	return k, nil
}
