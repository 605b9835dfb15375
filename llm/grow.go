package llm

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/jsonfloat"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/internal/judge"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// Growth configures how a controller decides on a model's seeds at the end of every epoch of the
// Kasmina lattices.
type Growth struct {
	Controller state.Controller
	// Validation is the text on which blueprints are judged.
	//
	// From Grafting on, a seed's performance is minus the model's mean loss on this text, and is
	// compared with that of the model's twin. Starting from the same state, the twin makes the same
	// steps on the same batches, but without the blueprints being grafted, and it replaces the model
	// if they are given up. The stability of such a seed is the share of the text's batches on which
	// the difference between the two has the same sign as the difference of the means.
	//
	// A seed in Training is tried at full strength, and the resulting rise in loss is its training error.
	//
	// The curve of a seed in depth also uses the loss on this text. Models that grow only in depth
	// need no text. Their curve then uses the training loss, which is adequate for runs that do not
	// repeat their text. A replay must have the text of the recorded run, or none if that had none.
	Validation *data.Evaluation
	// Every is the number of epochs from one comparison to the next; 0 means 1. A comparison requires
	// a pass of the model over the text, and another one for each seed in Training. During a trial it
	// also repeats the steps since the last comparison with the twin, and takes a pass of the twin
	// over the text.
	Every int
	// Governor overrules the controller and everybody who steers the run by immediately undoing
	// harmful growth. nil means control.NewGovernor().
	Governor *control.Governor
	// Refused is called with each of the controller's commands that was rejected. If Refused is nil,
	// such a command stops the run.
	Refused func(state.Command, error)

	// Rewarm is the number of steps over which the learning rate increases linearly from 0 after
	// growth in depth; 0 disables it.
	Rewarm int
	// FreshMoments clears the optimizer's moments of the second and further copies of a block after
	// growth. The first copy and the rest of the model keep their moments. Without FreshMoments, all
	// copies start with the moments of the original block.
	FreshMoments bool

	// Record receives each command with its reason, and each change in the budget's share, as a line
	// of JSON (see [Decision]). It may be nil.
	Record io.Writer
	// Replay is the record of another run of the same model, data and settings. It replaces the
	// controller, which may then be nil, and the clock. The run is bit-identical to the recorded one.
	Replay *Record
}

// Grow makes the trainer follow a controller. A controller that knows how many epochs a blueprint
// needs, such as control.Heuristic, is rejected if the run has fewer.
//
// The controller is called within a step. It may read reports, but it must not call methods of the
// trainer or the model, which would wait for the end of the step. The same applies to Refused.
func (t *Trainer) Grow(g Growth) error {
	defer take(t.Model)()

	if g.Every == 0 {
		g.Every = 1
	}

	switch {
	case g.Controller == nil && g.Replay == nil:
		return errors.New("llm: Grow: the controller is nil, want one such as " +
			"control.NewHeuristic returns")
	case g.Every < 1:
		return fmt.Errorf("llm: Grow: Every is %d, want at least 1", g.Every)
	case g.Rewarm < 0:
		return fmt.Errorf("llm: Grow: Rewarm is %d, want at least 0", g.Rewarm)
	}

	if g.Governor == nil {
		g.Governor = control.NewGovernor()
	}

	if err := g.Governor.Check(); err != nil {
		return fmt.Errorf("llm: Grow: %w", err)
	}

	// Growth in depth and growth in a frozen model are not judged on a text.
	unjudged := t.Config.Frozen || growsDepthAlone(g.Controller) || g.Replay != nil && g.Replay.unjudged
	if g.Validation == nil && t.growth.judged() && !unjudged {
		return errors.New("llm: Grow: Validation is nil, want the text on which blueprints " +
			"are judged, such as data.NewEvaluation makes from held-out text")
	}

	if c, ok := g.Controller.(state.CheckingController); ok && g.Replay == nil {
		if err := c.Check(); err != nil {
			return fmt.Errorf("llm: Grow: %w", err)
		}
	}

	if g.Validation != nil {
		if g.Replay != nil && g.Replay.unjudged {
			return errors.New("llm: Grow: the recorded run did not judge its blueprints on a text, so " +
				"that its replay needs a nil Validation")
		}
		if err := t.canEvaluate(g.Validation); err != nil {
			return fmt.Errorf("llm: Grow: %w", err)
		}
	}

	if err := t.growth.hasTime(g); err != nil {
		return fmt.Errorf("llm: Grow: %w", err)
	}

	if c, ok := g.Controller.(state.CostLearner); ok {
		c.Costs(t.growth.costOf)
	}

	if c, ok := g.Controller.(state.PlanLearner); ok {
		c.Plan(t.growth.plan)
	}

	if c, ok := g.Controller.(state.SizeLearner); ok {
		c.Parameters(t.growth.parametersOf)
	}

	if c, ok := g.Controller.(state.Affording); ok && g.Replay == nil {
		if err := c.Affords(t.Model.Kasmina.Report()); err != nil {
			return fmt.Errorf("llm: Grow: %w", err)
		}
	}

	t.growth.options = &g
	return nil
}

