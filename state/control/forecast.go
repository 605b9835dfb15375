package control

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/curve"
	"github.com/kasmina-go/kasmina/state"
)

// Forecast is a controller that makes a model deeper if that is expected to pay off by the end of the
// run. At the end of every epoch, it predicts the final loss for three cases: the model never grows, it
// grows now, or it grows later. The predictions are based on the loss curve of the run, the cost of a
// step, and the number of tokens left for each parameter.
//
// The model grows once three conditions hold:
//   - its loss has become flat, as defined by [Depth], so the start of training is over;
//   - growing now is better than never growing by more than Tolerance;
//   - growing later is not better by more than Tolerance; see Patient.
//
// On a small budget, growth may never be worthwhile. The model then keeps its blocks, and Notes explains
// why.
//
// In a run limited by steps or tokens, rather than by time or FLOPs, larger steps cost nothing, so the
// predictions always favor growing as early as possible. Such a run delays its first growth until the
// time that would be best if larger steps did cost more, or until it has spent the share at which [Depth]
// begins to consider growth by default. It grows at the latest when Depth would by default, unless so few
// tokens are left for each parameter that growth would not pay off even though larger steps cost nothing.
//
// Once the grown model has settled, the prediction is corrected by the losses measured since. The growth
// is rolled back if the corrected prediction is worse than the prediction without the growth, by more
// than Tolerance and the noise of the losses.
//
// All decisions depend only on the reports, so a resumed run makes the same decisions as an uninterrupted
// one.
type Forecast struct {
	Kind blueprints.Kind // a kind of depth, such as blueprints.Stack
	// Size is the maximum size of all growths combined. With kinds that multiply the number of blocks,
	// such as blueprints.Stack, a growth may also use a divisor of Size if that is predicted to be
	// better.
	Size int
	// Growths is the maximum number of growths. Each one starts after the previous one has been accepted.
	Growths int
	// Settle and Patience are shares of the budget spent since a growth. Evaluation begins after the
	// share Settle, or earlier if the run has spent as much since the growth as before it. It lasts for
	// at most a share of Patience − Settle.
	Settle, Patience float64
	// Tolerance is the difference, relative to the current loss, below which two predictions count as
	// equal.
	Tolerance float64
	// Patient replaces Tolerance in the last condition. Before the first growth, the model waits if growing later is
	// better by more than a fifth of Tolerance, and before further growths, if growing later is better at all.
	// According to the predictions, this lowers the final loss a little, but no run on a GPU has confirmed that yet
	// (docs/lab/growth.md).
	Patient bool `json:",omitempty"`
	// Trained means that the model was trained before the run. Because the number of tokens is unknown,
	// 20 tokens for each parameter in the model's blocks are assumed.
	Trained bool `json:",omitempty"`

	cost func(kind blueprints.Kind, size int) float64
	plan func() state.RunPlan
}

// NewForecast returns a controller that grows a model at most once, by the given kind of depth and at
// most the given size. Its Settle is 0.1, its Patience 0.25 and its Tolerance 0.005. Its fields may be
// changed before its first use.
func NewForecast(kind blueprints.Kind, size int) *Forecast {
	return &Forecast{Kind: kind, Size: size, Growths: 1, Settle: 0.1, Patience: 0.25, Tolerance: 0.005}
}

// trainedTokens is the number of earlier tokens per parameter that Trained assumes.
const trainedTokens = 20

// forecastDelay is the factor by which the spent share must grow while the loss remains flat. Without
// this delay, noise in a few losses would be enough to trigger growth.
const forecastDelay = 1.25

// In a run limited by steps or tokens, growth no longer depends on the value of a token once the share
// perTokenBegin has been spent, and the first growth takes place at the share perTokenEnd at the latest.
const perTokenBegin, perTokenEnd = 0.4, 0.55

// Costs sets the function that returns the cost of a step after growth by a kind and size, relative to a
// step of the current model. The trainer calls Costs.
func (f *Forecast) Costs(of func(kind blueprints.Kind, size int) float64) { f.cost = of }

// Plan sets the function that describes the run. The trainer calls Plan.
func (f *Forecast) Plan(of func() state.RunPlan) { f.plan = of }

