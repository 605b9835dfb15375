package runtest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// Device describes a device on which cases run.
type Device struct {
	Name   string
	Limits Limits
	// Open opens the device for one case.
	Open func() (*Session, error)
	// Ranks calls f for every rank of a team and returns the errors by rank. It is nil if Limits.Ranks
	// is 0.
	Ranks func(ranks int, f func(rank int, build Build) error) []error
	// RanksDiffer reports that the results of ranks are not bit-identical to a single process's, as
	// on GPUs. Their runs are compared with that of a team of one, and each rank needs a batch in
	// every step.
	RanksDiffer bool
}

// Session is a device that has been opened for one case.
type Session struct {
	Engine Build
	// Fail makes the at-th call of op from now fail; op is one of Limits.Faults. The returned function
	// reports whether the call has failed, and cancels the failure if it has not.
	Fail func(op string, at int) (happened func() bool)
	// Close closes the device. It also fails if resources have leaked. It may be nil.
	Close func() error
}

// The properties of runs.
const (
	Completes = "a run in which nothing fails completes"
	Repeats   = "equal runs are equal"
	Frozen    = "frozen parameters keep their bits"
	Resumes   = "a resumed run equals an uninterrupted one"
	OnRanks   = "a run on several ranks equals a run in one process"
	Traceless = "callbacks leave no trace"
	Replays   = "a run that follows the record of another equals it"
	Unharmed  = "a failed operation changes nothing"
)

// Properties lists all properties.
var Properties = []string{Completes, Repeats, Frozen, Resumes, OnRanks, Traceless, Replays, Unharmed}

// resumeTargets lists the values of Resume.Into.
var resumeTargets = []string{"fresh", "loaded", "same", "other"}

// A Failure is an error that reports a violated property.
type Failure struct {
	Property string
	Err      error
}

func (f *Failure) Error() string { return f.Property + ": " + f.Err.Error() }

// Result is the result of checking a case.
type Result struct {
	Checked []string // properties
	Outcome string   // how the run handled the fault; "" if the fault did not occur
	Skipped error    // why the case cannot be run, or nil
	Failure *Failure // nil if the case has all properties
}

// checker checks one case.
type checker struct {
	Case
	machine Device
	session *Session
	folder  string
	rigs    int
	Result
	straight *rig // an uninterrupted run, and its checkpoint at the end
	end      []byte
	plain    *rig // the same run without a file for each step
}

// Check runs a case in several ways and compares the results. It writes files to the given folder.
func Check(c Case, m Device, folder string) (r Result) {
	k := &checker{Case: c, machine: m, folder: folder}
	defer func() {
		r = k.Result
		if p := recover(); p != nil {
			failed, ok := p.(*Failure)
			if !ok {
				failed = &Failure{Completes, fmt.Errorf("panic: %v\n%s", p, debug.Stack())}
			}
			r.Failure = failed
		}
	}()

	session, err := m.Open()
	if err != nil {
		k.fail(Completes, "opening the machine: %w", err)
	}

	k.session = session
	k.check()
	if session.Close != nil {
		k.must(Completes, "closing the machine", session.Close())
	}

	return
}

func (k *checker) check() {
	if k.base(); k.Skipped != nil || k.end == nil {
		return
	}

	k.callbacks()
	for _, r := range k.Resumes {
		k.resumes(r)
	}

	k.ranks()
	k.replays()
	k.fault()
	k.closed(k.straight)
}

// fail ends the check with a failure, by a panic that Check recovers.
func (k *checker) fail(property, format string, args ...any) {
	panic(&Failure{property, fmt.Errorf(format, args...)})
}

// must fails the check if err is not nil.
func (k *checker) must(property, what string, err error) {
	if err != nil {
		k.fail(property, "%s: %w", what, err)
	}
}

func (k *checker) checked(property string) { k.Checked = append(k.Checked, property) }

// rig returns a rig, a trainer under test, for a variation of the case.
func (k *checker) rig(c Case, m *llm.Model) *rig {
	r, err := k.newRig(c, m)
	k.must(Completes, "creating a trainer", err)
	return r
}

func (k *checker) newRig(c Case, m *llm.Model) (*rig, error) {
	k.rigs++
	return newRig(c, k.session.Engine, m, filepath.Join(k.folder, fmt.Sprint(k.rigs)), 0)
}