// growsDepthAlone reports whether a controller grows only seeds in depth.
func growsDepthAlone(c state.Controller) bool {
	switch c.(type) {
	case *control.Depth, *control.Forecast, *control.Schedule:
		return true
	}
	return false
}

// costOf returns the cost of a step after growth in depth, relative to a step of the current model.
// It returns 1 for impossible growth.
func (g *growth) costOf(kind blueprints.Kind, size int) float64 {
	c := g.t.Model.layout()
	order, err := blueprints.Order(kind, c.Layers, size)
	if err != nil {
		return 1
	}
	return c.Grow(Grown{Order: order}).FLOPs() / c.FLOPs()
}

// plan describes the run to its controller.
func (g *growth) plan() state.RunPlan {
	c, b := g.t.Model.layout(), g.t.Config.Budget
	p := state.RunPlan{Blocks: c.Layers, EpochTokens: float64(g.t.Config.Epoch * g.t.last.StepTokens),
		PerToken: b.Time == 0 && b.FLOPs == 0}
	for name, shape := range c.Parameters() {
		if strings.HasPrefix(name, blocksPrefix) {
			size := 1
			for _, n := range shape {
				size *= n
			}
			p.Parameters += float64(size)
		}
	}

	for _, grown := range c.Grown {
		if !grown.Stream {
			p.Growths = append(p.Growths, state.RunGrowth{Epoch: grown.Step / g.t.Config.Epoch,
				Blocks: slices.Max(grown.Order) + 1})
		}
	}

	return p
}

// parametersOf returns the number of parameters that a blueprint would have at a weight or in the stream,
// or 0 if it does not fit there.
func (g *growth) parametersOf(layer, seed int, kind blueprints.Kind, size int) int {
	n, _ := g.t.Model.Config.SeedSize(Planted{Site: g.t.Model.Kasmina.Lattice(layer).Site(),
		Seed: seed, Kind: kind.String(), Size: size})
	return n
}

// hasTime returns an error if no blueprint can be fossilized within the planned steps.
func (g *growth) hasTime(o Growth) error {
	planner, ok := o.Controller.(state.Planner)
	if !ok || o.Replay != nil {
		return nil
	}

	c, steps := g.t.Config, g.planned()
	for _, l := range g.t.Model.Kasmina.Lattices() {
		least, err := planner.LeastEpochs(l, o.Every)
		if err != nil {
			return err
		}
		if have := steps / c.Epoch; least > have {
			advice := ""
			if o.Every > 1 {
				advice = fmt.Sprintf(", or compare more often than once in %d epochs "+
					"(Growth.Every)", o.Every)
			}
			return fmt.Errorf("%d steps are %d epochs of %d, and a blueprint needs %d to be "+
				"fossilized: plan at least %d steps, or shorter epochs (TrainConfig.Epoch), or "+
				"lattices with state.WithThresholds(state.DefaultThresholds().Within(%d)) and a "+
				"controller with fewer RampEpochs%s", steps, have, c.Epoch, least,
				least*c.Epoch, have, advice)
		}
	}

	return nil
}

