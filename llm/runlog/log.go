// Package runlog reports on a training run by means of its events.
//
// [Progress] shows a progress bar to the person watching the run. [JSON] writes a log that programs
// and people can read later, which [Read] reads and [Tail] follows while it is still growing.
package runlog

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"github.com/kasmina-go/kasmina/internal/jsonfloat"
	"github.com/kasmina-go/kasmina/internal/regular"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optime"
)

// JSON returns a callback that appends one line of JSON per event to the file at path. It creates the
// file and its parent directories if necessary.
//
// Every record contains "time", "event", "step" and "elapsed_s", the seconds since this process
// started the run. The remaining fields depend on the event:
//
//	start       steps, or budget and share; params (trainable), all_params, seeds; machine: facts about the
//	            computer, see [On]; lattices: the locations of the seeds (name, site, places,
//	            group), see llm/arch
//	ceiling     ceiling: the measured peak of the device (product_flops_per_s, copy_bytes_per_s,
//	            type)
//	ways        choices: the implementation chosen for each op (op, shape, way, of: the number of
//	            candidates, source: the reason, times), before the first step
//	complete
//	epoch       epoch, layer, states: the state of each seed, see below
//	step        train_loss (nats per token), learning_rate, grad_norm, tokens_per_s and flops_per_s
//	            (averages over elapsed_s), share (completed fraction of a run with a budget); rewards,
//	            if the run trains on preference pairs, see [Rewards]
//	eval        val_loss (nats per token), val_bpb (bits per byte), rewards; retention: the loss on
//	            the old text (see [llm.RetentionFigures]), if the run has a forgetting budget
//	corrupt     error: the damage that llm.Scrub found in the seeds of a layer
//	saved       path
//	sample      text
//	note        text: a request made of the run
//	reshaped    text: how the model has changed; params, all_params, seeds, lattices; error if it
//	            could not change
//	profile     ops (op, tasks, ns per step, bytes, flops, ways)
//	interrupted
//	failed      error
//	end         train_loss, tokens_per_s, val_loss, val_bpb, retention, and error after a failure
//
// An "epoch" record is written for each Kasmina layer at the end of an epoch, after a person steers
// seeds, and before the end of a run if there are further events. It precedes the "step" record of
// the same step, and a layer with many seeds is split over several records. "epoch" counts the
// completed epochs, and "layer" is an index into llm.Config.Kasmina. Each state contains:
//
//	seed        index in the layer, starting at 0
//	stage       for example "Grafting"
//	alpha       blending weight of the seed's output, 0 to 1
//	health      statistics of the activations at the seed when last measured: variance, mean, min,
//	            max, dead_ratio (fraction of values close to 0), snr (|mean| divided by the
//	            standard deviation); null before the first measurement
//	drift       relative change of mean and variance over the last epoch, if any
//	grad_norm   norm of the gradient at the seed, if measured
//	non_finite  number of NaN and Inf encountered, if any
//	kind, slot, size, epochs_in_stage, can_advance
//	            the blueprint, unless the seed is dormant
//	trial       result of comparing the model with and without the seed, if they were compared:
//	            delta (decrease of the held-out loss), improvement (delta relative to the loss),
//	            stability (fraction of the batches that agree)
//	events      events since the previous record: kind (a state.EventKind), epoch, from and to
//	            (stages), value, reason (first line)
//
// The numbers of a state are rounded to four digits. NaN and infinities are written as null.
//
// A resumed run appends to its log. The log may then contain records beyond the step of the last
// "start" record; the records after "start" replace them. If a process was killed while writing,
// its last line may be incomplete. JSON terminates that line, and readers skip it.
func JSON(path string, opts ...Option) llm.Callback {
	var file *os.File
	var c config
	for _, opt := range opts {
		if opt != nil {
			opt(&c)
		}
	}

	failed := false // a failed write ends the run, and RunEnd must not report it a second time
	return func(e llm.Event) (err error) {
		if failed = failed && e.Kind != llm.RunStart; failed {
			return nil
		}
		defer func() {
			if err != nil {
				failed = true
				err = fmt.Errorf("runlog: JSON: %w", err)
			}
		}()

		if file == nil {
			if file, err = openLog(path); err != nil {
				return err
			}
		}
		lines, err := encode(e, c)
		if err != nil {
			return err
		}

		// With a single write call, at most the last line is incomplete if the process is killed.
		_, err = file.Write(lines)
		if e.Kind == llm.RunEnd || err != nil {
			err = errors.Join(err, file.Close())
			file = nil
		}
		return err
	}
}

// An Option configures [JSON].
type Option func(*config)

type config struct{ machine map[string]string }

// On adds a description of the computer to the "start" record, under the key "machine". It consists
// of the Go version, the operating system, the number of cores, and the given facts, such as the
// device and the precision. The board lists it among the settings of the run.
func On(facts map[string]string) Option {
	return func(c *config) {
		c.machine = map[string]string{"go": runtime.Version(),
			"system": runtime.GOOS + "/" + runtime.GOARCH,
			"cores":  strconv.Itoa(runtime.NumCPU())}
		maps.Copy(c.machine, facts)
	}
}

