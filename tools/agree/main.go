// Command agree trains a model from the same weights and on the same batches on a CPU, on a GPU and in
// PyTorch, and compares the losses of every step.
//
//	go run ./tools/agree write run                            # weights, batches and settings; -model 124M selects the large model
//	go run ./tools/agree train run                            # on the CPU
//	go run ./tools/agree train -device cuda run               # on the GPU; -precision selects bf16 or f8,
//	                                                             # and -grad-precision the type of weight gradients
//	python3 tools/agree/torch_agree.py run                    # in PyTorch; --device cuda, --precision bf16
//	go run ./tools/agree compare -tolerance 1e-4 run
//
// By default, the batches contain a synthetic language: ids follow Zipf's law, and three in four are one
// of four fixed followers of the previous id. With -text, they contain windows of real text, in an order
// that depends on -seed. Several runs then show whether programs differ more than seeds:
//
//	for seed in 1 2 3; do go run ./tools/agree write -model 124M -text ~/text -seed $seed -steps 1000 run$seed; done
//	go run ./tools/agree noise run1 run2 run3                 # after the training of each
package main

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/regular"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
)

// The files of a run. The losses of a program are in lossPrefix + program + ".json".
const (
	modelFile    = "model.safetensors"
	tokenFile    = "tokens.i32" // [Steps, Batch, Seq + 1], little-endian
	settingsFile = "settings.json"
	lossPrefix   = "losses."
)

// settings holds everything that the programs must have in common. Parameters with fewer than two
// dimensions have no weight decay.
type settings struct {
	Model   llm.Config `json:"model"`
	Batch   int        `json:"batch"`
	Rates   []float64  `json:"learning_rates"` // one for each step
	Beta1   float64    `json:"beta1"`
	Beta2   float64    `json:"beta2"`
	Epsilon float64    `json:"epsilon"`
	Decay   float64    `json:"weight_decay"`
	Clip    float64    `json:"clip"` // limit of the global gradient norm
}

// models lists the models that write can write, with their default batch and steps. The learning rate
// rises to its peak over a share of the steps. For the large model it rises slowly, because a loss that
// jumps says nothing about precision.
var models = map[string]struct {
	config       llm.Config
	batch, steps int
	rate, rising float64
}{
	"small": {llm.Config{Vocab: 256, Dim: 128, Layers: 3, Heads: 4, KVHeads: 2, Seq: 64}, 4, 20,
		1e-3, 0.1},
	"124M": {llm.Config{Vocab: 50304, Dim: 768, Layers: 12, Heads: 12, FF: 2048, Seq: 1024}, 16,
		200, 2e-4, 0.5},
}

func main() {
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "agree:", err)
		os.Exit(1)
	}
}

