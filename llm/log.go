package llm

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/kasmina-go/kasmina/internal/regular"
)

// JSONLog writes a line with one JSON object to the file at path, whose folders it makes, for every event. Each has "time",
// "event", "step" and "elapsed_s", the seconds since this process started the run, and by event:
//
//	start   steps, params, seeds
//	ways    choices: how each op is computed (op, shape, way, of: how many ways there were, source: why, times), before the first step
//	complete
//	step    train_loss (nats per token), learning_rate, grad_norm, tokens_per_s (mean since elapsed_s began)
//	eval    val_loss (nats per token), val_bpb (bits per byte)
//	saved   path
//	sample  text
//	profile ops (op, tasks, ns a step, bytes, flops, ways)
//	interrupted
//	failed  error
//	end     train_loss, tokens_per_s, val_loss, val_bpb, and error after a failure
//
// A number that is NaN or infinite is null. An existing file is continued: after a resumption its lines may reach beyond
// the step of the "start" line, and what follows that line replaces them. A line that a killed process left half written
// is ended, and readers should pass over it.
func JSONLog(path string) Callback {
	var file *os.File
	failed := false // in this run, whose end need not be told of it again
	return func(e Event) (err error) {
		if failed = failed && e.Kind != RunStart; failed {
			return nil
		}
		defer func() {
			if err != nil {
				failed = true
				err = fmt.Errorf("llm: JSONLog: %w", err)
			}
		}()
		if file == nil {
			if file, err = openLog(path); err != nil {
				return err
			}
		}
		line, err := json.Marshal(newLogRecord(e))
		if err != nil {
			return err
		}
		// One write call a line: a killed process leaves at most its last line incomplete.
		_, err = file.Write(append(line, '\n'))
		if e.Kind == RunEnd || err != nil {
			err = errors.Join(err, file.Close())
			file = nil
		}
		return err
	}
}

// openLog opens the file to append to, and ends its last line if that has no end.
func openLog(path string) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o666)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && info.Size() > 0 {
		last := make([]byte, 1)
		if _, err = f.ReadAt(last, info.Size()-1); err == nil && last[0] != '\n' {
			_, err = f.Write([]byte{'\n'})
		}
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// A logRecord is a line of the log.
type logRecord struct {
	Time           time.Time `json:"time"`
	Event          string    `json:"event"`
	Step           int       `json:"step"`
	ElapsedSeconds float64   `json:"elapsed_s"`
	Steps          *int      `json:"steps,omitempty"`
	Params         *int      `json:"params,omitempty"`
	Seeds          *int      `json:"seeds,omitempty"`
	TrainLoss      *number   `json:"train_loss,omitempty"`
	LearningRate   *number   `json:"learning_rate,omitempty"`
	GradNorm       *number   `json:"grad_norm,omitempty"`
	TokensPerS     *number   `json:"tokens_per_s,omitempty"`
	ValLoss        *number   `json:"val_loss,omitempty"`
	ValBPB         *number   `json:"val_bpb,omitempty"`
	Path           string    `json:"path,omitempty"`
	Text           string    `json:"text,omitempty"`
	Ops            []OpTime  `json:"ops,omitempty"`
	Choices        []Choice  `json:"choices,omitempty"`
	Error          string    `json:"error,omitempty"`
}

func newLogRecord(e Event) logRecord {
	r := logRecord{Time: time.Now().UTC(), Step: e.Step, ElapsedSeconds: e.Elapsed.Seconds()}
	loss, valLoss, valBPB := number(e.Loss), number(e.ValLoss), number(e.ValBPB)
	learningRate, gradNorm := number(e.LearningRate), number(e.GradNorm)
	tokensPerS := number(float64(e.RunTokens) / e.Elapsed.Seconds())
	switch e.Kind {
	case RunStart:
		r.Event, r.Steps, r.Params, r.Seeds = "start", &e.Steps, &e.Params, &e.Seeds
	case Complete:
		r.Event = "complete"
	case StepEnd:
		r.Event, r.TrainLoss, r.LearningRate, r.GradNorm = "step", &loss, &learningRate, &gradNorm
		r.TokensPerS = &tokensPerS
	case EvalEnd:
		r.Event, r.ValLoss, r.ValBPB = "eval", &valLoss, &valBPB
	case Saved:
		r.Event, r.Path = "saved", e.Path
	case Sampled:
		r.Event, r.Text = "sample", e.Text
	case Profiled:
		r.Event, r.Ops = "profile", e.Ops
	case Chosen:
		r.Event, r.Choices = "ways", e.Choices
	case Interrupted:
		r.Event = "interrupted"
	case Failed:
		r.Event = "failed"
	case RunEnd:
		r.Event, r.TrainLoss, r.ValLoss, r.ValBPB, r.TokensPerS = "end", &loss, &valLoss, &valBPB, &tokensPerS
	}
	if e.Err != nil {
		r.Error = e.Err.Error()
	}
	return r
}

// A number is null in JSON when it is NaN or infinite, for which JSON has no words.
type number float64

// MarshalJSON implements json.Marshaler.
func (n number) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(n)) || math.IsInf(float64(n), 0) {
		return []byte("null"), nil
	}
	return json.Marshal(float64(n))
}

// maxRecord is the longest line that is read as a record, in bytes. Those of steps have some
// hundreds.
const maxRecord = 1 << 20

// readLog calls f with each record of the log at path, in order. Lines that are no records are passed over, and a file
// that does not exist has none.
func readLog(path string, f func(logRecord)) error {
	file, _, err := regular.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	lines := bufio.NewReaderSize(file, maxRecord)
	for {
		line, err := lines.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) { // no record has so long a line
			line, err = nil, skipLine(lines)
		}
		var r logRecord
		if json.Unmarshal(line, &r) == nil {
			f(r)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// skipLine reads on to the end of a line.
func skipLine(lines *bufio.Reader) error {
	for {
		if _, err := lines.ReadSlice('\n'); !errors.Is(err, bufio.ErrBufferFull) {
			return err
		}
	}
}
