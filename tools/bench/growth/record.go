package growth

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/llm"
)

// A job is one run of a benchmark: an arm, on a budget, from a random seed.
type job struct {
	Arm arm `json:"arm"`
	// Budget is the number of tokens that the largest static model sees for each parameter in its
	// blocks. Every arm spends as much as that model.
	Budget float64 `json:"tokens_per_parameter"`
	// Equal is "flops" or "time", the quantity that every run on the budget spends.
	Equal string `json:"equal"`
	Seed  uint64 `json:"random_seed"`
}

// name returns the name of the job's files without an extension.
func (j job) name() string {
	return fmt.Sprintf("%s-%s-seed%d-%v", j.Equal, formatNumber(j.Budget), j.Seed, j.Arm)
}

// A record is the result of a job.
type record struct {
	job
	// Failed is the reason why the run has no result, such as an infinite loss.
	Failed string `json:"failed,omitempty"`

	Loss       float64      `json:"loss"` // held out, in nats per byte
	Steps      int          `json:"steps"`
	Tokens     int64        `json:"tokens"`
	FLOPs      float64      `json:"flops"`
	Seconds    float64      `json:"seconds"` // of steps, decisions and growth, without evaluations
	Parameters int          `json:"parameters"`
	Weights    string       `json:"weights,omitempty"` // SHA-256 of the parameters at the end
	Device     string       `json:"device"`
	Growths    []growth     `json:"growths,omitempty"`
	Notes      []string     `json:"notes,omitempty"`    // the controller's predictions
	Curve      []curvePoint `json:"curve"`              // held-out losses
	Training   [][2]float64 `json:"training,omitempty"` // pairs of a share and the mean training loss up to it, per token
}

// growth is a change of the number of blocks during a run.
type growth struct {
	Share  float64 `json:"share"`
	Step   int     `json:"step"`
	Blocks int     `json:"blocks"`
	Text   string  `json:"text"`
}

// curvePoint is a held-out loss at a share of the budget.
type curvePoint struct {
	Share   float64 `json:"share"`
	Seconds float64 `json:"seconds"`
	Tokens  int64   `json:"tokens"`
	Blocks  int     `json:"blocks"`
	Loss    float64 `json:"loss"`
}

// shareTo returns the share of the budget after which the run first reached a loss, or false if it
// never did. It interpolates between evaluations.
func (r record) shareTo(loss float64) (float64, bool) {
	var before curvePoint
	for i, p := range r.Curve {
		if p.Loss > loss {
			before = p
			continue
		}
		if i == 0 {
			return p.Share, true
		}
		return before.Share + (p.Share-before.Share)*(before.Loss-loss)/(before.Loss-p.Loss), true
	}

	return 0, false
}

// A study is a folder with the records of a benchmark. Its models differ only in their arms.
type study struct {
	dir     string
	records map[string]record // by the names of their jobs
	studySettings
}

// studySettings are the settings shared by all runs of a study.
type studySettings struct {
	Largest   llm.Config `json:"largest"` // the configuration of the largest static model
	Batch     int        `json:"batch"`
	Precision string     `json:"precision"`
	Tokens    string     `json:"tokens"`   // fingerprint of the training text
	HeldOut   string     `json:"held_out"` // fingerprint of the held-out text

	// Speed of the largest static model in FLOPs per second, which converts a budget to a time.
	Speed float64 `json:"speed,omitempty"`
}

// openStudy opens or creates a folder of records. It returns an error if the folder contains records of runs with other
// settings.
func openStudy(dir string, settings studySettings) (*study, error) {
	s := &study{dir: dir, records: map[string]record{}, studySettings: settings}
	var stored studySettings
	switch err := readJSON(s.path("study"), &stored); {
	case errors.Is(err, fs.ErrNotExist):
		return s, s.saveSettings()
	case err != nil:
		return nil, err
	}

	s.Speed = stored.Speed
	if !reflect.DeepEqual(stored, s.studySettings) {
		return nil, fmt.Errorf("%s contains runs of another model, text or precision: choose another "+
			"-out, or use the options of its runs", dir)
	}

	return s, s.readRecords()
}

// loadStudy opens an existing folder of records for a report.
func loadStudy(dir string) (*study, error) {
	s := &study{dir: dir, records: map[string]record{}}
	if err := readJSON(s.path("study"), &s.studySettings); err != nil {
		return nil, err
	}
	return s, s.readRecords()
}

// packedName is the name of the file for all packed records, one per line.
const packedName = "records.jsonl"

// pack moves all records into one file, without their training losses, which take most of the space.
func (s *study) pack() error {
	var lines []byte
	for _, name := range slices.Sorted(maps.Keys(s.records)) {
		r := s.records[name]
		r.Training = nil
		line, err := json.Marshal(r)
		if err != nil {
			return err
		}
		lines = append(append(lines, line...), '\n')
	}

	if err := atomicfile.WriteMkdir(filepath.Join(s.dir, packedName), func(f *os.File) error {
		_, err := f.Write(lines)
		return err
	}); err != nil {
		return err
	}

	for _, name := range slices.Sorted(maps.Keys(s.records)) {
		if err := os.Remove(s.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}

	return nil
}

// readRecords reads the packed records and the single ones.
func (s *study) readRecords() error {
	packed, err := os.ReadFile(filepath.Join(s.dir, packedName))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}

	for line := range bytes.Lines(packed) {
		var r record
		if err := json.Unmarshal(line, &r); err != nil {
			return fmt.Errorf("%s: %w", filepath.Join(s.dir, packedName), err)
		}
		s.records[r.name()] = r
	}

	paths, err := filepath.Glob(filepath.Join(s.dir, "*-seed*.json"))
	if err != nil {
		return err
	}

	for _, path := range paths {
		var r record
		if err := readJSON(path, &r); err != nil {
			return err
		}
		if name := strings.TrimSuffix(filepath.Base(path), ".json"); name != r.name() {
			return fmt.Errorf("%s is the record of %s: rename it", path, r.name())
		}
		s.records[r.name()] = r
	}

	return nil
}

// path returns the path of a file of the study.
func (s *study) path(name string) string { return filepath.Join(s.dir, name+".json") }

// add stores the record of a run in memory and in a file.
func (s *study) add(r record) error {
	if err := writeJSON(s.path(r.name()), r); err != nil {
		return err
	}
	s.records[r.name()] = r
	return nil
}

func (s *study) saveSettings() error { return writeJSON(s.path("study"), s.studySettings) }

func readJSON(path string, v any) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, v); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

func writeJSON(path string, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return atomicfile.WriteMkdir(path, func(f *os.File) error {
		_, err := f.Write(append(text, '\n'))
		return err
	})
}