func run(args []string, out, stderr io.Writer) error {
	const usage = "want write, train, compare or noise, then options, then the folder of the run"
	if len(args) == 0 {
		return errors.New(usage)
	}

	command := ""
	if !strings.HasPrefix(args[0], "-") {
		command, args = args[0], args[1:]
	}

	f := flag.NewFlagSet("agree", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.Usage = func() {
		fmt.Fprintln(stderr,
			"usage: agree write | train | compare [options] FOLDER\n       agree noise [options] FOLDER FOLDER ...")
		f.PrintDefaults()
	}
	model := f.String("model", "small", "write: the model, small or 124M")
	batch := f.Int("batch", 0, "write: sequences in a batch (default: the model's)")
	steps := f.Int("steps", 0, "write: steps (default: the model's)")
	seed := f.Uint64("seed", 1, "write: random seed for the weights and for the order of a text's windows")
	text := f.String("text", "",
		"write: folder of text to learn from, or go for the sources of the Go installation (default: a synthetic language)")
	bpe := f.String("bpe", "",
		"write: file of the byte-pair encoding for a text with the 124M model; trained on the text if it does\n"+
			"not exist (default: tokenizer.bpe in the folder of the run)")
	rate := f.Float64("rate", 0, "write: peak learning rate (default: the model's)")
	rising := f.Float64("rising", 0,
		"write: share of the steps during which the learning rate rises (default: the model's)")
	span := f.Int("span", 50, "noise: number of steps to average")
	var how training
	f.StringVar(&how.device, "device", "cpu", "train: where to train, cpu or cuda")
	f.TextVar(&how.precision, "precision", cudaops.Float32,
		"train: precision, f32 or, on cuda, bf16, f16 or f8")
	f.TextVar(&how.gradients, "grad-precision", cudaops.Float32,
		"train: type of the gradients of weights, f32 or, with bf16 and f8, bf16")
	tolerance := f.Float64("tolerance", math.Inf(1),
		"compare: largest relative difference that is accepted")
	if err := f.Parse(args); err != nil {
		return err
	}

	switch {
	case command == "":
		return fmt.Errorf("the first argument is an option: %s", usage)
	case !slices.Contains([]string{"write", "train", "compare", "noise"}, command):
		return fmt.Errorf("unknown command %q: %s", command, usage)
	case command == "noise":
		return noise(f.Args(), *span, out)
	case f.NArg() != 1:
		return fmt.Errorf("%s: got %d arguments after the options, want one, the folder of the run",
			command, f.NArg())
	}

	dir := f.Arg(0)
	switch command {
	case "write":
		return plan{*model, *batch, *steps, *seed, *text, *bpe, *rate, *rising}.write(dir)
	case "train":
		return how.train(dir, out)
	default:
		return compare(dir, *tolerance, out)
	}
}

// plan holds the options of write; a zero selects the model's default.
type plan struct {
	model        string
	batch, steps int
	seed         uint64
	text, bpe    string
	rate, rising float64
}

// write creates the folder of a run. It removes losses of an earlier run in the same folder.
func (p plan) write(dir string) error {
	m, ok := models[p.model]
	if !ok {
		return fmt.Errorf("-model is %q, want small or 124M", p.model)
	}

	batch, steps := cmp.Or(p.batch, m.batch), cmp.Or(p.steps, m.steps)
	rate, rising := cmp.Or(p.rate, m.rate), cmp.Or(p.rising, m.rising)
	if batch < 1 || steps < 1 {
		return fmt.Errorf("-batch is %d and -steps %d, want at least 1", batch, steps)
	}

	if !(rate > 0) || !(rising > 0 && rising <= 1) {
		return fmt.Errorf(
			"-rate is %g and -rising %g, want a rate above 0, and a share above 0 and not above 1",
			rate, rising)
	}

	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}

	s := settings{Model: m.config.Default(), Batch: batch, Beta1: 0.9, Beta2: 0.95,
		Epsilon: 1e-8, Decay: 0.1, Clip: 1}
	for i := range steps {
		s.Rates = append(s.Rates, rate*min(1, float64(i+1)/math.Ceil(float64(steps)*rising)))
	}

	model, err := llm.NewModel(s.Model, tensor.Float32, p.seed)
	if err != nil {
		return err
	}

	var text *data.Loader
	if p.text != "" {
		if text, err = openText(s, p.text, cmp.Or(p.bpe, filepath.Join(dir, "tokenizer.bpe")),
			p.seed); err != nil {
			return err
		}
	}

	if err := removeLosses(dir); err != nil { // only now that nothing else can fail
		return err
	}

	if err := model.Save(filepath.Join(dir, modelFile)); err != nil {
		return err
	}

	path := filepath.Join(dir, tokenFile)
	if text == nil {
		err = writeTokens(path, s.Model.Vocab, steps*batch, s.Model.Seq+1)
	} else {
		err = writeText(path, s, text)
	}
	if err != nil {
		return err
	}

	return writeJSON(filepath.Join(dir, settingsFile), s)
}

func removeLosses(dir string) error {
	old, err := filepath.Glob(filepath.Join(dir, lossPrefix+"*.json"))
	for _, f := range old {
		err = errors.Join(err, os.Remove(f))
	}
	return err
}