// closed closes a trainer, which must succeed, and checks the problems found during its runs.
func (k *checker) closed(r *rig) {
	k.must(Completes, "closing the trainer", r.close())
	if len(r.problems) == 0 {
		return
	}
	property := Frozen
	if strings.HasPrefix(r.problems[0], "callbacks hear") {
		property = Unharmed
	}
	k.fail(property, "%s", strings.Join(r.problems, "; "))
}

// base makes the reference run twice.
func (k *checker) base() {
	straight, err := k.newRig(k.Case, nil)
	if err != nil {
		k.Skipped = err
		return
	}

	k.straight = straight
	k.straight.saves = true
	err = k.straight.run()
	if err != nil && !errors.Is(err, llm.ErrDiverged) && !idle(err) {
		k.fail(Completes, "after step %d: %w", k.straight.tr.Step(), err)
	}

	k.checked(Completes)
	if err == nil {
		if k.end, err = k.straight.save(); !errors.Is(err, llm.ErrDiverged) {
			k.must(Completes, "saving the end", err)
		}
		err = nil
	}

	k.plain = k.rig(k.Case, nil)
	k.plain.in.startCounting()
	again := k.plain.run()
	if fmt.Sprint(again) != fmt.Sprint(err) {
		k.fail(Repeats, "one run ends with %v, the other with %v", err, again)
	}

	if k.end != nil {
		k.same(Repeats, "a repeated run without saves", k.plain, -1, false)
		k.best()
	}

	k.checked(Repeats)
	k.checked(Frozen)
	k.closed(k.plain)
	if k.end == nil {
		k.closed(k.straight)
	}
}

// best fails the check unless the best checkpoint equals the checkpoint that the run saved after the same step.
func (k *checker) best() {
	r := k.straight
	if len(r.bests) == 0 {
		return
	}

	step := r.bests[len(r.bests)-1]
	want, err := os.ReadFile(r.files[step])
	k.must(Resumes, "the checkpoint of the best step", err)
	have, err := os.ReadFile(r.best)
	k.must(Resumes, "the best checkpoint", err)
	if diff := differences(want, have, false); diff != "" {
		k.fail(Resumes, "the best checkpoint differs from a checkpoint after step %d: %s", step, diff)
	}
}

// idle reports whether a run has failed because nothing in a frozen model can learn.
func idle(err error) bool {
	return err != nil && strings.Contains(err.Error(), "nothing is planted")
}

// nonFinite matches the location of a NaN in errors.
var nonFinite = regexp.MustCompile(`the first (value|gradient) that is not finite is in parameter [^;]*|all parameters and gradients are finite`)

// same fails the check unless a run has the same reports as the reference run after step from, and ends with the same
// checkpoint. If loose is set, the results of evaluations may differ.
func (k *checker) same(property, what string, r *rig, from int, loose bool) {
	k.alike(property, what, k.straight, r, from)
	end, err := r.save()
	k.must(property, what+": saving the end", err)
	if diff := differences(k.end, end, loose); diff != "" {
		k.fail(property, "%s ends with a different file: %s", what, diff)
	}
}

// alike fails the check unless two runs have the same reports after step from.
func (k *checker) alike(property, what string, a, b *rig, from int) {
	for step := from + 1; step <= a.tr.Step(); step++ {
		x, ok := a.figures[step]
		y, found := b.figures[step]
		if ok && found && x != y {
			k.fail(property, "%s: step %d has different figures", what, step)
		}
	}

	x, y := a.toldFrom(max(0, from)), b.toldFrom(max(0, from))
	if property == OnRanks && k.machine.RanksDiffer {
		// Before an update, each rank knows only its own share of the gradients.
		for _, all := range [][]string{x, y} {
			for i := range all {
				all[i] = nonFinite.ReplaceAllString(all[i], "")
			}
		}
	}
	if property == Unharmed {
		return // reports before a failure are not repeated
	}

	if !slices.Equal(x, y) {
		k.fail(property, "%s reports\n%s\ninstead of\n%s", what, strings.Join(y, "\n"), strings.Join(x,
			"\n"))
	}
}

