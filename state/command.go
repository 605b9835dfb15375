package state

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/enum"
	"github.com/kasmina-go/kasmina/state/graft"
	"github.com/kasmina-go/kasmina/state/lifecycle"
	"github.com/kasmina-go/kasmina/state/telemetry"
)

// Action is the type of a [Command].
type Action uint8

// The actions of commands.
const (
	Germinate Action = iota + 1 // RequestGermination with Command.Request
	Move                        // Transition to Command.To
	Recycle                     // Lattice.Recycle
	SetAlpha                    // Lattice.SetAlpha to Command.Alpha
	// Quarantine resets the seed if it does not match its checksum, as Lattice.Quarantine does.
	Quarantine
	// Load overwrites the slot of a living seed of kind Command.Kind with Command.Params.
	Load
	// Measure replaces the telemetry settings of the whole layer with Command.Telemetry, as
	// Lattice.SetTelemetry does. Command.Seed must be 0.
	Measure
)

var actionNames = [...]string{Germinate: "Germinate", Move: "Move", Recycle: "Recycle",
	SetAlpha: "SetAlpha", Quarantine: "Quarantine",
	Load: "Load", Measure: "Measure"}

// String returns the action's name.
func (a Action) String() string { return enum.Name(a, "Action", actionNames[:]) }

// Command is an instruction to change one seed of a [Network] or the telemetry of a layer. The
// comment on a field names the actions that read it.
type Command struct {
	Action  Action
	Layer   int
	Seed    int
	Request GerminationRequest // Germinate
	To      Stage              // Move
	Alpha   float64            // SetAlpha
	Kind    blueprints.Kind    // Load
	Params  SlotParams         // Load: the weights used by the kind, and the scale
	Why     string             // human-readable reason; may be empty

	Telemetry Telemetry // Measure
}

// String describes the command in one line.
func (c Command) String() string {
	s := fmt.Sprintf("layer %d, seed %d: ", c.Layer, c.Seed)
	switch c.Action {
	case Germinate:
		strategy := c.Request.Strategy
		if strategy == nil {
			strategy = defaultStrategy
		}
		if c.Request.Size > 0 {
			s += fmt.Sprintf("germinate %v of size %d", c.Request.Kind, c.Request.Size)
			break
		}
		s += fmt.Sprintf("germinate %v in slot %d, to be grafted by %s", c.Request.Kind,
			c.Request.Slot, strategy.Name())
	case Move:
		s += fmt.Sprintf("move to %v", c.To)
	case Recycle:
		s += "recycle"
	case SetAlpha:
		s += fmt.Sprintf("set α to %.3g", c.Alpha)
	case Load:
		s += fmt.Sprintf("load the parameters of a %v", c.Kind)
	case Quarantine:
		s += "reset if it is corrupt"
	case Measure:
		s = fmt.Sprintf("layer %d: measure %v", c.Layer, c.Telemetry)
	default:
		s += c.Action.String()
	}

	if c.Why != "" {
		s += ", because " + c.Why
	}
	return s
}

// Controller decides what happens to the seeds of a network.
//
// After every epoch, Decide receives the reports of all layers and returns commands. The index of a
// report is the Layer of the commands for its seeds. The commands are carried out in order, and a
// rejected command does not affect the others. By default, a trainer stops the run if a command is
// rejected; see the field Refused of llm.Growth.
//
// A controller may also implement [CheckingController], [CostLearner], [SizeLearner], [PlanLearner],
// [Affording], [Planner], [Narrator], [Reviewer] and [GradientListener].
//
// A controller whose decisions depend only on the reports, like those in package control, continues
// after a restart as if the run had not been interrupted.
type Controller interface {
	Decide([]Report) []Command
}

// do executes one command and adds its reason to the resulting StageChanged events. The caller holds
// the lock.
func (l *Lattice) do(c Command) error {
	before := len(l.pending)
	defer func() {
		for i := min(before, len(l.pending)); i < len(l.pending); i++ {
			if e := &l.pending[i]; e.Kind == StageChanged {
				e.Reason = c.Why
			}
		}
	}()

	switch c.Action {
	case Germinate:
		return l.germinate(c.Seed, c.Request)
	case Move:
		return l.transition(c.Seed, c.To)
	case Recycle:
		return l.recycle(c.Seed)
	case SetAlpha:
		return l.setAlpha(c.Seed, c.Alpha)
	case Quarantine:
		if err := l.checkSeed("Quarantine", c.Seed); err != nil {
			return err
		}
		l.quarantine(l.sums.Faults(c.Seed, c.Seed+1, l.seeds.crc))
		return nil
	case Load:
		return l.checkLoad(c.Seed, c.Kind, c.Params)
	case Measure:
		if c.Seed != 0 {
			return fmt.Errorf("state.Measure: %w: the seed is %d, want 0: the setting "+
				"applies to the whole layer", ErrArgument, c.Seed)
		}
		if err := c.Telemetry.Check(); err != nil {
			return fmt.Errorf("state.Measure: %w: %w", ErrArgument, err)
		}
		l.config.Telemetry = c.Telemetry
		return nil
	}

	return fmt.Errorf("state: %w: the action is %v, want Germinate, Move, Recycle, SetAlpha, "+
		"Quarantine, Load or Measure", ErrArgument, c.Action)
}

