package state

import "fmt"

// Action says what a [Command] does.
type Action uint8

// The actions of commands.
const (
	Germinate  Action = iota + 1 // as Lattice.RequestGermination, with Command.Request
	Move                         // as Lattice.Transition, to Command.To
	Recycle                      // as Lattice.Recycle
	SetAlpha                     // as Lattice.SetAlpha, to Command.Alpha
	Quarantine                   // makes the seed a new one if it does not match its checksum, as Lattice.Quarantine
)

var actionNames = [...]string{Germinate: "Germinate", Move: "Move", Recycle: "Recycle", SetAlpha: "SetAlpha", Quarantine: "Quarantine"}

// String returns the action's name.
func (a Action) String() string {
	if a > 0 && int(a) < len(actionNames) {
		return actionNames[a]
	}
	return fmt.Sprintf("Action(%d)", uint8(a))
}

// Command is something to be done with a seed of a [Network].
type Command struct {
	Action  Action
	Layer   int
	Seed    int
	Request GerminationRequest // Germinate
	To      Stage              // Move
	Alpha   float64            // SetAlpha
	Why     string             // for people; may be empty
}

// String describes the command in a line.
func (c Command) String() string {
	s := fmt.Sprintf("layer %d, seed %d: ", c.Layer, c.Seed)
	switch c.Action {
	case Germinate:
		strategy := c.Request.Strategy
		if strategy == nil {
			strategy = defaultStrategy
		}
		s += fmt.Sprintf("germinate %v in slot %d, to be grafted by %s", c.Request.Kind, c.Request.Slot, strategy.Name())
	case Move:
		s += fmt.Sprintf("move to %v", c.To)
	case Recycle:
		s += "recycle"
	case SetAlpha:
		s += fmt.Sprintf("set α to %.3g", c.Alpha)
	case Quarantine:
		s += "put into quarantine if it is corrupt"
	default:
		s += c.Action.String()
	}
	if c.Why != "" {
		s += ", because " + c.Why
	}
	return s
}

// do carries out a command on the lattice. The caller holds the lock.
func (l *Lattice) do(c Command) error {
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
		l.quarantine(l.sums.faults(c.Seed, c.Seed+1, l.seeds.crc))
		return nil
	}
	return fmt.Errorf("state: %w: the action is %v, want Germinate, Move, Recycle, SetAlpha or Quarantine", ErrArgument, c.Action)
}

// alive reports whether a seed in the stage has a blueprint.
func (s Stage) alive() bool { return s >= Germinated && s <= Fossilized }

// grafted reports whether the blueprint of a seed in the stage has been blended in, but not for good.
func (s Stage) grafted() bool { return s >= Grafting && s <= FineTuning }

// countUsers counts the living seeds of each slot.
func (l *Lattice) countUsers() {
	l.users = map[uint16]int{}
	for i, stage := range l.seeds.stage {
		if Stage(stage).alive() {
			l.users[l.seeds.slot[i]]++
		}
	}
}
