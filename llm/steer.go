package llm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// steering holds what has been asked of a run. The trainer's mu guards it, except for told.
type steering struct {
	requests []pendingRequest
	open     bool // whether the run takes requests
	saves    int  // granted requests to save
	savers   int  // callbacks that save
	halt     error
	notes    []string
	shared   bool // whether several ranks train
	told     bool // seeds were steered since the last step's events; in the model's turn
}

// pendingRequest is a request that waits for the end of a step.
type pendingRequest struct {
	Request
	done chan<- error // has room for the answer
}

var (
	errNoRun    = fmt.Errorf("llm: %w: no run goes on", state.ErrClosed)
	errLastStep = fmt.Errorf("llm: %w: the run has made its last step, after which nothing changes",
		state.ErrClosed)
	errRunEnded = fmt.Errorf("llm: %w: the run has ended before the request could be granted",
		state.ErrClosed)
	errReplay = errors.New("llm: the run follows a record (Growth.Replay), and takes commands from " +
		"nobody else")
	errNoSaver = errors.New("llm: the run has no Checkpoint callback, which would save")
)

// Ask hands the run a request of a person or of another program. It may be called from any
// goroutine.
//
// The request is granted after the present step and before the step's events, or after the next
// step. Where several ranks train, all of them grant the requests of all ranks between the same two
// steps and in the same order. The channel, which need not be read, then receives nil, or why the
// request was refused. A run that ends first refuses it.
//
// Growth.Record has every request, with the Why of each command, so that a run which follows the
// record receives the same commands at the same steps.
func (t *Trainer) Ask(r Request) <-chan error {
	done := make(chan error, 1)
	if err := t.made(); err != nil {
		done <- fmt.Errorf("llm: Ask: %w", err)
		return done
	}

	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case !t.steering.open:
		done <- errNoRun
	case t.last.Last:
		done <- errLastStep
	case r.Save && t.steering.savers == 0:
		done <- errNoSaver
	default:
		r.Commands = slices.Clone(r.Commands)
		t.steering.requests = append(t.steering.requests, pendingRequest{r, done})
	}
	return done
}

// Steer is Ask for commands alone. Callbacks receive an EpochEnd when the commands have taken
// effect.
//
// Commands that are submitted to Model.Kasmina instead are not in Growth.Record.
func (t *Trainer) Steer(commands ...state.Command) <-chan error {
	return t.Ask(Request{Commands: commands})
}

// SaveSoon is Ask for a checkpoint. It does not wait, and returns an error if the request is
// refused at once, such as when no run goes on or the run has no Checkpoint callback.
func (t *Trainer) SaveSoon() error {
	select {
	case err := <-t.Ask(Request{Save: true}):
		return err
	default:
		return nil
	}
}

// Stop ends the run as the end of its context does, usually after the present step. Callbacks
// receive Interrupted. The error of Run says why, and is a context.Canceled.
//
// Stop returns an error if no run goes on, or if the run is already ending.
func (t *Trainer) Stop(why string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.steering.open {
		return errNoRun
	}
	if t.steering.halt == nil {
		t.steering.halt = halted(why)
	}
	return nil
}

// Note has the callbacks receive a text after the present step, as [Noted]. It does nothing if no
// run goes on.
func (t *Trainer) Note(text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.steering.open {
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

// halted is the reason why a run was stopped.
type halted string

func (why halted) Error() string { return "llm: the run has been stopped: " + string(why) }
func (halted) Unwrap() error     { return context.Canceled }

// saves returns how many requests to save have been granted.
func (t *Trainer) saves() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.steering.saves
}

// requested reports whether requests wait.
func (t *Trainer) requested() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.steering.requests) > 0
}

// takeRequests returns the requests that wait, and empties the queue.
func (t *Trainer) takeRequests() []pendingRequest {
	t.mu.Lock()
	defer t.mu.Unlock()
	taken := t.steering.requests
	t.steering.requests = nil
	return taken
}

// closeRequests refuses the requests that wait, and all later ones.
func (t *Trainer) closeRequests() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.dismiss()
}