// Check returns an error that names all invalid fields.
func (f *Forecast) Check() error {
	var errs []error
	refuse := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("control.Forecast: %w: "+format,
			append([]any{state.ErrArgument}, args...)...))
	}

	if _, err := blueprints.Order(f.Kind, 2, f.Size); err != nil {
		refuse("Kind and Size: %w", err)
	}

	if f.Growths < 1 {
		refuse("Growths is %d, want at least 1", f.Growths)
	}

	if !(0 < f.Settle && f.Settle <= f.Patience && f.Patience < 1) {
		refuse("Settle is %v and Patience is %v, want 0 < Settle ≤ Patience < 1", f.Settle, f.Patience)
	}

	if !(f.Tolerance >= 0 && f.Tolerance < 1) {
		refuse("Tolerance is %v, want 0 to less than 1", f.Tolerance)
	}

	return errors.Join(errs...)
}

// LeastEpochs returns the minimum number of epochs that a run needs to judge a growth. The curve has one
// point for each group of `every` epochs.
func (f *Forecast) LeastEpochs(l *state.Lattice, every int) (int, error) {
	if err := f.Check(); err != nil {
		return 0, err
	}

	switch {
	case l == nil:
		return 0, errNoLattice
	case l.Site() != blueprints.Depth:
		return 0, nil
	case f.Growths > l.Seeds():
		return 0, fmt.Errorf("control.Forecast: %w: Growths is %d, but there are %d seeds in depth",
			state.ErrArgument, f.Growths, l.Seeds())
	}

	return int(math.Ceil(float64(leastPoints*max(every, 1)) / f.Settle)), nil
}

// Decide returns the commands for seeds in depth.
func (f *Forecast) Decide(reports []state.Report) (commands []state.Command) {
	for layer, r := range reports {
		if r.Site != blueprints.Depth || len(r.Curve) == 0 || f.cost == nil || f.plan == nil {
			continue
		}
		for _, c := range f.decide(r) {
			c.Layer = layer
			commands = append(commands, c)
		}
	}
	return commands
}

// decide returns the commands for one lattice.
func (f *Forecast) decide(r state.Report) []state.Command {
	if s, ok := active(r); ok {
		return f.next(r, s)
	}

	seed := f.free(r)
	if seed < 0 {
		return nil
	}

	v := f.view(r)
	if !v.grow {
		return nil
	}

	// The new blocks are copies of trained ones and need no training stage, so all commands take effect
	// together.
	return []state.Command{
		{Action: state.Germinate, Seed: seed, Why: v.text,
			Request: state.GerminationRequest{Kind: f.Kind, Size: v.option.size}},
		{Action: state.Move, Seed: seed, To: state.Training},
		{Action: state.Move, Seed: seed, To: state.Grafting},
	}
}

// active returns the seed with a growth that has been neither accepted nor rolled back, if any.
func active(r state.Report) (s state.SeedReport, ok bool) {
	for _, s := range r.Seeds {
		if s.Stage != state.Dormant && !s.Stage.Ended() && s.Stage != state.Fossilized {
			return s, true
		}
	}
	return s, false
}

// free returns a seed for the next growth, or −1 if the model must not grow further. After a growth
// fails, no other is attempted.
func (f *Forecast) free(r state.Report) int {
	seed, grown := -1, 0
	for _, s := range r.Seeds {
		switch {
		case s.Stage == state.Dormant && seed < 0:
			seed = s.Seed
		case s.Stage == state.Fossilized:
			grown++
		case s.Stage != state.Dormant:
			return -1
		}
	}

	if grown >= f.Growths {
		return -1
	}

	return seed
}

// An era is a part of a run between consecutive growths, or before the first or after the last one.
type era struct {
	epoch  int     // number of epochs that had ended when the era began
	blocks int     // number of blocks of the model
	size   float64 // size of the model in tokens; see outlook
	// A grown model counts as if it had seen a different number of tokens than the run has; see
	// outlook.worth. offset is that number minus the number of tokens of the run. Before the first
	// growth, it is the number of tokens seen before the run.
	offset float64
	points []state.Point // of the curve
}