// Records returns the records that [JSON] writes for an event, in order. An EpochEnd without reports
// yields none.
func Records(e llm.Event) []Record {
	if e.Kind == llm.EpochEnd {
		return epochRecords(e)
	}
	return []Record{newRecord(e)}
}

// encode returns the lines of an event.
func encode(e llm.Event, c config) (lines []byte, err error) {
	for _, r := range Records(e) {
		if e.Kind == llm.RunStart {
			r.Machine = c.machine
		}
		line, err := json.Marshal(r)
		if err != nil {
			return nil, err
		}
		lines = append(append(lines, line...), '\n')
	}

	return lines, nil
}

// openLog opens the file for appending, and creates missing directories. If a killed process left the
// last line incomplete, openLog ends it with a newline.
func openLog(path string) (*os.File, error) {
	if path == "" {
		return nil, errors.New(`the path is empty: pass the name of the log file`)
	}

	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return nil, err
	}

	f, size, err := regular.Append(path)
	if err != nil || size == 0 {
		return f, err
	}

	last := make([]byte, 1)
	if _, err = f.ReadAt(last, size-1); err == nil && last[0] != '\n' {
		_, err = f.Write([]byte{'\n'})
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}

	return f, nil
}

// A Record is a line of the log. See [JSON] for the fields of each event.
type Record struct {
	Time           time.Time        `json:"time"`
	Event          string           `json:"event"`
	Step           int              `json:"step"`
	ElapsedSeconds float64          `json:"elapsed_s"`
	Steps          *int             `json:"steps,omitempty"`
	Budget         string           `json:"budget,omitempty"`
	Share          *jsonfloat.Float `json:"share,omitempty"`
	Params         *int             `json:"params,omitempty"`
	AllParams      *int             `json:"all_params,omitempty"`
	Seeds          *int             `json:"seeds,omitempty"`
	TrainLoss      *jsonfloat.Float `json:"train_loss,omitempty"`
	LearningRate   *jsonfloat.Float `json:"learning_rate,omitempty"`
	GradNorm       *jsonfloat.Float `json:"grad_norm,omitempty"`
	TokensPerS     *jsonfloat.Float `json:"tokens_per_s,omitempty"`
	FLOPsPerS      *jsonfloat.Float `json:"flops_per_s,omitempty"`
	ValLoss        *jsonfloat.Float `json:"val_loss,omitempty"`
	ValBPB         *jsonfloat.Float `json:"val_bpb,omitempty"`
	Rewards        *Rewards         `json:"rewards,omitempty"`

	Retention *llm.RetentionFigures `json:"retention,omitempty"`

	Path    string          `json:"path,omitempty"`
	Text    string          `json:"text,omitempty"`
	Ops     []optime.OpTime `json:"ops,omitempty"`
	Choices []optime.Choice `json:"choices,omitempty"`
	Epoch   *int            `json:"epoch,omitempty"`
	Layer   *int            `json:"layer,omitempty"`
	States  []SeedRecord    `json:"states,omitempty"`
	Error   string          `json:"error,omitempty"`

	Machine  map[string]string `json:"machine,omitempty"` // see [On]
	Lattices []llm.Lattice     `json:"lattices,omitempty"`
	Ceiling  *optime.Ceiling   `json:"ceiling,omitempty"`
}

// Rewards describes preference pairs: the mean rewards of the chosen and the rejected answers, their mean
// difference, and the fraction of the pairs whose chosen answer has the higher reward.
type Rewards struct {
	Chosen   float64 `json:"chosen"`
	Rejected float64 `json:"rejected"`
	Margin   float64 `json:"margin"`
	Accuracy float64 `json:"accuracy"`
}

// rewards returns the rewards of pairs, or nil if there are none.
func rewards(f op.PreferenceFigures) *Rewards {
	if f.Pairs == 0 {
		return nil
	}
	n := float64(f.Pairs)
	return &Rewards{Chosen: f.Chosen / n, Rejected: f.Rejected / n, Margin: f.Margin(), Accuracy: f.Accuracy()}
}

// retention returns figures, or nil if the run has no old text.
func retention(f llm.RetentionFigures) *llm.RetentionFigures {
	if f.IsZero() {
		return nil
	}
	return &f
}

