package tasks

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/kasmina-go/kasmina/llm"
)

// A Model scores and continues texts, as [llm.Inference] does.
type Model interface {
	Score(ctx context.Context, texts []llm.Continuation) ([]llm.ContinuationScore, error)
	// Decoder returns a function that computes the logits, a []float32 or []float64, for the token that
	// follows a text.
	Decoder() (func(ctx context.Context, tokens []int) (any, error), error)
}

// Settings configure an evaluation.
type Settings struct {
	Tokenizer Tokenizer
	Window    int   // longest sequence of the model in tokens
	Ends      []int // tokens that end a generated text
	Generate  int   // most tokens of a generated text; the default is 256
	Parallel  int   // number of texts to generate at the same time; the default is 1

	// Progress is called with the number of finished items, if it is not nil.
	Progress func(done, of int)
	// Log is the path of a file that collects the responses for each item. Responses that are already in
	// the file are not computed again. If Log is "", there is no such file.
	Log string
	// Model identifies the model, and everything else that affects its responses. A Log of another model is
	// refused.
	Model string
}

// chunkTokens is the approximate number of tokens that are scored between two writes to the log.
const chunkTokens = 1 << 14

// Evaluate measures a model with tasks and returns a result for each task. With the tasks of a CORE bundle,
// a further result holds the CORE metric.
//
// If the evaluation is interrupted by an error or because ctx is done, the log has the responses so far, and
// the same call continues from there. The results are then the same, bit for bit.
func Evaluate(ctx context.Context, all []*Task, m Model, s Settings) ([]Result, error) {
	r := &evaluation{model: m, Settings: s, tasks: all}
	results, err := r.run(ctx)
	if err != nil {
		return nil, fmt.Errorf("tasks: %w", err)
	}
	return results, nil
}

// An evaluation is the state of a call of Evaluate.
type evaluation struct {
	Settings
	model   Model
	tasks   []*Task
	encoder *encoder
	answers [][][]Response // by task, item and request; nil if not known yet
	log     *answerLog
	done    int // items with answers
	items   int
}

func (r *evaluation) run(ctx context.Context) (results []Result, err error) {
	if err := r.prepare(); err != nil {
		return nil, err
	}

	if r.Log != "" {
		if r.log, err = openAnswerLog(r.Log, r.fingerprint(), r.tasks, r.answers); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, r.log.Close()) }()
	}

	for _, answers := range r.answers {
		for _, a := range answers {
			if r.items++; a != nil {
				r.done++
			}
		}
	}

	for i, t := range r.tasks {
		if err := r.answer(ctx, i); err != nil {
			return nil, fmt.Errorf("%s: %w", t.Name, err)
		}
	}
	return r.results(ctx)
}

// prepare checks the settings, and encodes all items once, so that items which cannot be scored are
// reported before anything is computed.
func (r *evaluation) prepare() (err error) {
	r.Generate, r.Parallel = cmp.Or(r.Generate, 256), cmp.Or(r.Parallel, 1)
	switch {
	case r.model == nil || r.Tokenizer == nil:
		return errors.New("the model or the Settings.Tokenizer is nil")
	case r.Window < 2:
		return fmt.Errorf("Settings.Window is %d, want at least 2", r.Window)
	case r.Generate < 1 || r.Parallel < 1:
		return fmt.Errorf("Settings.Generate is %d and Parallel %d, want at least 1", r.Generate, r.Parallel)
	}

	if r.encoder, err = newEncoder(r.Tokenizer, r.Window); err != nil {
		return err
	}

	names := map[string]bool{}
	for _, t := range r.tasks {
		if names[t.Name] {
			return fmt.Errorf("two tasks are called %q: rename one of the files", t.Name)
		}
		names[t.Name] = true
		if len(t.Items) == 0 {
			return fmt.Errorf("the task %s has no items", t.Name)
		}
		r.answers = append(r.answers, make([][]Response, len(t.Items)))
	}
	return nil
}

// fingerprint returns a hash of everything that affects the responses.
func (r *evaluation) fingerprint() string {
	h := sha256.New()
	fmt.Fprintln(h, r.Model, r.Window, r.Generate, r.Ends)
	for _, t := range r.tasks {
		fmt.Fprintln(h, t.digest())
	}
	return hex.EncodeToString(h.Sum(nil))
}

// answer computes the missing answers to a task.
func (r *evaluation) answer(ctx context.Context, task int) error {
	if r.tasks[task].Items[0].Requests[0].Kind == Generation {
		return r.generate(ctx, task)
	}

	chunks, err := r.chunks(ctx, r.tasks[task])
	if err != nil {
		return err
	}
	for _, chunk := range chunks {
		if err := r.score(ctx, task, chunk); err != nil {
			return err
		}
	}
	return nil
}

