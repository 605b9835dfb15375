package llm

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/internal/judge"
	"github.com/kasmina-go/kasmina/llm/internal/listen"
	"github.com/kasmina-go/kasmina/state"
)

// steering is what somebody beside a run asks of it. The trainer's mu guards it.
type steering struct {
	commands []steered
	saves    int   // that have been asked for
	asked    int   // of them here, not yet told to the other ranks
	savers   int   // callbacks that save
	halt     error // why the run shall stop
	notes    []string
	shared   bool // whether several ranks train
	// whether seeds have been steered since the last step's events; in the model's turn
	told bool
}

// steered is commands that wait for the end of a step.
type steered struct {
	commands []state.Command
	done     chan<- error // has room for the answer
}

var (
	errNoRun  = fmt.Errorf("llm: %w: no run goes on", state.ErrClosed)
	errReplay = errors.New("llm: Steer: the run follows a record (Growth.Replay), and nobody else")
)

// Steer hands over commands of somebody beside the run, such as a person. They take effect together
// behind the present step, before its events, and callbacks hear of it as they do at the end of an
// epoch. The channel, which need not be read, gets nil then, or why they were refused.
//
// Unlike commands that are submitted to Model.Kasmina, they are in Growth.Record, each with its
// Why. So a run that follows the record takes the same way. Where several ranks train they are as
// submitted.
func (t *Trainer) Steer(commands ...state.Command) <-chan error {
	done := make(chan error, 1)
	if err := t.made(); err != nil {
		done <- fmt.Errorf("llm: Steer: %w", err)
		return done
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.running {
		done <- errNoRun
		return done
	}
	if t.steering.shared {
		return t.Model.Kasmina.Submit(commands...)
	}
	t.steering.commands = append(t.steering.commands, steered{slices.Clone(commands), done})
	return done
}

// Stop ends the run as the end of its context does, mostly behind the present step. Callbacks see
// Interrupted. The error of Run says why, and is a context.Canceled. It does nothing if no run goes
// on.
func (t *Trainer) Stop(why string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.running && t.steering.halt == nil {
		t.steering.halt = halted(why)
	}
}

// SaveSoon has the run's [Checkpoint] callbacks save behind the present step, at all ranks where
// several train. It returns an error if no run goes on or it has none.
func (t *Trainer) SaveSoon() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case !t.running:
		return errNoRun
	case t.steering.savers == 0:
		return errors.New("llm: SaveSoon: the run has no Checkpoint callback, which would save")
	}
	if t.steering.shared {
		t.steering.asked++
		return nil
	}
	t.steering.saves++
	return nil
}

// Note has the callbacks hear of a text behind the present step, as [Noted]. It is what somebody
// beside the run has asked for, so that logs tell of it. It does nothing if no run goes on.
func (t *Trainer) Note(text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.running {
		t.steering.notes = append(t.steering.notes, text)
	}
}

// tellNotes tells the callbacks of the notes. After an error the rest waits for the next step.
func (t *Trainer) tellNotes() error {
	for {
		t.mu.Lock()
		if len(t.steering.notes) == 0 {
			t.mu.Unlock()
			return nil
		}
		text := t.steering.notes[0]
		t.steering.notes = t.steering.notes[1:]
		t.mu.Unlock()

		if err := t.emit(Noted, func(e *Event) { e.Text = text }); err != nil {
			return err
		}
	}
}

// halted is why a run has been stopped.
type halted string

func (why halted) Error() string { return "llm: the run has been stopped: " + string(why) }
func (halted) Unwrap() error     { return context.Canceled }

// takeAsked is how many saves this rank has to tell the others of.
func (t *Trainer) takeAsked() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.steering.asked
	t.steering.asked = 0
	return n
}

// addSaves notes saves that ranks have told of.
func (t *Trainer) addSaves(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.steering.saves += n
}

// saves is how many saves have been asked for.
func (t *Trainer) saves() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.steering.saves
}

// steer carries out what has been asked for.
func (t *Trainer) steer() error {
	t.mu.Lock()
	waiting := t.steering.commands
	t.steering.commands = nil
	t.mu.Unlock()
	for _, s := range waiting {
		if t.replay() != nil {
			s.done <- errReplay
			continue
		}
		err := t.obey(s.commands)
		s.done <- err
		for _, c := range s.commands {
			d := Decision{Command: &c}
			if err != nil {
				d.Refused = err.Error()
			}
			if err := t.record(d); err != nil {
				return err
			}
		}
	}
	return nil
}

