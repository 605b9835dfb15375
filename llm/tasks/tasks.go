// Package tasks measures language models with the tasks of EleutherAI's lm-evaluation-harness, which this
// documentation calls lm-eval, and with the CORE tasks of Karpathy's nanochat.
//
// Open reads tasks from a file, and Evaluate returns a model's results:
//
//	all, err := tasks.Open("hellaswag.jsonl", tasks.Options{FewShot: 5, Examples: "train.jsonl"})
//	results, err := tasks.Evaluate(ctx, all, model, settings)
//
// Prompts, few-shot examples, metrics and standard errors are the same as in lm-eval 0.4.13. If lm-eval
// would stop with an exception, for example at an item without a label, this package returns an error with
// the number of the line or row.
package tasks

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
)

// A Task is a set of questions and the metrics computed from a model's answers.
type Task struct {
	Name    string
	Format  string
	Version int // version of the task's definition in lm-eval
	FewShot int // number of solved examples in each prompt
	Items   []*Item
	Metrics []Metric
	// Notes are remarks that a user should see, for example about labels that name none of the choices.
	Notes []string

	chance float64 // accuracy of random guesses, for tasks of a CORE bundle
	core   bool
}

// A Metric describes a result of a task.
type Metric struct {
	Name           string `json:"metric"` // such as "acc"
	Filter         string `json:"filter"` // extracts the answer from a text; "none" if there is nothing to extract
	HigherIsBetter bool   `json:"higher_is_better"`

	aggregation aggregation
}

// Key returns the name under which lm-eval reports the metric, such as "acc,none".
func (m Metric) Key() string { return m.Name + "," + m.Filter }

// An Item is a question of a task.
type Item struct {
	Number   int    // from 0, in the order of the file
	Group    string // subject, in a file with several
	Requests []Request

	gold  any
	grade func([]Response) verdict
}

// RequestKind is the kind of a [Request].
type RequestKind uint8

// The kinds of request.
const (
	LogLikelihood RequestKind = iota + 1 // how likely Continuation is after Context
	Rolling                              // how likely the whole Continuation is, however long it is
	Generation                           // the most likely text after Context
	// Choice and Ending score whole prompts as nanochat does. Choice scores the tokens after the start that
	// all prompts of the item share, Ending the tokens at the end that all prompts share.
	Choice
	Ending
)

// A Request is a text for the model to score or to continue.
type Request struct {
	Kind         RequestKind
	Context      string
	Continuation string
	Until        []string // strings that end a Generation
}

// A Response is the result of a [Request].
type Response struct {
	LogProb float64 `json:"log_prob,omitempty"`
	Greedy  bool    `json:"greedy,omitempty"` // whether the model itself would write the continuation
	Tokens  int     `json:"tokens,omitempty"` // number of scored tokens
	Text    string  `json:"text,omitempty"`   // the text that a Generation produced
}

// A verdict is an item's contribution to the metrics of its task.
type verdict struct {
	prediction any
	values     []value // one for each of the task's metrics
}

// A value is an item's contribution to a metric. Weight is used by the metrics of running text, where it
// is the number of words or bytes.
type value struct{ x, weight float64 }

// digest returns a hash of all requests of the task.
func (t *Task) digest() string {
	h := sha256.New()
	e := json.NewEncoder(h)
	fmt.Fprintf(h, "%s %s %d\n", t.Name, t.Format, t.FewShot)
	for _, item := range t.Items {
		_ = e.Encode(item.Requests) // a hash accepts everything
	}
	return hex.EncodeToString(h.Sum(nil))
}