// chunks divides the items of a task into chunks of about chunkTokens tokens, with items of similar
// lengths together. The chunks are the same when an interrupted evaluation continues.
func (r *evaluation) chunks(ctx context.Context, t *Task) (chunks [][]int, err error) {
	tokens, order := make([]int, len(t.Items)), make([]int, len(t.Items))
	longest := make([]int, len(t.Items))
	for n, item := range t.Items {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}

		texts, err := r.encoder.continuations(item)
		if err != nil {
			return nil, fmt.Errorf("item %d: %w", n, err)
		}
		for _, request := range texts {
			for _, c := range request {
				tokens[n] += len(c.Tokens)
				longest[n] = max(longest[n], len(c.Tokens))
			}
		}
		order[n] = n
	}

	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(longest[b], longest[a]) })
	sum := 0
	for _, n := range order {
		if len(chunks) == 0 || sum+tokens[n] > chunkTokens {
			chunks, sum = append(chunks, nil), 0
		}
		chunks[len(chunks)-1] = append(chunks[len(chunks)-1], n)
		sum += tokens[n]
	}
	return chunks, nil
}

// score answers the items of a chunk, unless all of their answers are known.
func (r *evaluation) score(ctx context.Context, task int, chunk []int) error {
	known := !slices.ContainsFunc(chunk, func(n int) bool { return r.answers[task][n] == nil })
	if known {
		return nil
	}

	var texts []llm.Continuation
	var owners [][2]int // index within the chunk, and request
	answers := make([][]Response, len(chunk))
	for i, n := range chunk {
		item := r.tasks[task].Items[n]
		requests, err := r.encoder.continuations(item)
		if err != nil {
			return err
		}
		answers[i] = make([]Response, len(requests))
		for k, windows := range requests {
			answers[i][k].Greedy = true
			for _, w := range windows {
				texts, owners = append(texts, w), append(owners, [2]int{i, k})
			}
		}
	}

	scores, err := r.model.Score(ctx, texts)
	if err != nil {
		return err
	}

	for i, s := range scores {
		if math.IsNaN(s.LogProb) {
			return fmt.Errorf("item %d: the model's logits are not finite numbers, so its answers mean nothing",
				chunk[owners[i][0]])
		}
		a := &answers[owners[i][0]][owners[i][1]]
		a.LogProb, a.Greedy, a.Tokens = a.LogProb+s.LogProb, a.Greedy && s.Greedy, a.Tokens+texts[i].Scored
	}
	return r.record(task, chunk, answers)
}

// record keeps the answers to items.
func (r *evaluation) record(task int, items []int, answers [][]Response) error {
	for i, n := range items {
		if r.answers[task][n] == nil {
			r.done++
		}
		r.answers[task][n] = answers[i]
	}

	if r.log != nil {
		if err := r.log.write(r.tasks[task], items, answers); err != nil {
			return err
		}
	}
	if r.Progress != nil {
		r.Progress(r.done, r.items)
	}
	return nil
}