// callbacks compares the reference run with a run without callbacks.
func (k *checker) callbacks() {
	if len(k.Callbacks) == 0 && k.Checkpoint == nil {
		return
	}
	c := k.Case.clone()
	c.Callbacks, c.Checkpoint = nil, nil
	r := k.rig(c, nil)
	k.must(Traceless, "a run without callbacks", r.run())
	k.same(Traceless, "a run without callbacks", r, -1, slices.Contains(k.Callbacks, "evaluate"))
	k.checked(Traceless)
	k.closed(r)
}

// resumes resumes the run after a step.
func (k *checker) resumes(p Resume) {
	path, step := k.straight.fileBefore(min(p.Step, k.straight.tr.Step()-1))
	what := fmt.Sprintf("a run resumed after step %d by a %s trainer", step, p.Into)
	r := k.resumer(p.Into, path, what)
	var opts []llm.ResumeOption
	if p.Lenient {
		opts = append(opts, llm.WithNewSettings(func(differences []string) {
			k.fail(Resumes, "%s: other settings: %q", what, differences)
		}))
	}

	k.must(Resumes, what, r.resume(path, step, true, opts...))
	want, err := os.ReadFile(path)
	k.must(Resumes, what, err)
	now, err := r.save()
	k.must(Resumes, what+": saving immediately", err)
	if diff := differences(want, now, false); diff != "" {
		k.fail(Resumes, "%s immediately saves a different file: %s", what, diff)
	}

	clear(r.figures)
	r.told = nil
	k.must(Resumes, what, r.run())
	if step == 0 && k.Parts.RankGrowth != nil {
		step = 1 // a resumed run does not report again that ranks have grown before the first step
	}
	k.same(Resumes, what, r, step, false)
	k.checked(Resumes)
	k.closed(r)
}

// resumer returns a trainer that will resume from a file.
func (k *checker) resumer(into, path, what string) *rig {
	switch into {
	case "loaded":
		m, err := llm.LoadModel(context.Background(), path)
		k.must(Resumes, what+": LoadModel", err)
		return k.rig(k.Case, m)
	case "same":
		r := k.rig(k.Case, nil)
		k.must(Resumes, what+": the preceding run", r.run())
		return r
	case "other":
		r := k.rig(k.Case, nil)
		orders := r.Orders
		r.Orders = resized(orders)
		err := r.run()
		if err != nil && !errors.Is(err, llm.ErrDiverged) && !idle(err) {
			k.fail(Completes, "a run with different orders: %w", err)
		}
		r.hear()
		r.Orders = orders
		return r
	}

	return k.rig(k.Case, nil)
}

// resized returns orders that plant the same blueprints with different sizes. It omits every fifth
// order.
func resized(orders []Order) (all []Order) {
	for i, o := range orders {
		if i%5 == 4 {
			continue
		}
		o.Commands = slices.Clone(o.Commands)
		for j := range o.Commands {
			r := &o.Commands[j].Request
			if o.Commands[j].Action == state.Germinate && r.Size > 0 && r.Size < 2 {
				r.Size++
			} else if r.Size >= 2 {
				r.Size = 5 - r.Size
			}
		}
		all = append(all, o)
	}

	return all
}

// replays makes a run that replays the record of the reference run instead of using the controller.
func (k *checker) replays() {
	if !k.Replay || k.Growth == nil {
		return
	}

	record, err := llm.ReadRecord(bytes.NewReader(k.straight.record.Bytes()))
	k.must(Replays, "the record", err)
	c := k.Case.clone()
	c.Orders = slices.DeleteFunc(c.Orders, func(o Order) bool { return o.Via == "steer" && c.Fault == nil })
	r := k.rig(c, nil)
	g, err := c.growthOf(r.in, r.texts.heldOut, func(state.Command, error) {}, &r.record)
	k.must(Replays, "the growth", err)
	g.Replay, g.Controller = record, nil
	k.must(Replays, "Grow", r.tr.Grow(g))
	r.record.Reset()
	k.must(Replays, "a run that follows the record", r.run())
	for step, want := range k.straight.figures {
		if got, ok := r.figures[step]; ok && got != want {
			k.fail(Replays, "step %d has different figures; the run reports\n%s\nand the original"+
				"\n%s\nwith the record\n%s", step, strings.Join(r.toldFrom(-1), "\n"), strings.Join(
				k.straight.toldFrom(-1), "\n"), &k.straight.record)
		}
	}

	end, err := r.save()
	k.must(Replays, "saving the end", err)
	want, _, err := contents(k.end)
	k.must(Replays, "reading the end", err)
	have, _, err := contents(end)
	k.must(Replays, "reading the end", err)
	for name, v := range want {
		if !bytes.Equal(v, have[name]) {
			k.fail(Replays, "the run ends with a different %s", name)
		}
	}

	k.checked(Replays)
	k.closed(r)
}