// eras returns the eras of a run. The last one is still in progress.
func (f *Forecast) eras(r state.Report, plan state.RunPlan) (all []era) {
	perBlock := plan.Parameters / float64(plan.Blocks)
	begin := func(epoch, blocks int, offset float64) {
		all = append(all, era{epoch: epoch, blocks: blocks, offset: offset,
			size: blockSize(perBlock) * float64(blocks)})
	}

	first := plan.Blocks
	if len(plan.Growths) > 0 {
		first = plan.Growths[0].Blocks
	}

	earlier := 0.0
	if f.Trained {
		earlier = trainedTokens * perBlock * float64(first)
	}

	begin(0, first, earlier)
	for i, g := range plan.Growths {
		blocks := plan.Blocks
		if i+1 < len(plan.Growths) {
			blocks = plan.Growths[i+1].Blocks
		}

		before := all[len(all)-1]
		seen := plan.EpochTokens * float64(g.Epoch)
		worth := outlook{size: before.size}.worth(before.offset+seen,
			growthOption{factor: float64(blocks) / float64(before.blocks)})
		begin(g.Epoch, blocks, worth-seen)
	}

	for _, p := range r.Curve {
		for i := len(all) - 1; i >= 0; i-- {
			if p.Epoch > all[i].epoch {
				all[i].points = append(all[i].points, p)
				break
			}
		}
	}

	return all
}

// tokens returns a function that converts a number of epochs to the number of tokens that the era's model
// counts as having seen.
func (e era) tokens(plan state.RunPlan) func(epochs int) float64 {
	return func(epochs int) float64 { return e.offset + plan.EpochTokens*float64(epochs) }
}

// rate returns the number of tokens that the era's model would see while spending the entire budget, or 0
// if that is unknown.
//
// The first point is left out if there are others, because it includes the time that compiling the era's
// program took.
func (e era) rate(r state.Report, plan state.RunPlan) float64 {
	if len(e.points) == 0 {
		return 0
	}

	epoch, share := e.epoch, began(r, e)
	if len(e.points) > 1 {
		epoch, share = e.points[0].Epoch, e.points[0].Share
	}

	last := e.points[len(e.points)-1]
	if last.Share <= share {
		return 0
	}

	return plan.EpochTokens * float64(last.Epoch-epoch) / (last.Share - share)
}

// withoutStalls returns the curve of a run as if no era had begun with a stall, in which the run spends time but
// makes no steps: an engine compiles its program, loads its kernels, or measures which of them are fastest. Such
// a stall at the start would make the first losses seem to fall faster than they do.
func withoutStalls(r state.Report, plan state.RunPlan, eras []era) (points []state.Point) {
	lost := 0.0
	for _, e := range eras {
		if rate := e.rate(r, plan); rate > 0 {
			steps := plan.EpochTokens * float64(e.points[0].Epoch-e.epoch) / rate
			if stall := e.points[0].Share - began(r, e) - steps; stall > leastStall {
				lost += stall
			}
		}

		for _, p := range e.points {
			p.Share -= lost
			points = append(points, p)
		}
	}

	return points
}

// leastStall is the share above which a delay counts as a stall. It is more than the rounding of shares to
// multiples of 1/1024.
const leastStall = 0.003

// options returns the possible growths of a model with the given number of blocks, limited to a total
// factor of size and to the given number of growths.
func (f *Forecast) options(blocks, size, growths int) (all []growthOption) {
	if f.Kind != blueprints.Stack && f.Kind != blueprints.Interleave {
		if order, err := blueprints.Order(f.Kind, blocks, f.Size); err == nil {
			all = append(all, growthOption{size: f.Size, factor: float64(len(order)) / float64(blocks),
				cost: max(1, f.cost(f.Kind, f.Size))})
		}
		return all
	}

	return f.multiples(1, size, growths)
}

// multiples returns the possible growths of a model whose number of blocks has already been multiplied by
// `already`.
func (f *Forecast) multiples(already, size, growths int) (all []growthOption) {
	cost := func(multiple int) float64 {
		if multiple == 1 {
			return 1
		}
		return max(1, f.cost(f.Kind, multiple))
	}

	for divisor := 2; divisor <= size && growths > 0; divisor++ {
		if size%divisor == 0 {
			all = append(all, growthOption{size: divisor, factor: float64(divisor),
				cost: cost(already*divisor) / cost(already),
				next: f.multiples(already*divisor, size/divisor, growths-1)})
		}
	}

	return all
}

