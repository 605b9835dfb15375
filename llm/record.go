package llm

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"slices"

	"github.com/kasmina-go/kasmina/internal/jsonfloat"
	"github.com/kasmina-go/kasmina/state"
)

// Decision is a line in a record of growth. It is a command from the controller or from a person, a
// person's request to save or to stop, or a change in the share of the budget visible to the run's
// steps.
//
// Notes of the controller and requests to save or to stop are recorded for information only. They do not
// affect the model, so a run that replays the record does not repeat them.
type Decision struct {
	Step  int     `json:"step"` // number of completed steps
	Share float64 `json:"share"`
	// loss averaged over the epoch's steps, for a command of the controller
	Loss    *jsonfloat.Float `json:"loss,omitempty"`
	Command *state.Command   `json:"command,omitempty"` // includes the reason for the command
	Refused string           `json:"refused,omitempty"` // why the command was rejected
	// whether the command was given in a run without text to judge blueprints on (Growth.Validation)
	Unjudged bool   `json:"unjudged,omitempty"`
	Note     string `json:"note,omitempty"` // predictions of the controller; see [state.Narrator]

	Asked string `json:"asked,omitempty"` // AskedToSave or AskedToStop
	Why   string `json:"why,omitempty"`   // who asked, and why
}

// Record contains all decisions made by a controller and the clock during a run. A run that replays
// the record reproduces the recorded run bit for bit; see Growth.Replay. The file may be edited; each
// line is a [Decision]. A Record is immutable, and any goroutine may call its methods.
type Record struct {
	commands map[int][]state.Command // the controller's, by number of completed steps
	steered  map[int][]state.Command // those of a person
	shares   map[int]float64
	last     int    // step
	unjudged bool   // whether the recorded run had no text to judge blueprints on
	sum      string // checksum of its lines
}

// MarshalJSON returns the record's checksum, which identifies it in a checkpoint.
func (r *Record) MarshalJSON() ([]byte, error) { return json.Marshal(r.sum) }

// maxDecisions limits the length of a record.
const maxDecisions = 1 << 20

// ReadRecord reads the lines written to Growth.Record. If a line is invalid, the error names the
// first such line.
func ReadRecord(r io.Reader) (*Record, error) {
	rec := &Record{commands: map[int][]state.Command{}, steered: map[int][]state.Command{}, shares: map[int]float64{}}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	n, sum := 0, sha256.New()
	for lines.Scan() {
		if n++; n > maxDecisions {
			return nil, fmt.Errorf("llm: ReadRecord: there are more than %d lines", maxDecisions)
		}
		if len(lines.Bytes()) == 0 {
			continue
		}
		sum.Write(lines.Bytes())
		sum.Write([]byte{0x0a})
		var d Decision
		if err := json.Unmarshal(lines.Bytes(), &d); err != nil {
			return nil, fmt.Errorf("llm: ReadRecord: line %d: %w", n, err)
		}
		if d.Step < rec.last || !(d.Share >= 0 && d.Share <= 1) {
			return nil,
				fmt.Errorf("llm: ReadRecord: line %d: step %d and share %v, want steps in order "+
					"from %d and a share from 0 to 1", n, d.Step, d.Share, rec.last)
		}
		rec.last, rec.shares[d.Step] = d.Step, d.Share
		rec.unjudged = rec.unjudged || d.Unjudged
		if d.Command != nil && d.Refused == "" {
			by := rec.commands
			if d.Loss == nil && d.Step > 0 { // before the first step, the controller has no loss
				by = rec.steered
			}
			by[d.Step] = append(by[d.Step], *d.Command)
		}
	}

	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("llm: ReadRecord: line %d: %w", n+1, err)
	}

	rec.sum = hex.EncodeToString(sum.Sum(nil))
	return rec, nil
}

// Commands returns the commands that take effect after the given number of steps.
func (r *Record) Commands(step int) []state.Command {
	return slices.Concat(r.commands[step], r.steered[step])
}

// Share returns the share of the budget that applies from the given step on, if it changed at that step.
func (r *Record) Share(step int) (share float64, changed bool) {
	share, changed = r.shares[step]
	return share, changed
}

// Write appends a decision to a record's file.
func (d Decision) Write(w io.Writer) error {
	line, err := json.Marshal(d)
	if err == nil {
		_, err = w.Write(append(line, '\n'))
	}
	if err != nil {
		return fmt.Errorf("llm: the record of growth: %w", err)
	}

	return nil
}