// follow does between the ends of epochs what the record says was done there. At the end of an
// epoch it is done with what the controller commanded.
func (t *Trainer) follow() error {
	r := t.replay()
	if r == nil {
		return nil
	}
	for _, c := range r.Commands(t.last.Step) {
		if err := t.obey([]state.Command{c}); err != nil {
			return fmt.Errorf("the record of growth: %w", err)
		}
	}
	return nil
}

// obey carries commands out now. Network.Do would wait for the end of this step.
func (t *Trainer) obey(commands []state.Command) error {
	done := t.Model.Kasmina.Submit(commands...)
	t.Model.Kasmina.Apply()
	err := <-done
	t.steering.told = t.steering.told || err == nil
	return err
}

// refuseWaiting refuses the commands that have come too late for the run's last step. Had they taken
// effect now, no checkpoint of the run would have them.
func (t *Trainer) refuseWaiting() {
	t.Model.Kasmina.Refuse(errNoRun)
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.steering.commands {
		s.done <- errNoRun
	}
	t.steering.commands = nil
}

// dismiss answers what was asked for too late.
func (t *Trainer) dismiss() {
	for _, s := range t.steering.commands {
		s.done <- errNoRun
	}
	t.steering.commands, t.steering.halt, t.steering.notes = nil, nil, nil
}

// A frozen model has no gradients of its own weights, by which seeds could tell where they are
// needed. So before anything is planted it is listened to. The gradients of the weights that seeds
// sit on, over the next batches, are formed once, and forgotten. The loader stands where it stood.

// errUnplanted is the error of a step of a frozen model in which nothing could learn.
var errUnplanted = errors.New("the model is frozen (Config.Frozen), and nothing is planted that " +
	"could learn: Trainer.Grow with a controller such as control.NewAdapters plants, and so does " +
	"Model.Kasmina.Do")

// plantFirst has the controller of a frozen model decide before the first step in which something
// is to learn.
func (t *Trainer) plantFirst() error {
	c := t.Model.Config
	if !c.Frozen || len(c.Planted) > 0 || t.growth == nil || judge.Awake(t.Model.Kasmina) {
		return nil
	}
	// A run that follows a record listens too, so that the seeds' figures are those of that run.
	if err := t.listen(); err != nil {
		return err
	}
	commands, err := t.decide(nil)
	if err != nil {
		return err
	}
	return t.carryOut(commands, nil)
}

// listen tells the seeds at weights how large the gradients of these are. It tells the controller
// what else they ask for, if it wants to know.
func (t *Trainer) listen() error {
	layer := t.Model.LayerAt(blueprints.Weight)
	if layer < 0 {
		return nil
	}
	heard, err := t.hear()
	if err != nil {
		return err
	}
	if by, ok := t.growth.Controller.(interface {
		Heard(func(layer, seed int) []float64)
	}); ok {
		by.Heard(heard.Sigma(layer))
	}
	return judge.Measure(t.Model.Kasmina.Lattice(layer), heard.Norms())
}

// hear returns what the gradients of the weights that seeds sit on ask for now.
func (t *Trainer) hear() (m listen.Model, err error) {
	if t.ranks() != nil {
		return m, errors.New("several ranks cannot listen to a frozen model: train it with one, or " +
			"plant by Model.Kasmina.Do, without Config.Directed")
	}
	c, build := t.Config, t.Config.Engine
	if build == nil {
		build = CPUEngine()
	}
	c.Accumulate, c.listen = 1, listen.Weights(t.Model.Config)
	e, err := build(t.Model, t.Optimizer, c)
	if err == nil {
		m, err = listen.To(t.Model.Config, e, t.Loader)
	}
	if err != nil {
		err = fmt.Errorf("listening to the frozen model: %w", err)
	}
	return m, err
}

// directions are what blueprints begin along.
func (t *Trainer) directions(plant []Planted) (m listen.Model, err error) {
	if t.Model.Config.Directed && len(plant) > 0 {
		return t.hear()
	}
	return m, nil
}