func newRecord(e llm.Event) Record {
	r := Record{Time: time.Now().UTC(), Step: e.Step, ElapsedSeconds: e.Elapsed.Seconds()}
	loss := jsonfloat.Float(e.Loss)
	valLoss, valBPB := jsonfloat.Float(e.ValLoss), jsonfloat.Float(e.ValBPB)
	learningRate, gradNorm := jsonfloat.Float(e.LearningRate), jsonfloat.Float(e.GradNorm)
	tokensPerS := jsonfloat.Float(float64(e.RunTokens) / e.Elapsed.Seconds())

	switch e.Kind {
	case llm.RunStart:
		r.Event, r.Params, r.Seeds, r.Budget = "start", &e.Params, &e.Seeds, e.Budget.String()
		r.AllParams = &e.AllParams
		r.Lattices, r.Share = lattices(e.Lattices), share(e)
		if e.Steps < math.MaxInt32 {
			r.Steps = &e.Steps
		}
	case llm.Complete:
		r.Event = "complete"
	case llm.StepEnd:
		r.Event, r.TrainLoss, r.LearningRate, r.GradNorm = "step", &loss, &learningRate, &gradNorm
		flopsPerS := jsonfloat.Float(e.RunFLOPs / e.Elapsed.Seconds())
		r.TokensPerS, r.FLOPsPerS, r.Share = &tokensPerS, &flopsPerS, share(e)
		r.Rewards = rewards(e.Preferences)
	case llm.EvalEnd:
		r.Event, r.ValLoss, r.ValBPB = "eval", &valLoss, &valBPB
		r.Rewards, r.Retention = rewards(e.ValPreferences), retention(e.Retention)
	case llm.Saved:
		r.Event, r.Path = "saved", e.Path
	case llm.Sampled:
		r.Event, r.Text = "sample", e.Text
	case llm.Profiled:
		r.Event, r.Ops = "profile", e.Ops
	case llm.Chosen:
		r.Event, r.Choices = "variants", e.Choices
	case llm.Corrupted:
		r.Event = "corrupt"
	case llm.EpochEnd:
		r.Event = "epoch"
	case llm.Reshaped:
		r.Event, r.Text = "reshaped", e.Text
		r.Params, r.AllParams, r.Seeds = &e.Params, &e.AllParams, &e.Seeds
		r.Lattices = lattices(e.Lattices)
	case llm.Measured:
		r.Event, r.Ceiling = "ceiling", &e.Ceiling
	case llm.Noted:
		r.Event, r.Text = "note", e.Text
	case llm.Interrupted:
		r.Event = "interrupted"
	case llm.Failed:
		r.Event = "failed"
	case llm.RunEnd:
		r.Event, r.TrainLoss, r.TokensPerS = "end", &loss, &tokensPerS
		r.ValLoss, r.ValBPB = &valLoss, &valBPB
		r.Retention = retention(e.Retention)
	}

	if e.Err != nil {
		r.Error = e.Err.Error()
	}

	return r
}

// share returns the completed fraction of a run with a budget, or nil for a run with a fixed number of
// steps.
func share(e llm.Event) *jsonfloat.Float {
	if e.Budget == (llm.Budget{}) {
		return nil
	}
	done := jsonfloat.Float(e.Share)
	return &done
}

// Limits of a record. A "step" record takes a few hundred bytes, and an "epoch" record a few hundred
// for each of at most lineSeeds seeds. Decoding can take much more memory than the text, so the
// number of values is limited too.
const (
	maxRecord = 1 << 20 // bytes
	maxValues = 1 << 14
	maxLine   = 1 << 28 // bytes of any line, since a file without line ends is not a log
)

// Read calls f for each record of the log at path, in order. It skips lines that are not records. If
// the file does not exist, Read returns no error. A file without line ends is an error.
func Read(path string, f func(Record)) error {
	_, err := ReadFrom(path, 0, f)
	return err
}

// ReadFrom is like [Read] but starts at a byte offset. It returns the offset after the last
// complete line, where a later call can continue.
func ReadFrom(path string, from int64, f func(Record)) (end int64, err error) {
	file, _, err := regular.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return from, nil
	}
	if err != nil {
		return from, fmt.Errorf("runlog: Read: %w", err)
	}
	defer file.Close()

	if end, err = readFrom(file, from, f); err != nil {
		return end, fmt.Errorf("runlog: Read: %w", err)
	}

	return end, nil
}

// readFrom calls f for the records of an open log, starting at a byte offset, and returns the
// offset after the last complete line.
func readFrom(file *os.File, from int64, f func(Record)) (end int64, err error) {
	if _, err := file.Seek(from, io.SeekStart); err != nil {
		return from, err
	}

	end = from
	lines := bufio.NewReaderSize(file, maxRecord)
	for {
		line, err := lines.ReadSlice('\n')
		whole := int64(len(line))
		if errors.Is(err, bufio.ErrBufferFull) { // too long for a record
			var more int64
			more, err = skipLine(lines)
			line, whole = nil, whole+more
		}

		var r Record
		if bytes.Count(line, []byte{','}) < maxValues && json.Unmarshal(line, &r) == nil {
			f(r)
		}

		if err == io.EOF {
			if json.Valid(line) { // complete except for the line end
				end += whole
			}
			return end, nil
		}
		if err != nil {
			return end, err
		}
		end += whole
	}
}

// skipLine reads the rest of a line and returns its length.
func skipLine(lines *bufio.Reader) (n int64, err error) {
	for {
		line, err := lines.ReadSlice('\n')
		if n += int64(len(line)); !errors.Is(err, bufio.ErrBufferFull) {
			return n, err
		}
		if n > maxLine {
			return n, fmt.Errorf("not a log: a line has more than %d bytes", maxLine)
		}
	}
}
