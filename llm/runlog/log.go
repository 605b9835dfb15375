// Package runlog tells of a training run, from its events alone. [Progress] tells the person who
// waits for it, [JSON] a file that programs and people read later, with [Read] or without.
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
	"github.com/kasmina-go/kasmina/llm/arch"
)

// JSON writes a line with one JSON object to the file at path, whose folders it makes, for every
// event. Each has "time", "event", "step" and "elapsed_s", the seconds since this process started
// the run, and by event:
//
//	start   steps, params (those that training changes), all_params, seeds; machine: what it runs on, where [On] says so; lattices: where
//	        the seeds are (name, site, places unless they are many, group), as in llm/arch.Lattice
//	ceiling ceiling: what the device reaches at best (product_flops_per_s, copy_bytes_per_s, type)
//	ways    choices: how each op is computed (op, shape, way, of: how many ways there were,
//	        source: why, times), before the first step
//	complete
//	epoch   epoch, layer, states: of each seed of a Kasmina layer, once an epoch and before the
//	        step's line, when somebody has steered seeds, and at the end of a run in which more has
//	        happened since; see below
//	step    train_loss (nats per token), learning_rate, grad_norm, tokens_per_s and flops_per_s
//	        (means since elapsed_s began)
//	eval    val_loss (nats per token), val_bpb (bits per byte)
//	corrupt error: what is wrong with the seeds of a layer, as llm.Scrub has found
//	saved   path
//	sample  text
//	note    text: what somebody has asked of the run
//	reshaped text: how the model's blocks have become others; params, all_params, lattices
//	profile ops (op, tasks, ns a step, bytes, flops, ways)
//	interrupted
//	failed  error
//	end     train_loss, tokens_per_s, val_loss, val_bpb, and error after a failure
//
// In an "epoch" line epoch is how many epochs of the lattices have ended. layer is the place of a
// layer in llm.Config.Kasmina, from 0, and each of the states has:
//
//	seed    its number in the layer, from 0
//	stage   such as "Grafting"
//	alpha   with which the output blends, from 0 to 1
//	health  of the activations that the seed looks after, when they were last measured: variance,
//	        mean, min and max in their own unit (variance in its square), dead_ratio (share from 0 to
//	        1 that is all but 0), snr (|mean| by standard deviation); null before the first time
//	events  if there were any since the last such line or the start: kind (a state.EventKind), epoch
//	        (as above), from and to (stages, which differ in a transition), value (of a kind that has
//	        one, else 0), reason (the first words)
//
// These numbers have four digits. A layer of many seeds takes several lines.
//
// A number that is NaN or infinite is null. An existing file is continued. After a resumption its
// lines may reach beyond the step of the "start" line, and what follows that line replaces them. A
// line that a killed process left half written is ended, and readers should pass over it.
func JSON(path string, opts ...Option) llm.Callback {
	var file *os.File
	var c config
	for _, opt := range opts {
		if opt != nil {
			opt(&c)
		}
	}
	failed := false // in this run, whose end need not be told of it again
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
		lines, err := linesOf(e, c)
		if err != nil {
			return err
		}
		// One write call: a killed process leaves at most its last line incomplete.
		_, err = file.Write(lines)
		if e.Kind == llm.RunEnd || err != nil {
			err = errors.Join(err, file.Close())
			file = nil
		}
		return err
	}
}

// An Option changes what JSON writes.
type Option func(*config)

type config struct{ machine map[string]string }

// On has the start line tell, as "machine", what the run is computed on. It tells the version of
// Go, the system, the processor's cores, and the given facts, such as device and precision. Pages
// of a run show them beside its settings.
func On(facts map[string]string) Option {
	return func(c *config) {
		c.machine = map[string]string{"go": runtime.Version(),
			"system": runtime.GOOS + "/" + runtime.GOARCH,
			"cores":  strconv.Itoa(runtime.NumCPU())}
		maps.Copy(c.machine, facts)
	}
}

// linesOf returns what the log has of an event.
func linesOf(e llm.Event, c config) (lines []byte, err error) {
	records := []Record{newRecord(e)}
	if e.Kind == llm.RunStart {
		records[0].Machine = c.machine
	}
	if e.Kind == llm.EpochEnd {
		records = epochRecords(e)
	}
	for _, r := range records {
		line, err := json.Marshal(r)
		if err != nil {
			return nil, err
		}
		lines = append(append(lines, line...), '\n')
	}
	return lines, nil
}