// checkLoad returns an error unless the slot of a seed may be overwritten with parameters p of a
// blueprint of the given kind. All living seeds of the slot must be of that kind, and none may be
// fossilized. The caller holds the lock.
func (l *Lattice) checkLoad(seed int, kind blueprints.Kind, p SlotParams) error {
	const method = "Load"
	if err := l.checkSeed(method, seed); err != nil {
		return err
	}

	refuse := func(format string, args ...any) error {
		return fmt.Errorf("state.%s: %w: seed %d: %w", method, ErrArgument, seed,
			fmt.Errorf(format, args...))
	}
	s := l.seeds
	if l.config.Site != blueprints.Chunk {
		return refuse("in %v a blueprint has no slot to load", l.config.Site)
	}
	if !Stage(s.stage[seed]).Alive() || s.slot[seed] == 0 {
		return refuse("it is %v, want a seed with a blueprint", Stage(s.stage[seed]))
	}

	width := l.config.Width
	if width == 0 {
		width = math.MaxInt32
	}

	size, err := blueprints.Size(kind, l.hidden/l.n, width)
	if err != nil {
		return refuse("%w", err)
	}
	if l.config.Width > 0 && len(p.Weights) != size {
		return refuse("%d weights, want %d for a %v", len(p.Weights), size, kind)
	}

	for i, v := range append(slices.Clone(p.Weights), p.Scale) {
		if !finite(v) {
			return refuse("parameter %d is %v, want a finite number", i, v)
		}
	}

	for other, slot := range s.slot {
		stage := Stage(s.stage[other])
		switch {
		case slot != s.slot[seed] || !stage.Alive():
		case blueprints.Kind(s.kind[other]) != kind:
			return refuse("seed %d uses the same slot and has a %v, not a %v", other,
				blueprints.Kind(s.kind[other]), kind)
		case stage == Fossilized:
			return refuse("seed %d uses the same slot and is fossilized", other)
		}
	}

	return nil
}

// countUsers recounts the living seeds of each slot.
func (l *Lattice) countUsers() {
	l.users = map[uint16]int{}
	for i, stage := range l.seeds.stage {
		if Stage(stage).Alive() {
			l.users[l.seeds.slot[i]]++
		}
	}
}

// commandJSON is the JSON form of a command, with names instead of numbers.
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

	Telemetry *telemetryJSON `json:"telemetry,omitempty"`
}

// telemetryJSON is a Telemetry with names instead of numbers.
type telemetryJSON struct {
	Mode      string  `json:"mode"`
	Reduction string  `json:"reduction,omitempty"` // empty means Hierarchical
	Every     int     `json:"every,omitempty"`
	Share     float64 `json:"share,omitempty"`
}

// telemetry converts j. An unknown name or a value out of range is an error.
func (j *telemetryJSON) telemetry() (t Telemetry, err error) {
	if j == nil {
		return t, fmt.Errorf("state: %w: telemetry is missing, want an object with a mode",
			ErrArgument)
	}

	t.Every, t.Share = j.Every, j.Share
	if t.Mode, err = telemetry.ModeByName(j.Mode); err == nil && j.Reduction != "" {
		t.Reduction, err = telemetry.ReductionByName(j.Reduction)
	}

	if err == nil {
		err = t.Check()
	}

	if err != nil {
		return Telemetry{}, fmt.Errorf("state: %w: %w", ErrArgument, err)
	}
	return t, nil
}

// MarshalJSON encodes the command, writing the action, stage, kind and strategy by name. It returns
// an error for non-finite parameters and for strategies that cannot be stored.
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
	case Measure:
		j.Telemetry = &telemetryJSON{Mode: c.Telemetry.Mode.String(),
			Reduction: c.Telemetry.Reduction.String(), Every: c.Telemetry.Every,
			Share: c.Telemetry.Share}
	}

	return json.Marshal(j)
}

// UnmarshalJSON decodes the output of MarshalJSON. It looks up kinds and strategies by their
// registered names, and returns an error for an unknown action, stage, kind, strategy or telemetry
// setting. On an error, c is unchanged.
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
		return fmt.Errorf("state: %w: layer is %d and seed is %d, want 0 to 2147483647",
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
		to := slices.Index(lifecycle.Names[:], j.To)
		if to < 0 {
			err = fmt.Errorf("state: %w: the stage is %.40q, want one of %q",
				ErrArgument, j.To, lifecycle.Names)
		}
		read.To = Stage(max(to, 0))
	case Load:
		read.Kind, err = kindNamed(j.Kind)
		read.Params = SlotParams{Weights: j.Weights, Scale: j.Scale}
	case Measure:
		read.Telemetry, err = j.Telemetry.telemetry()
	}

	if err == nil {
		*c = read
	}
	return err
}

// kindNamed returns the registered blueprint kind with the given name.
func kindNamed(name string) (blueprints.Kind, error) {
	k, ok := blueprints.ByName(name)
	if !ok {
		names := make([]blueprints.Kind, blueprints.Kinds())
		for k := range names {
			names[k] = blueprints.Kind(k)
		}
		return 0, fmt.Errorf("state: %w: %w %.40q, want one of %v", ErrArgument,
			blueprints.ErrUnknownKind, name, names)
	}
	return k, nil
}