// priced returns the growth unchanged or, if the run is limited by tokens, with a cost of 1, because
// larger steps then cost the budget nothing.
func priced(g growthOption, perToken bool) growthOption {
	if perToken {
		g.cost = 1
		next := make([]growthOption, len(g.next))
		for i := range next {
			next[i] = priced(g.next[i], true)
		}
		g.next = next
	}
	return g
}

// A view contains the predictions for a model that may grow.
type view struct {
	outlook
	option growthOption // the best growth
	fitted bool         // whether the predictions are losses, based on the curve
	final  float64      // predicted final loss with the growth if grow is true, and without it otherwise
	grow   bool         // whether it should take place now
	reason string       // for the decision
	text   string       // the predictions, followed by the reason
}

// view predicts the end of the run for a model that is not currently growing.
func (f *Forecast) view(r state.Report) (v view) {
	plan := f.plan()
	eras := f.eras(r, plan)
	e := eras[len(eras)-1]
	all := f.options(plan.Blocks, max(1, f.Size*eras[0].blocks/plan.Blocks), f.Growths-len(plan.Growths))
	rate := e.rate(r, plan)
	if len(all) == 0 || rate == 0 {
		return view{text: "the model has all its blocks, or has just received them"}
	}

	now := r.Curve[len(r.Curve)-1]
	v.size, v.seen, v.rest = e.size, e.tokens(plan)(now.Epoch), (1-now.Share)*rate
	v.text = fmt.Sprintf("the %d-block model would reach %.3g tokens per parameter by the end of the run", plan.Blocks,
		(v.seen+v.rest)/plan.Parameters)

	price := func(g growthOption) growthOption { return priced(g, plan.PerToken) }

	// Without a fit, the predictions can only be ranked. The plan is made without one, because the law cannot
	// be fitted to the steep start of the curve.
	v.fitted = len(e.points) >= leastPoints && (len(eras) > 1 || planned(e.points[:len(e.points)-1])) &&
		v.fitLaw(r.Curve[0].Loss, e.points, e.tokens(plan))
	if !v.fitted {
		v.level, v.gain = 0, 1
		v.text += f.outline(&v, all, price, plan, now)
		return v
	}

	for i, g := range all {
		if i == 0 || v.outlook.grow(price(g), 0) < v.outlook.grow(price(v.option), 0) {
			v.option = g
		}
	}

	stay, grow := v.stay(), v.outlook.grow(price(v.option), 0)
	later, wait := v.later(price(v.option))
	v.text += fmt.Sprintf(": predicted final loss %.4f without growth, %.4f if it now grows to %d blocks", stay,
		grow, v.blocks(plan))
	if !math.IsInf(later, 0) {
		v.text += fmt.Sprintf(", %.4f if it does so after another %.3g million tokens", later, wait/1e6)
	}

	margin := f.Tolerance * math.Abs(now.Loss)
	waiting := margin
	switch {
	case f.Patient && len(eras) == 1:
		waiting *= firstWaiting
	case f.Patient:
		waiting = 0
	}

	flat := func() bool {
		threshold := 1 / v.option.cost
		if len(eras) > 1 {
			threshold = min(threshold, laterFlat)
		}
		return f.Trained || isFlat(withoutStalls(r, plan, eras), threshold)
	}
	best := v.best(v.option)
	switch {
	case stay-min(grow, later) <= margin:
		v.reason = refusal
	case plan.PerToken && len(eras) == 1 && now.Share >= perTokenEnd:
		v.grow = true
		v.reason = fmt.Sprintf("; it grows, because a share of %.3f is spent, and growth starts at %v at the latest",
			now.Share, perTokenEnd)
	case !flat():
		v.reason = "; it waits, because the loss still falls fast"
	case plan.PerToken && now.Share < perTokenBegin && v.seen < best:
		v.reason = fmt.Sprintf("; it waits, because tokens are better spent on the small model until it has seen %.3g "+
			"million", best/1e6)
	case stay-grow <= margin || grow-later > waiting:
		v.reason = "; it waits, because a later growth would end lower"
	default:
		v.grow = true
		v.reason = "; it grows"
	}

	v.text += v.reason

	v.final = stay
	if v.grow {
		v.final = grow
	}

	return v
}

// refusal explains why a model keeps its blocks.
const refusal = "; it does not grow, because that would not pay off by the end of the run"