// openLog opens the file to append to, and ends its last line if that has no end.
func openLog(path string) (*os.File, error) {
	if path == "" {
		return nil, errors.New(`the path is "", want that of a file`)
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

// A Record is a line of the log; JSON says which fields it has by event.
type Record struct {
	Time           time.Time        `json:"time"`
	Event          string           `json:"event"`
	Step           int              `json:"step"`
	ElapsedSeconds float64          `json:"elapsed_s"`
	Steps          *int             `json:"steps,omitempty"`
	Budget         string           `json:"budget,omitempty"`
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
	Path           string           `json:"path,omitempty"`
	Text           string           `json:"text,omitempty"`
	Ops            []llm.OpTime     `json:"ops,omitempty"`
	Choices        []llm.Choice     `json:"choices,omitempty"`
	Epoch          *int             `json:"epoch,omitempty"`
	Layer          *int             `json:"layer,omitempty"`
	States         []SeedRecord     `json:"states,omitempty"`
	Error          string           `json:"error,omitempty"`
	// Machine is what the run is computed on: see [On].
	Machine  map[string]string `json:"machine,omitempty"`
	Lattices []arch.Lattice    `json:"lattices,omitempty"`
	Ceiling  *llm.Ceiling      `json:"ceiling,omitempty"`
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
		r.Lattices = lattices(e.Lattices)
		if e.Steps < math.MaxInt32 {
			r.Steps = &e.Steps
		}
	case llm.Complete:
		r.Event = "complete"
	case llm.StepEnd:
		r.Event, r.TrainLoss, r.LearningRate, r.GradNorm = "step", &loss, &learningRate, &gradNorm
		flopsPerS := jsonfloat.Float(e.RunFLOPs / e.Elapsed.Seconds())
		r.TokensPerS, r.FLOPsPerS = &tokensPerS, &flopsPerS
	case llm.EvalEnd:
		r.Event, r.ValLoss, r.ValBPB = "eval", &valLoss, &valBPB
	case llm.Saved:
		r.Event, r.Path = "saved", e.Path
	case llm.Sampled:
		r.Event, r.Text = "sample", e.Text
	case llm.Profiled:
		r.Event, r.Ops = "profile", e.Ops
	case llm.Chosen:
		r.Event, r.Choices = "ways", e.Choices
	case llm.Corrupted:
		r.Event = "corrupt"
	case llm.EpochEnd:
		r.Event = "epoch"
	case llm.Reshaped:
		r.Event, r.Text, r.Params, r.AllParams = "reshaped", e.Text, &e.Params, &e.AllParams
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
	}
	if e.Err != nil {
		r.Error = e.Err.Error()
	}
	return r
}

// Limits of a line that is read as a record. Those of steps have some hundred bytes, those of
// epochs some hundred for each of lineSeeds seeds. Values take more memory than the shortest text
// of them, so that it takes two limits to bound it.
const (
	maxRecord = 1 << 20 // bytes
	maxValues = 1 << 14
	maxLine   = 1 << 28 // of a line that is no record: a file without ends of lines is no log
)

// Read calls f with each record of the log at path, in order. Lines that are no records are passed
// over, and a file that does not exist has none. A file without ends of lines is an error.
func Read(path string, f func(Record)) error {
	_, err := ReadFrom(path, 0, f)
	return err
}

// ReadFrom is Read from a byte of the file on. It returns the byte behind the last line that has an
// end: from there on a log that is still being written is read later.
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

// readFrom calls f with the records of an open log from a byte on, and returns where the last line
// that has an end is over.
func readFrom(file *os.File, from int64, f func(Record)) (end int64, err error) {
	if _, err := file.Seek(from, io.SeekStart); err != nil {
		return from, err
	}
	end = from
	lines := bufio.NewReaderSize(file, maxRecord)
	for {
		line, err := lines.ReadSlice('\n')
		whole := int64(len(line))
		if errors.Is(err, bufio.ErrBufferFull) { // no record has so long a line
			var more int64
			more, err = skipLine(lines)
			line, whole = nil, whole+more
		}
		var r Record
		if bytes.Count(line, []byte{','}) < maxValues && json.Unmarshal(line, &r) == nil {
			f(r)
		}
		if err == io.EOF {
			if json.Valid(line) { // a last line without an end
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

// skipLine reads on to the end of a line, and returns how far that was.
func skipLine(lines *bufio.Reader) (n int64, err error) {
	for {
		line, err := lines.ReadSlice('\n')
		if n += int64(len(line)); !errors.Is(err, bufio.ErrBufferFull) {
			return n, err
		}
		if n > maxLine {
			return n, fmt.Errorf("it is no log: a line has more than %d bytes", maxLine)
		}
	}
}