// ranks makes the run on several ranks.
func (k *checker) ranks() {
	c := k.onRanks()
	if c == nil || k.Fault != nil && isOf(k.Fault.Op, "rank") {
		return
	}

	what := fmt.Sprintf("a run on %d ranks", k.Ranks)
	want, wantEnd, from := k.straight, k.end, ""
	if k.machine.RanksDiffer {
		one := c.clone()
		one.Ranks = 1
		var errs []error
		want, wantEnd, errs = k.team(one, func(r *rig) { r.resumedOrdered, r.saves = true, true }, "")
		k.must(OnRanks, "a run on 1 rank", errs[0])
	}

	steps := want.tr.Step()
	if step := int(k.Seed % uint64(2*steps)); want.files[step] != "" && step > 0 {
		from = want.files[step]
		what += fmt.Sprintf(", resumed after step %d of a run in one process", step)
	}

	// The run saves once in its second half, so that another run can resume from there.
	last := steps - 1 - int(k.Seed/2%uint64(steps/2+1))
	first, end, errs := k.team(*c, func(r *rig) { r.resumedOrdered, r.saveAt = true, last }, from)
	for rank, err := range errs {
		k.must(OnRanks, fmt.Sprintf("%s: rank %d", what, rank), err)
	}

	if from == "" {
		k.alike(OnRanks, what, want, first, -1)
	}

	if diff := differences(wantEnd, end, true); diff != "" {
		k.fail(OnRanks, "%s ends with a different file: %s", what, diff)
	}

	k.checked(OnRanks)
	k.resumesOnRanks(c, first.files[last], last, wantEnd)
}

// resumesOnRanks resumes, on any number of ranks, from a checkpoint that several ranks have written after a
// step. The run must end with the file end. If path is "", there is no such checkpoint.
func (k *checker) resumesOnRanks(c *Case, path string, step int, end []byte) {
	if path == "" {
		return
	}

	next := c.clone()
	next.Ranks = 1 + int(k.Seed/3%uint64(k.Ranks))
	what := fmt.Sprintf("a run on %d ranks, resumed on %d ranks after step %d", k.Ranks, next.Ranks, step)
	_, resumed, errs := k.team(next, func(r *rig) { r.resumedOrdered = true }, path)
	for rank, err := range errs {
		k.must(Resumes, fmt.Sprintf("%s: rank %d", what, rank), err)
	}

	if diff := differences(end, resumed, true); diff != "" {
		k.fail(Resumes, "%s ends with a different file: %s", what, diff)
	}

	k.checked(Resumes)
}

// possibleOnRanks reports whether several ranks can run a case. They cannot listen to a frozen model or to adapters.
func possibleOnRanks(c Case) bool {
	return c.Parts.RankGrowth == nil && (!c.Train.Frozen || c.Growth == nil && !c.Train.Directed)
}

// onRanks returns the case for several ranks, or nil if it cannot run on them.
func (k *checker) onRanks() *Case {
	if k.Ranks == 0 || k.machine.Ranks == nil || !possibleOnRanks(k.Case) {
		return nil
	}

	o := k.Kasmina
	if k.Train.Accumulate > 1 && (o.Stability != 0 || o.AdaptiveClip > 0) {
		return nil // documented not to be bit-identical
	}

	if k.machine.RanksDiffer && (k.Train.Accumulate < k.Ranks || o.Stability != 0 || o.AdaptiveClip > 0) {
		return nil // rejected by GPUs
	}

	c := k.Case.clone()
	c.Callbacks = nil
	return &c
}