// A patient model postpones its first growth only if that lowers the predicted loss by more than firstWaiting times
// Tolerance. The law ignores that a model with few blocks learns just as fast at the start of training. It therefore
// suggests the first growth up to twice as late as is best. Its time for further growths is right.
const firstWaiting = 0.2

// laterFlat is the threshold of isFlat for further growths. The first growth may take place on a short
// plateau, after which the loss falls fast again. Growth during that fall ended 0.002 nats per byte higher.
const laterFlat = 0.35

// isFlat reports whether the loss falls at most flat times as fast as at its fastest, and has done so for
// some time. In a long run, the steep start may span only a few points, too few for a fitted trend, so
// the slopes between individual points are considered as well.
func isFlat(points []state.Point, flat float64) bool {
	all := slices.DeleteFunc(shares(points, 0), func(p curve.Point) bool { return p.X <= 0 })
	logs := make([]float64, len(all))
	for i, p := range all {
		logs[i] = math.Log(p.X)
	}

	var trend curve.Window
	fastest, since := 0.0, math.Inf(1)
	for i, p := range all {
		for j := 0; j < i && logs[i]-logs[j] >= steepRatio; j++ {
			fastest = max(fastest, (all[j].Y-p.Y)/(logs[i]-logs[j]))
		}

		fall, _, ok := trend.Add(p)
		if !ok {
			continue
		}

		fastest = max(fastest, fall)
		if fall > flat*fastest {
			since = math.Inf(1)
		} else {
			since = min(since, p.X)
		}
	}

	return len(all) > 0 && all[len(all)-1].X >= forecastDelay*since
}

// steepRatio is the minimum distance, in the logarithm of the share, between two points used to calculate
// a slope.
const steepRatio = 0.4

// blocks returns the number of blocks after the best growth.
func (v view) blocks(plan state.RunPlan) int {
	return int(math.Round(v.option.factor * float64(plan.Blocks)))
}

// outline describes the best growth that can be predicted before the curve has been fitted, and compares it with models
// that have more blocks from the start.
func (f *Forecast) outline(v *view, all []growthOption, price func(growthOption) growthOption, plan state.RunPlan,
	now state.Point) string {
	lowest, wait := v.stay(), math.NaN()
	for _, g := range all {
		further := max(0, v.best(g)-v.seen)
		if further >= v.rest {
			continue
		}
		if l := v.outlook.grow(price(g), further); l < lowest {
			lowest, wait, v.option = l, further, g
		}
	}

	if math.IsNaN(wait) {
		return "; before its loss curve is known, growth is not expected to pay off"
	}

	text := fmt.Sprintf("; before its loss curve is known, growing to %d blocks after %.3g million tokens, a "+
		"share of %.2f, is expected to lower the reducible loss by %.1f%%", v.blocks(plan), (v.seen+wait)/1e6,
		now.Share+(1-now.Share)*wait/v.rest, 100*(1-lowest/v.stay()))
	if plan.PerToken || f.Trained {
		return text
	}

	// Compare with the best model that has more blocks from the start.
	deeper, factor := v.fromStart(all, v.seen+v.rest)
	difference, direction := 100*(deeper/lowest-1), "above"
	if difference < 0 {
		difference, direction = -difference, "below"
	}
	return text + fmt.Sprintf("; a model with %.0f blocks from the start would end %.1f%% %s that",
		factor*float64(plan.Blocks), difference, direction)
}

// began returns the share that had been spent when an era began.
func began(r state.Report, e era) (share float64) {
	for _, p := range r.Curve {
		if p.Epoch <= e.epoch {
			share = p.Share
		}
	}
	return share
}