// planned returns the maximum number of steps of the run, as limited by Steps and a budget of tokens or
// FLOPs.
func (g *growth) planned() int {
	b, steps := g.t.Config.Budget, float64(g.t.Config.Steps)
	switch {
	case b.Tokens > 0:
		steps = min(steps, math.Ceil(float64(b.Tokens)/float64(g.t.last.StepTokens)))
	case b.FLOPs > 0:
		steps = min(steps, math.Ceil(b.FLOPs/g.t.stepFLOPs()))
	}
	return int(steps)
}

// rewarmed returns the factor by which Growth.Rewarm scales the learning rate of a step. It is less
// than 1 in the first steps after growth in depth.
func (g *growth) rewarmed(step int) float64 {
	if g.options == nil || g.options.Rewarm == 0 {
		return 1
	}

	for _, last := range slices.Backward(g.t.Model.Config.Grown) {
		if !last.Stream {
			return min(1, float64(step-last.Step+1)/float64(g.options.Rewarm+1))
		}
	}
	return 1
}

// judged reports whether the model has seeds at sites other than depth.
func (g *growth) judged() bool {
	c := g.t.Model.Config
	return len(c.Kasmina)+len(c.Weights)+len(c.Streams) > 0
}

// finishStep records the step that the model has made, and ends an epoch of the lattices when one is due.
func (g *growth) finishStep(loss float64, u update) error {
	g.twin = g.twin.owing(u.rate, u.norm)
	if g.t.last.Step%g.t.Config.Epoch != 0 {
		return nil
	}
	if err := g.endEpoch(loss); err != nil {
		return fmt.Errorf("end of an epoch of the Kasmina layers: %w", err)
	}
	return nil
}

// endEpoch ends an epoch of the Kasmina lattices and carries out the controller's decisions.
func (g *growth) endEpoch(loss float64) error {
	verdict, err := g.measureEpoch(loss)
	if g.t.Model.Kasmina.Layers() > 0 {
		err = g.t.team.agree(err)
	}
	if err != nil || g.options == nil {
		return err
	}

	mean := jsonfloat.Float(g.t.losses / float64(g.t.summed))
	notes := g.notes()
	commands, err := g.decide(verdict)
	if err != nil {
		return err
	}

	if err = g.recordNotes(notes, &mean); err == nil {
		err = g.carryOut(commands, &mean)
	}
	if len(commands) == 0 {
		return err
	}
	return g.t.team.agreeOnCommands(err)
}

// measureEpoch measures the seeds and ends the epoch of their lattices.
func (g *growth) measureEpoch(loss float64) (verdict *judge.Verdict, err error) {
	seeds, options := g.t.Model.Kasmina, g.options
	if err := g.sense(); err != nil {
		return nil, err
	}

	metrics := make([]state.Metrics, seeds.Layers())
	for i, l := range seeds.Lattices() {
		metrics[i].Loss = loss
		if l.Site() == blueprints.Depth {
			if err := g.judgeDepth(&metrics[i], l); err != nil {
				return nil, err
			}
		}
	}

	if err := g.measureSites(); err != nil {
		return nil, err
	}

	if options != nil && options.Validation != nil && g.judged() && (seeds.Lattice(0).Epoch()+1)%options.Every == 0 {
		if verdict, err = g.compareSeeds(metrics); err != nil {
			return nil, err
		}
	}

	_, err = seeds.StepEpoch(metrics)
	return verdict, err
}