// generate computes the missing answers to a task that asks for texts.
func (r *evaluation) generate(ctx context.Context, task int) error {
	t := r.tasks[task]
	var missing []int
	for n, item := range t.Items {
		if _, err := r.encoder.question(item.Requests[0].Context, r.Generate); err != nil {
			return fmt.Errorf("item %d: %w", n, err)
		}
		if r.answers[task][n] == nil {
			missing = append(missing, n)
		}
	}

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	work := make(chan int)
	var wait sync.WaitGroup
	var lock sync.Mutex
	for range min(r.Parallel, len(missing)) {
		wait.Add(1)
		go func() {
			defer wait.Done()
			for n := range work {
				text, err := r.continued(ctx, t.Items[n].Requests[0])
				lock.Lock()
				if err == nil {
					err = r.record(task, []int{n}, [][]Response{{{Text: text}}})
				}
				lock.Unlock()
				if err != nil {
					cancel(err)
				}
			}
		}()
	}

	for _, n := range missing {
		if ctx.Err() != nil {
			break
		}
		work <- n
	}
	close(work)
	wait.Wait()

	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

// continued returns the most likely continuation of a request's context, up to the first string that
// ends it.
func (r *evaluation) continued(ctx context.Context, q Request) (string, error) {
	tokens, err := r.encoder.question(q.Context, r.Generate)
	if err != nil {
		return "", err
	}

	until := slices.Clone(q.Until)
	if r.encoder.endText != "" && !slices.Contains(until, r.encoder.endText) {
		until = append(until, r.encoder.endText)
	}
	lookback := 0 // tokens at the end that can hold a string of until
	for _, u := range until {
		lookback = max(lookback, len(r.Tokenizer.Encode([]byte(u)))+2)
	}

	logits, err := r.model.Decoder()
	if err != nil {
		return "", err
	}

	start := len(tokens)
	for range r.Generate {
		x, err := logits(ctx, tokens)
		if err != nil {
			return "", err
		}
		next := mostLikely(x)
		tokens = append(tokens, next)
		if slices.Contains(r.Ends, next) {
			break
		}
		last, err := r.text(tokens[max(start, len(tokens)-lookback):], r.Tokenizer.DecodeWhole)
		if err != nil {
			return "", err
		}
		if slices.ContainsFunc(until, func(u string) bool { return strings.Contains(last, u) }) {
			break
		}
	}

	text, err := r.text(tokens[start:], r.Tokenizer.Decode)
	for _, u := range until {
		text, _, _ = strings.Cut(text, u)
	}
	return text, err
}

// text decodes tokens. Ids beyond the vocabulary, which a model may have, add nothing.
func (r *evaluation) text(ids []int, decode func([]int) ([]byte, error)) (string, error) {
	known := slices.DeleteFunc(slices.Clone(ids), func(id int) bool { return id >= r.Tokenizer.VocabSize() })
	text, err := decode(known)
	return replaceInvalid(text), err
}

// mostLikely returns the first token with the largest logit.
func mostLikely(logits any) int {
	best := 0
	switch x := logits.(type) {
	case []float32:
		for i, v := range x {
			if v > x[best] {
				best = i
			}
		}
	case []float64:
		for i, v := range x {
			if v > x[best] {
				best = i
			}
		}
	}
	return best
}

// results grades all items and computes the metrics.
func (r *evaluation) results(ctx context.Context) (results []Result, err error) {
	centered, cores := 0.0, 0
	for i, t := range r.tasks {
		result, err := r.result(ctx, t, r.answers[i])
		if err != nil {
			return nil, err
		}
		if t.core {
			x := (result.Metrics[0].Value - t.chance) / (1 - t.chance)
			result.Metrics = append(result.Metrics, MetricResult{Metric: Metric{"centered", "none", true, core},
				Value: x, Deviation: math.NaN()})
			centered, cores = centered+x, cores+1
		}
		results = append(results, result)
	}

	if cores > 0 {
		results = append(results, Result{Task: "CORE", Format: "core", Items: cores,
			Metrics: []MetricResult{{Metric: Metric{"core", "none", true, core},
				Value: centered / float64(cores), Deviation: math.NaN()}}})
	}
	return results, nil
}

// result grades the items of a task and computes its metrics, for each subject and for all items.
func (r *evaluation) result(ctx context.Context, t *Task, answers [][]Response) (Result, error) {
	values := make([][]value, len(t.Items))
	var groups []string
	members := map[string][]int{}
	all := make([]int, len(t.Items))
	for n, item := range t.Items {
		values[n], all[n] = item.grade(answers[n]).values, n
		if _, ok := members[item.Group]; !ok {
			groups = append(groups, item.Group)
		}
		members[item.Group] = append(members[item.Group], n)
	}

	total, err := t.measure(ctx, t.Name, all, values)
	if err != nil || len(groups) == 1 {
		return total, err
	}

	// A group of subjects counts each item once, and pools the standard errors of the subjects.
	sizes := make([]int, len(groups))
	for i, g := range groups {
		result, err := t.measure(ctx, g, members[g], values)
		if err != nil {
			return total, err
		}
		total.Groups, sizes[i] = append(total.Groups, result), len(members[g])
	}
	for k := range total.Metrics {
		deviations := make([]float64, len(groups))
		for i, g := range total.Groups {
			deviations[i] = g.Metrics[k].Deviation
		}
		total.Metrics[k].Deviation = pooledDeviation(deviations, sizes)
	}
	return total, nil
}

// measure computes the metrics of some items.
func (t *Task) measure(ctx context.Context, name string, items []int, values [][]value) (Result, error) {
	result := Result{Task: name, Format: t.Format, Version: t.Version, Items: len(items), FewShot: t.FewShot}
	for k, m := range t.Metrics {
		own := make([]value, len(items))
		for i, n := range items {
			own[i] = values[n][k]
		}
		deviation, err := m.aggregation.deviation(ctx, own)
		if err != nil {
			return result, err
		}
		result.Metrics = append(result.Metrics, MetricResult{m, m.aggregation.of(own), deviation})
	}
	return result, nil
}