// next returns the commands that are due for an active seed.
func (f *Forecast) next(r state.Report, s state.SeedReport) []state.Command {
	move := func(to state.Stage, why string) []state.Command {
		return []state.Command{{Action: state.Move, Seed: s.Seed, To: to, Why: why}}
	}

	now := r.Curve[len(r.Curve)-1]
	entered, ok := at(r.Curve, r.Epoch-s.EpochsInStage)
	if !ok {
		entered = now
	}

	spent := now.Share - entered.Share
	switch s.Stage {
	case state.Germinated, state.Training:
		return move(s.Stage.Next(), "")
	case state.Grafting:
		return move(state.Stabilization, "")
	case state.Stabilization:
		if spent >= f.Settle || s.EpochsInStage >= 2*leastPoints && spent >= entered.Share {
			return move(state.Evaluating, fmt.Sprintf("it has settled for a share of %.3f", spent))
		}
	case state.Evaluating, state.FineTuning:
		v, judged := f.judge(r)
		late := spent >= f.Patience-f.Settle && s.EpochsInStage > 0
		switch {
		case judged && v.harm > f.Tolerance*math.Abs(now.Loss)+2*v.noise:
			return move(state.RolledBack, v.text)
		case !judged && late && s.Delta <= 0:
			return move(state.RolledBack, fmt.Sprintf("the loss is %.4f higher than without it", -s.Delta))
		case s.CanAdvance && (judged && (v.harm <= 0 || late) || !judged && s.Delta > 0):
			return move(s.Stage.Next(), v.text)
		}
	}

	return nil
}

// A judgment compares keeping a growth with rolling it back.
type judgment struct {
	harm  float64 // predicted final loss with the growth, minus the final loss after a rollback
	noise float64 // standard error of the losses used to correct the prediction
	text  string
}

// judge evaluates the latest growth. ok is false if the curve allows no prediction.
func (f *Forecast) judge(r state.Report) (v judgment, ok bool) {
	plan := f.plan()
	eras := f.eras(r, plan)
	if len(eras) < 2 {
		return v, false
	}

	// The speed of the grown model is unknown until a second point follows the one that contains the growth.
	before, e := eras[len(eras)-2], eras[len(eras)-1]
	if len(e.points) < 2 {
		return v, false
	}

	o := outlook{size: before.size, seen: before.tokens(plan)(e.epoch)}
	oldRate, rate := before.rate(r, plan), e.rate(r, plan)
	if rate == 0 || oldRate == 0 || !o.fitLaw(r.Curve[0].Loss, before.points, before.tokens(plan)) {
		return v, false
	}

	// The losses since the model settled correct the term of the law that depends on the tokens.
	tokens, now := e.tokens(plan), r.Curve[len(r.Curve)-1]
	settled := e.points[len(e.points)/2:]
	n := float64(len(settled))
	var actual, predicted, loss float64
	for _, p := range settled {
		loss += p.Loss / n
		actual += p.Loss - o.loss(term(e.size))
		predicted += o.gain * term(tokens(p.Epoch))
	}

	for _, p := range settled {
		off := p.Loss - o.loss(term(e.size)) - o.gain*term(tokens(p.Epoch)) - (actual-predicted)/n
		v.noise += off * off
	}

	v.noise = math.Sqrt(v.noise/max(1, n-1)) / math.Sqrt(n)
	correction := actual / predicted
	expected := loss - (actual-predicted)/n
	left := 1 - now.Share
	keep := o.loss(term(e.size) + correction*term(tokens(now.Epoch)+left*rate))
	back := o.loss(term(before.size) + term(o.seen+left*oldRate))
	v.harm = keep - back
	v.text = fmt.Sprintf("since it has settled, the loss is %.4f, and %.4f was predicted: predicted final loss "+
		"%.4f, and %.4f after a rollback", loss, expected, keep, back)
	return v, v.harm-v.harm == 0
}

// noteShare is the interval between notes, as a share of the budget.
const noteShare = 0.1

// planned reports whether the points of a curve suffice for a plan, which depends on the speed of the run. The first
// point may contain a stall, and shares are rounded to multiples of 1/1024.
func planned(points []state.Point) bool {
	n := len(points)
	return n >= planPoints && points[n-1].Share-points[0].Share >= planShare
}

const (
	planPoints = 4
	planShare  = 0.01
)

// Notes returns the predictions for the run: at the start, where they serve as a plan, and then after every
// tenth of the budget.
func (f *Forecast) Notes(reports []state.Report) (notes []string) {
	for _, r := range reports {
		n := len(r.Curve)
		if r.Site != blueprints.Depth || n == 0 || f.cost == nil || f.plan == nil ||
			r.Curve[n-1].Epoch != r.Epoch { // the curve has no new point
			continue
		}

		first := planned(r.Curve) && !planned(r.Curve[:n-1])
		tenth := n > 1 && math.Floor(r.Curve[n-2].Share/noteShare) != math.Floor(r.Curve[n-1].Share/noteShare)
		if !first && !tenth {
			continue
		}

		if _, growing := active(r); !growing && f.free(r) >= 0 {
			notes = append(notes, "growth: "+f.view(r).text)
		} else if v, ok := f.judge(r); ok {
			notes = append(notes, "growth: "+v.text)
		}
	}

	return notes
}