// notes returns the notes of the controller, if it takes any. A run that follows a record has none.
func (g *growth) notes() []string {
	c, ok := g.options.Controller.(state.Narrator)
	if !ok || g.options.Replay != nil {
		return nil
	}
	return c.Notes(g.t.Model.Kasmina.Report())
}

// review records the controller's comparison of its predictions with the end of the run, and emits it.
func (g *growth) review() error {
	if g.options == nil || g.options.Replay != nil || g.t.Last().RunTokens == 0 {
		return nil
	}

	c, ok := g.options.Controller.(state.Reviewer)
	if !ok {
		return nil
	}

	var notes []string
	err := g.t.inTurn(func() error {
		notes = c.Review(g.t.Model.Kasmina.Report())
		for _, text := range notes {
			if err := g.record(Decision{Note: text}); err != nil {
				return err
			}
		}
		return nil
	})

	for _, text := range notes {
		err = errors.Join(err, g.t.emit(Noted, func(e *Event) { e.Text = text }))
	}

	return err
}

// recordNotes records the controller's notes and sends them to the callbacks after the step.
func (g *growth) recordNotes(notes []string, mean *jsonfloat.Float) error {
	for _, text := range notes {
		if err := g.record(Decision{Loss: mean, Note: text}); err != nil {
			return err
		}
		g.t.Note(text)
	}
	return nil
}

// carryOut carries out the controller's commands and records them together, with the mean loss of the epoch.
func (g *growth) carryOut(commands []state.Command, mean *jsonfloat.Float) (err error) {
	options := g.options
	var decisions []Decision
	for _, c := range commands {
		d := Decision{Loss: mean, Command: &c}
		refused := g.t.Model.Kasmina.Obey(c)
		if refused != nil {
			d.Refused = refused.Error()
		}
		decisions = append(decisions, d)

		if refused != nil && options.Refused == nil {
			err = fmt.Errorf("the controller: %w", refused)
			break
		}
		if refused != nil {
			options.Refused(c, refused)
		}
	}

	if failed := g.record(decisions...); failed != nil {
		return failed
	}
	return err
}

// measureSites records, for the seeds at weights and in the stream, the size of the gradients of the
// parameters that they grow on. It does so in epochs with a comparison.
func (g *growth) measureSites() error {
	options, c, n := g.options, g.t.Model.Config, g.t.Model.Kasmina
	if options == nil || g.t.Config.Frozen || len(c.Weights)+len(c.Streams) == 0 || (n.Lattice(0).Epoch()+1)%options.Every != 0 {
		return nil
	}

	now, err := g.t.driver.now()
	if err != nil {
		return err
	}

	for _, l := range n.Lattices() {
		if site := l.Site(); site == blueprints.Weight || site == blueprints.Stream {
			err = errors.Join(err, measureNeeds(l, needsOf(c, site, now.Moments, g.t.Optimizer)))
		}
	}

	return err
}

// compareSeeds measures the effect of the seeds on the model. Seeds on trial are compared with the twin.
func (g *growth) compareSeeds(metrics []state.Metrics) (verdict *judge.Verdict, err error) {
	j := g.judge()
	if g.twin != nil {
		if j.Without, err = g.catchUp(); err != nil {
			return nil, fmt.Errorf("the model's twin: %w", err)
		}
		j.Trial = g.twin.trial
	}
	return j.Add(metrics)
}

