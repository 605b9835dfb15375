// Package ranks implements the exchanges between processes that train a model together.
package ranks

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/internal/settings"
	"github.com/kasmina-go/kasmina/state"
)

// Ranks connects a rank to the other ranks.
type Ranks interface {
	Rank() int
	// Exchange sends a value to all ranks and returns the values of all ranks, by rank.
	Exchange(value []byte) ([][]byte, error)
}

// Swap sends a value to all ranks as JSON and returns the values of all ranks.
//
// All ranks must exchange the same kind of value, with one exception: a rank with a failed callback calls
// Between, whatever the next exchange of the other ranks is. If they call Swap for another purpose, it
// returns a [Failure].
func Swap[T any](e Ranks, what string, own T) ([]T, error) {
	text, err := json.Marshal(own)
	if err != nil {
		return nil, err
	}

	texts, err := e.Exchange(append([]byte(what+"\n"), text...))
	if err != nil {
		return nil, err
	}

	if err := failureIn(texts, what); err != nil {
		return nil, err
	}

	all := make([]T, len(texts))
	for r, text := range texts {
		kind, value, _ := bytes.Cut(text, []byte("\n"))
		if string(kind) != what {
			return nil, &mismatch{rank: r, kind: string(kind), own: e.Rank(), ownKind: what}
		}
		if err := json.Unmarshal(value, &all[r]); err != nil {
			return nil, fmt.Errorf("llm: rank %d exchanges %.40q: %w", r, kind, err)
		}
	}

	return all, nil
}

// A Failure is the error of a rank with a failed callback, received by the other ranks in place of a
// joint operation. Since all ranks have received it, it need not be exchanged again.
type Failure struct {
	Rank int
	Text string
}

func (f *Failure) Error() string { return fmt.Sprintf("rank %d: %s", f.Rank, f.Text) }

// failureIn returns the failure of the first rank that reported one instead of exchanging the same
// kind of value as this rank, or nil.
func failureIn(texts [][]byte, what string) error {
	if what == betweenSteps {
		return nil // the reports contain the errors of these ranks
	}
	for r, text := range texts {
		value, ok := bytes.CutPrefix(text, []byte(betweenSteps+"\n"))
		if !ok {
			continue
		}
		var b report
		if err := json.Unmarshal(value, &b); err == nil && b.Err != "" {
			return &Failure{r, strings.TrimPrefix(b.Err, "!")}
		}
	}
	return nil
}

// A mismatch is the error of ranks that exchange different kinds of values.
type mismatch struct {
	rank, own     int
	kind, ownKind string
}

func (m *mismatch) Error() string {
	return fmt.Sprintf("llm: rank %d exchanges %.40q, rank %d %q: all must do the same steps, saves "+
		"and growth", m.rank, m.kind, m.own, m.ownKind)
}

// TextOf encodes an error for other ranks; nil becomes an empty string.
func TextOf(err error) string {
	if err == nil {
		return ""
	}
	return "!" + err.Error()
}

// FirstError returns this rank's error, the error of the exchange, or the first error of another rank.
func FirstError(own error, all []string, failed error) error {
	if own != nil || failed != nil {
		return WithNews(own, failed)
	}
	for r, text := range all {
		if text != "" {
			return fmt.Errorf("rank %d: %s", r, strings.TrimPrefix(text, "!"))
		}
	}
	return nil
}

// WithNews joins errors, but omits an error if an earlier one already contains its text. After a rank
// dies, every later exchange fails with the same error.
func WithNews(errs ...error) (all error) {
	for _, err := range errs {
		switch {
		case all == nil:
			all = err
		case err != nil && !strings.Contains(all.Error(), err.Error()):
			all = errors.Join(all, err)
		}
	}
	return all
}

// A Word is the message that a rank sends along with a step, which saves an exchange after the step.
type Word struct {
	Stop    string // why the rank wants to stop; empty if it does not
	Waiting bool   // whether commands are waiting
}

// Heard summarizes the words of all ranks in the last step. It is cleared once it has been acted upon.
type Heard struct {
	Agreed bool // all ranks agreed on the step
	Word        // combined from all ranks
}

// Hear combines the words of all ranks. words is nil if the ranks did not agree on the step.
func Hear(words [][]byte) (h Heard, err error) {
	h.Agreed = words != nil
	for r, text := range words {
		var w Word
		if err := json.Unmarshal(text, &w); err != nil {
			return h, fmt.Errorf("llm: the word of rank %d: %w", r, err)
		}
		h.Stop = cmp.Or(h.Stop, w.Stop)
		h.Waiting = h.Waiting || w.Waiting
	}
	return h, nil
}