// Review compares predictions with the loss at the end of the curve: for each growth, the prediction on
// which the decision was based, and without growth, the first prediction.
func (f *Forecast) Review(reports []state.Report) (notes []string) {
	for _, r := range reports {
		if r.Site == blueprints.Depth && len(r.Curve) > 0 && f.cost != nil && f.plan != nil {
			notes = append(notes, f.review(r)...)
		}
	}
	return notes
}

// review returns the texts of Review for one lattice.
func (f *Forecast) review(r state.Report) (notes []string) {
	end := r.Curve[len(r.Curve)-1].Loss
	compared := func(made float64, v view) string {
		direction := "above"
		if end < v.final {
			direction = "below"
		}
		return fmt.Sprintf("at a share of %.3f, the predicted final loss was %.4f; the run ended at %.4f, %.1f%% %s it",
			made, v.final, end, 100*math.Abs(end/v.final-1), direction)
	}

	// An earlier view cannot be restored if the model had blocks that it has lost since.
	for _, s := range r.Seeds {
		if s.Stage.Ended() {
			return []string{fmt.Sprintf("growth: a growth was rolled back; the run ended at a loss of %.4f", end)}
		}
	}

	growths := f.plan().Growths
	for i, g := range growths {
		if v, made := f.past(r, g.Epoch); v.fitted {
			notes = append(notes, fmt.Sprintf("growth: when it grew from %d to %d blocks %s", g.Blocks,
				f.blocksAfter(growths, i), compared(made.Share, v)))
		}
	}

	if len(growths) > 0 {
		return notes
	}

	for i, p := range r.Curve {
		if i == 0 || p.Share < noteShare {
			continue
		}
		if v, made := f.past(r, p.Epoch); v.fitted {
			text := "growth: the model has kept its blocks; without growth, " + compared(made.Share, v)
			if last := f.view(r); last.fitted {
				text += last.reason
			}
			return append(notes, text)
		}
	}

	return append(notes, "growth: the model has kept its blocks, because its loss allowed no prediction")
}

// blocksAfter returns the number of blocks after growth i.
func (f *Forecast) blocksAfter(growths []state.RunGrowth, i int) int {
	if i+1 < len(growths) {
		return growths[i+1].Blocks
	}
	return f.plan().Blocks
}

// past returns the view at the end of an earlier epoch, and the last point of the curve at that time. No
// growth may have been rolled back since.
func (f *Forecast) past(r state.Report, epoch int) (v view, made state.Point) {
	plan := f.plan()
	n := len(r.Curve)
	for n > 0 && r.Curve[n-1].Epoch > epoch {
		n--
	}
	if n == 0 {
		return v, made
	}

	then := plan
	for i, g := range plan.Growths {
		if g.Epoch >= epoch {
			then.Blocks, then.Growths = g.Blocks, plan.Growths[:i]
			then.Parameters = plan.Parameters * float64(g.Blocks) / float64(plan.Blocks)
			break
		}
	}

	// The cost of a step is a linear function of the number of blocks. share is the part of the current
	// cost that is due to blocks.
	now := float64(plan.Blocks)
	share := 0.0
	if order, err := blueprints.Order(f.Kind, plan.Blocks, f.Size); err == nil {
		share = (f.cost(f.Kind, f.Size) - 1) / (float64(len(order))/now - 1)
	}
	cost := func(blocks int) float64 { return 1 - share + share*float64(blocks)/now }

	earlier := *f
	earlier.plan = func() state.RunPlan { return then }
	earlier.cost = func(kind blueprints.Kind, size int) float64 {
		order, err := blueprints.Order(kind, then.Blocks, size)
		if err != nil {
			return 1
		}
		return cost(len(order)) / cost(then.Blocks)
	}

	made = r.Curve[n-1]
	r.Curve, r.Epoch = r.Curve[:n], made.Epoch
	return earlier.view(r), made
}