// team trains on several ranks. It returns rank 0's rig and its checkpoint at the end. Before the
// run, it calls ready for each rank, unless ready is nil, and resumes from a file, unless from is "".
func (k *checker) team(c Case, ready func(*rig), from string) (first *rig, end []byte, errs []error) {
	k.rigs++
	folder := filepath.Join(k.folder, fmt.Sprint(k.rigs))
	problems := make([]string, c.Ranks)
	errs = k.machine.Ranks(c.Ranks, func(rank int, build Build) (err error) {
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
			}
		}()
		r, err := newRig(c, build, nil, filepath.Join(folder, fmt.Sprint(rank)), rank)
		if err != nil {
			return err
		}
		if rank == 0 {
			first = r
		}
		if ready != nil {
			ready(r)
		}
		if from != "" {
			if err = r.tr.Resume(context.Background(), from); err == nil {
				if r.scripted = r.tr.Step() - 1; r.resumedOrdered {
					r.scripted++
				}
			}
		}
		if err == nil {
			err = r.run()
		}
		if err == nil {
			path := filepath.Join(r.folder, "now")
			if err = r.tr.Save(path); err == nil && rank == 0 {
				end, err = os.ReadFile(path)
			}
		}
		problems[rank] = strings.Join(r.problems, "; ")
		return errors.Join(err, r.close())
	})

	for rank, p := range problems {
		if p != "" && !strings.HasPrefix(p, "callbacks hear") {
			k.fail(Frozen, "rank %d: %s", rank, p)
		} else if p != "" {
			k.fail(Unharmed, "rank %d: %s", rank, p)
		}
	}

	return first, end, errs
}

// differences lists the differences between two checkpoints. It returns "" if they are equal. If
// loose is set, it ignores the results of evaluations.
func differences(a, b []byte, loose bool) string {
	if bytes.Equal(a, b) {
		return ""
	}

	x, left, err := contents(a)
	if err != nil {
		return err.Error()
	}

	y, right, err := contents(b)
	if err != nil {
		return err.Error()
	}

	var all []string
	for _, name := range slices.Sorted(maps.Keys(x)) {
		v := x[name]
		if w, ok := y[name]; !ok {
			all = append(all, "no "+name)
		} else if !bytes.Equal(v, w) {
			all = append(all, "different "+name)
		}
	}

	for _, name := range slices.Sorted(maps.Keys(y)) {
		if _, ok := x[name]; !ok {
			all = append(all, "additional "+name)
		}
	}

	for _, key := range slices.Sorted(maps.Keys(left)) {
		v, w := left[key], right[key]
		if v == w {
			continue
		}
		all = append(all, jsonDifferences(key, v, w, loose)...)
	}

	if more := len(all) - 8; more > 0 {
		all = append(all[:8], fmt.Sprintf("and %d more", more))
	}

	if len(all) == 0 && !loose {
		return "the same contents in other bytes"
	}

	return strings.Join(all, ", ")
}

// contents reads a checkpoint.
func contents(file []byte) (tensors map[string][]byte, metadata map[string]string, err error) {
	f, err := safetensors.NewFile("checkpoint", bytes.NewReader(file), int64(len(file)))
	if err != nil {
		return nil, nil, err
	}

	tensors = map[string][]byte{}
	for _, name := range f.Names() {
		var all []byte
		if err := f.Chunks(context.Background(), name, func(part []byte) error {
			all = append(all, part...)
			return nil
		}); err != nil {
			return nil, nil, err
		}
		kind, shape, err := f.Info(name)
		if err != nil {
			return nil, nil, err
		}
		tensors[name] = append(all, fmt.Sprint(kind, shape)...)
	}

	return tensors, f.Metadata(), nil
}

// jsonDifferences returns the names of the fields that differ between two objects.
func jsonDifferences(key, a, b string, loose bool) (all []string) {
	var x, y map[string]json.RawMessage
	if json.Unmarshal([]byte(a), &x) != nil || json.Unmarshal([]byte(b), &y) != nil {
		return []string{key}
	}

	for _, field := range slices.Sorted(maps.Keys(x)) {
		v := x[field]
		if loose && strings.HasPrefix(field, "val_") {
			continue
		}
		if !bytes.Equal(v, y[field]) {
			all = append(all, fmt.Sprintf("%s of %s is %.200s, want %.200s", field, key, y[field],
				v))
		}
	}

	for _, field := range slices.Sorted(maps.Keys(y)) {
		if _, ok := x[field]; !ok {
			all = append(all, fmt.Sprintf("additional %s of %s", field, key))
		}
	}

	return all
}