// dismiss is closeRequests for a caller that holds t.mu.
func (t *Trainer) dismiss() {
	refuse(t.steering.requests, errRunEnded)
	t.steering.open, t.steering.requests = false, nil
}

// refuse answers requests with an error.
func refuse(requests []pendingRequest, err error) {
	for _, r := range requests {
		r.done <- err
	}
}

// plain returns the requests alone, without the channels for their answers.
func plain(requests []pendingRequest) []Request {
	all := make([]Request, len(requests))
	for i, r := range requests {
		all[i] = r.Request
	}
	return all
}

// grantAll grants requests in order, and records them. Those of this process are own, and start at
// the given index.
//
// A request is answered after it has been recorded. When that fails, the run ends, and nobody is
// told that the request was granted.
func (t *Trainer) grantAll(requests []Request, own []pendingRequest, at int) error {
	defer func() { refuse(own, errRunEnded) }() // after an error, or a panic of a listener

	for i, r := range requests {
		err := t.grant(r)
		failed := t.recordRequest(r, err)
		if i >= at && len(own) > 0 {
			own[0].done <- cmp.Or(failed, err)
			own = own[1:]
		}
		if failed != nil {
			return failed
		}
	}
	return nil
}

// grant carries out a request, or returns the reason for refusing it.
func (t *Trainer) grant(r Request) error {
	if len(r.Commands) > 0 && t.replay() != nil {
		return errReplay
	}
	if len(r.Commands) > 0 {
		if err := t.obey(r.Commands); err != nil {
			return err
		}
	}

	t.mu.Lock()
	defer t.mu.Unlock()
	if r.Save {
		t.steering.saves++
	}
	if r.Note != "" {
		t.steering.notes = append(t.steering.notes, r.Note)
	}
	return nil
}

// recordRequest records a request, which was refused unless err is nil.
func (t *Trainer) recordRequest(r Request, err error) error {
	refused := ""
	if err != nil {
		refused = err.Error()
	}

	for _, c := range r.Commands {
		if err := t.record(Decision{Command: &c, Refused: refused}); err != nil {
			return err
		}
	}
	if r.Save {
		return t.record(Decision{Asked: AskedToSave, Why: r.Note, Refused: refused})
	}
	return nil
}

// recordStop records why somebody has stopped the run, if somebody has.
func (t *Trainer) recordStop() error {
	var why halted
	if !errors.As(t.stopped(), &why) {
		return nil
	}
	defer take(t.Model)()
	return t.record(Decision{Asked: AskedToStop, Why: string(why)})
}

// follow carries out the commands that the record has for a step between the ends of epochs. At the
// end of an epoch they are carried out in place of the controller's.
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

// obey carries out commands now, in the model's turn.
func (t *Trainer) obey(commands []state.Command) error {
	err := t.Model.Kasmina.Obey(commands...)
	t.steering.told = t.steering.told || err == nil
	return err
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
	if !c.Frozen || len(c.Planted) > 0 || t.growth == nil || anyAwake(t.Model.Kasmina) {
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
	return measureNeeds(t.Model.Kasmina.Lattice(layer), heard.Norms())
}

// hear returns what the gradients of the weights that seeds sit on ask for now.
func (t *Trainer) hear() (m heardModel, err error) {
	if t.ranks() != nil {
		return m, errors.New("several ranks cannot listen to a frozen model: train it with one, or " +
			"plant by Model.Kasmina.Do, without Config.Directed")
	}
	c, build := t.Config, t.Config.Engine
	if build == nil {
		build = CPUEngine()
	}
	c.Accumulate, c.listen = 1, listenedWeights(t.Model.Config)
	e, err := build(t.Model, t.Optimizer, c)
	if err == nil {
		m, err = listenTo(t.Model.Config, e, t.Loader)
	}
	if err != nil {
		err = fmt.Errorf("listening to the frozen model: %w", err)
	}
	return m, err
}

// directions are what blueprints begin along.
func (t *Trainer) directions(plant []Planted) (m heardModel, err error) {
	if t.Model.Config.Directed && len(plant) > 0 {
		return t.hear()
	}
	return m, nil
}