// judgeDepth adds the next point of the loss curve and the scores of the seeds in depth to the
// metrics of their lattice. The points are losses on the validation text, in epochs with a
// comparison. Without a text, they are mean training losses of whole epochs, which measure unseen
// text unless the run repeats its text.
func (g *growth) judgeDepth(m *state.Metrics, l *state.Lattice) error {
	m.Loss, m.Share = g.t.losses/float64(g.t.summed), g.t.share
	if o := g.options; o != nil && o.Validation != nil {
		if (l.Epoch()+1)%o.Every != 0 {
			m.Loss = 0 // adds no point to the curve
			return nil
		}
		var err error
		m.Loss, err = g.judge().Mean()
		if err = g.t.team.agree(err); err != nil {
			return err
		}
	}

	if g.t.Config.Budget == (Budget{}) {
		m.Share = min(1, float64(g.t.last.Step)/float64(g.t.Config.Steps))
	}

	r := l.Report()
	for _, s := range r.Seeds {
		if s.Stage != state.Evaluating && s.Stage != state.FineTuning {
			continue
		}
		past, err := l.Transitions(s.Seed)
		if err != nil {
			continue
		}
		if score, ok := judge.Depth(append(r.Curve, state.Point{Epoch: r.Epoch + 1,
			Share: m.Share, Loss: m.Loss}),
			past, s.Seed); ok {
			m.Seeds = append(m.Seeds, score)
		}
	}

	return nil
}

// judge returns a judge of the model's seeds. Its losses may be NaN or infinite. It ignores requests
// to stop, because the end of an epoch must be processed completely or not at all.
func (g *growth) judge() judge.Judge {
	return judge.Judge{Seeds: g.t.Model.Kasmina, Text: g.options.Validation, Loss: g.t.driver.engine.Loss}
}

// record writes decisions. They are written at once, so that a failed write records either all or none of
// them.
func (g *growth) record(all ...Decision) error {
	if g.options == nil || g.options.Record == nil || len(all) == 0 {
		return nil
	}

	var lines bytes.Buffer
	for _, d := range all {
		d.Step, d.Share = g.t.last.Step, g.t.share
		d.Unjudged = d.Command != nil && g.options.Validation == nil
		if err := d.Write(&lines); err != nil {
			return err
		}
	}
	if _, err := g.options.Record.Write(lines.Bytes()); err != nil {
		return fmt.Errorf("llm: the record of growth: %w", err)
	}
	return nil
}

// replay returns the record that the run follows, or nil.
func (g *growth) replay() *Record {
	if g.options == nil {
		return nil
	}
	return g.options.Replay
}

// decide returns the commands of the controller, subject to the governor, or the recorded commands of the
// controller if the run follows a record.
func (g *growth) decide(v *judge.Verdict) ([]state.Command, error) {
	if r := g.replay(); r != nil {
		return r.commands[g.t.last.Step], nil
	}
	own := g.options.Controller.Decide(g.t.Model.Kasmina.Report())
	if v != nil {
		own = g.options.Governor.Govern(control.Trial{Seeds: g.twin.trial, Harm: v.Harm,
			Agree: v.Agree, Errors: v.Errors, Norm: g.twin.norm, Without: g.twin.without}, own)
	}
	return shared(g.t, "the controller's commands", own)
}

// follow carries out the recorded commands of a person. The recorded run carried them out when the step was
// complete, after the hooks of the parts. Within an epoch, all recorded commands are a person's.
func (g *growth) follow() error {
	r := g.replay()
	if r == nil {
		return nil
	}

	step := g.t.last.Step
	commands := r.steered[step]
	if step%g.t.Config.Epoch != 0 {
		commands = r.Commands(step)
	}
	for _, c := range commands {
		if err := g.t.steering.obey([]state.Command{c}); err != nil {
			return fmt.Errorf("the record of growth: %w", err)
		}
	}
	return nil
}

// sense passes the measurements of planted blueprints, from the epoch's last batch, to the lattices of
// weights and of the stream. Dormant seeds are not measured.
func (g *growth) sense() error {
	if len(g.t.Model.Planted) == 0 {
		return nil
	}

	all, measured, err := g.t.driver.figures()
	if err != nil || !measured {
		return err
	}

	for _, l := range g.t.Model.Kasmina.Lattices() {
		if site := l.Site(); site == blueprints.Weight || site == blueprints.Stream {
			if err := senseSite(l, &g.pass, all, g.t.Model.Config.Dim); err != nil {
				return err
			}
		}
	}

	return nil
}