func writeJSON(path string, v any) error {
	text, err := json.MarshalIndent(v, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o666)
}

func readJSON(path string, v any) error {
	text, err := regular.Read(path, 16<<20, "a file of settings or losses has")
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, v); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// writeTokens writes sequences of the synthetic language.
func writeTokens(path string, vocab, sequences, length int) error {
	r := rand.New(rand.NewPCG(5, 5))
	zipf := func(u float64) int { return min(vocab-1, int(math.Exp(u*math.Log(float64(vocab))))-1) }
	raw := make([]byte, 0, 4*sequences*length)
	for range sequences {
		id := zipf(r.Float64())
		for range length {
			raw = binary.LittleEndian.AppendUint32(raw, uint32(id))
			if r.IntN(4) == 0 {
				id = zipf(r.Float64())
			} else { // one of the followers: a fixed function of the id and its number
				id = zipf(rand.New(rand.NewPCG(uint64(id), r.Uint64N(4))).Float64())
			}
		}
	}

	return os.WriteFile(path, raw, 0o666)
}

// batches reads the tokens of a run, one batch for each step.
func batches(dir string, s settings) ([]data.Batch, error) {
	path := filepath.Join(dir, tokenFile)
	length := s.Model.Seq + 1
	want := 4 * len(s.Rates) * s.Batch * length
	raw, err := regular.Read(path, int64(want), "the settings' tokens have")
	if err != nil {
		return nil, err
	}

	if len(raw) != want {
		return nil, fmt.Errorf("%s has %d bytes, want %d", path, len(raw), want)
	}

	all := make([]data.Batch, len(s.Rates))
	for i := range all {
		for range s.Batch {
			for t := range length {
				id := int(binary.LittleEndian.Uint32(raw[4*t:]))
				if t < length-1 {
					all[i].Inputs = append(all[i].Inputs, id)
				}
				if t > 0 {
					all[i].Targets = append(all[i].Targets, id)
				}
			}
			raw = raw[4*length:]
		}
		all[i].Count = len(all[i].Targets)
	}

	return all, nil
}

// compare prints the losses of all programs and their spread, which is (largest − smallest) / smallest.
// It returns an error if the spread exceeds the tolerance.
func compare(dir string, tolerance float64, out io.Writer) error {
	files, err := filepath.Glob(filepath.Join(dir, lossPrefix+"*.json"))
	if err != nil {
		return err
	}

	if len(files) < 2 {
		return fmt.Errorf("%s has the losses of %d programs, want at least 2, as train and "+
			"torch_agree.py write them", dir, len(files))
	}

	slices.Sort(files)
	var losses [][]float64
	fmt.Fprintf(out, "%4s", "step")
	for _, f := range files {
		var l []float64
		if err := readJSON(f, &l); err != nil {
			return err
		}
		if len(losses) > 0 && len(l) != len(losses[0]) {
			return fmt.Errorf("%s has %d losses, and %s %d", f, len(l), files[0], len(losses[0]))
		}
		losses = append(losses, l)
		fmt.Fprintf(out, " %20s",
			strings.TrimSuffix(strings.TrimPrefix(filepath.Base(f), lossPrefix), ".json"))
	}

	fmt.Fprintf(out, " %9s\n", "spread")
	worst, where := 0.0, 0
	for i := range losses[0] {
		least, most := math.Inf(1), math.Inf(-1)
		fmt.Fprintf(out, "%4d", i+1)
		for _, l := range losses {
			fmt.Fprintf(out, " %20.7f", l[i])
			least, most = min(least, l[i]), max(most, l[i])
		}
		spread := (most - least) / least
		fmt.Fprintf(out, " %9.2e\n", spread)
		if !(spread <= worst) {
			worst, where = spread, i+1
		}
	}

	fmt.Fprintf(out, "largest spread: %.2e at step %d\n", worst, where)
	if !(worst <= tolerance) {
		return fmt.Errorf("the losses of step %d differ by %.2e, more than %.2e",
			where, worst, tolerance)
	}

	return nil
}