// A Wish is a rank's request to stop the run.
type Wish struct {
	End   bool   // whether the rank wants the run to stop
	Asked bool   // whether somebody asked for it; otherwise the rank's context is done
	Why   string // may be empty
}

// A report is the message that a rank sends after a step or an event.
type report struct {
	Err  string
	Wish Wish
}

// betweenSteps is the kind of value that Between exchanges.
const betweenSteps = "between steps"

// Between exchanges errors and requests to stop the run. It returns the first error, or the first such
// request with the rank that sent it.
//
// A rank with an error may call Between while the other ranks call Swap. Their Swap then returns the
// error as a [Failure].
func Between(e Ranks, err error, own Wish) (wish Wish, rank int, _ error) {
	all, failed := Swap(e, betweenSteps, report{TextOf(err), own})
	var other *mismatch
	if err != nil && errors.As(failed, &other) {
		return Wish{}, 0, err
	}

	errs := make([]string, len(all))
	for r, b := range all {
		errs[r] = b.Err
	}

	if err := FirstError(err, errs, failed); err != nil {
		return Wish{}, 0, err
	}

	for r, b := range all {
		if b.Wish.End {
			return b.Wish, r, nil
		}
	}

	return Wish{}, 0, nil
}

// A Request is a request made to a rank. It has the fields of llm.Request.
type Request struct {
	Commands []state.Command `json:"commands,omitempty"`
	Save     bool            `json:"save,omitempty"`
	Note     string          `json:"note,omitempty"`
}

// settled is the message a rank sends at the end of a step. It contains the reason why the step
// failed, or the commands and requests made to the rank.
type settled struct {
	Err      string
	Commands [][]state.Command
	Requests []Request
}

// Asked holds the commands and requests made to all ranks, in rank order.
type Asked struct {
	Commands [][]state.Command
	Requests []Request

	OwnCommands, OwnRequests int // indices of the first entries of this rank
}

// Settle exchanges the commands and requests made to each rank, or a rank's error.
func Settle(e Ranks, err error, commands [][]state.Command,
	requests []Request) (asked Asked, _ error) {
	own := settled{TextOf(err), portable(commands), portableRequests(requests)}
	all, failed := Swap(e, "commands", own)

	errs := make([]string, len(all))
	for r, s := range all {
		if r == e.Rank() {
			asked.OwnCommands, asked.OwnRequests = len(asked.Commands), len(asked.Requests)
		}
		errs[r] = s.Err
		asked.Commands = append(asked.Commands, s.Commands...)
		asked.Requests = append(asked.Requests, s.Requests...)
	}

	return asked, FirstError(err, errs, failed)
}

// portable returns the commands in a form that other ranks can read. Commands that cannot be encoded,
// for example because of a strategy, are replaced by a command that every rank rejects.
func portable(own [][]state.Command) [][]state.Command {
	for i, commands := range own {
		if _, err := json.Marshal(commands); err != nil {
			own[i] = []state.Command{{Action: state.Move, Layer: -1,
				Why: "other ranks cannot read it: " + err.Error()}}
		}
	}
	return own
}

// portableRequests returns the requests in a form that other ranks can read; see portable.
func portableRequests(own []Request) []Request {
	own = slices.Clone(own)
	for i := range own {
		own[i].Commands = portable([][]state.Command{own[i].Commands})[0]
	}
	return own
}

// Stand holds the state that must be equal on all ranks when a run starts. C is the type of the
// model's configuration.
type Stand[C any] struct {
	Step, Steps int
	Settings    *settings.Settings
	Loader      data.LoaderState
	Config      C
	Lattices    uint32
	Params      uint32
	Documents   bool
}

// Differences describes all differences between two ranks.
func (here Stand[C]) Differences(there Stand[C]) []string {
	diff := settings.Fields(here.Config, there.Config)
	diff = append(diff, here.Settings.DifferencesOfRanks(*there.Settings)...)
	for _, d := range []struct {
		what string
		same bool
	}{
		{"the text", here.Loader.Data == there.Loader.Data},
		{"the marking of documents", here.Documents == there.Documents},
		{"the loader's position", here.Loader == there.Loader ||
			here.Loader.Data != there.Loader.Data},
		{"the number of steps made", here.Step == there.Step},
		{"TrainConfig.Steps", here.Steps == there.Steps},
		{"the state of the lattices", here.Lattices == there.Lattices},
		{"the value of a parameter", here.Params == there.Params},
	} {
		if !d.same {
			diff = append(diff, d.what+" is different")
		}
	}

	return diff
}
