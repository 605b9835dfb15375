package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/hf"
	tokenizers "github.com/kasmina-go/kasmina/llm/tokenizer/hf"
	"github.com/kasmina-go/kasmina/state"
)

// A preset is a size for a new model: the values of options, by name.
type preset map[string]string

// defaultPreset supplies the missing values for explicit sizes.
const defaultPreset = "small"

// presetNames lists the presets by size.
var presetNames = []string{defaultPreset, "124M", "350M", "925M"}

// presets sets every option of a new model. The large presets have the sizes that are common in
// benchmarks of training.
var presets = map[string]preset{
	defaultPreset: {"layers": "4", "dim": "192", "heads": "4", "seq": "256", "vocab": "2048",
		"batch": "8", "steps": "1000", "optimizer": "muon"},
	"124M": large(preset{"layers": "12", "dim": "768", "heads": "12", "ff": "2048", "seq": "1024",
		"batch": "32", "steps": "2000"}),
	"350M": large(preset{"layers": "24", "dim": "1024", "heads": "16", "ff": "2816", "seq": "1024",
		"batch": "16", "steps": "4000"}),
	"925M": large(preset{"layers": "16", "dim": "2048", "heads": "16", "ff": "5632", "seq": "2048",
		"batch": "8", "steps": "4000"}),
}

// large adds the common values of the presets for GPUs.
func large(p preset) preset {
	maps.Copy(p, preset{"vocab": "50257", "optimizer": "adamw", "eval-every": "250",
		"save-every": "1000"})
	return p
}

// presetRates are the peak learning rates for AdamW. The large presets use the rates of GPT-3 models of
// similar size (Brown et al., "Language Models are Few-Shot Learners", 2020).
var presetRates = map[string]float64{defaultPreset: 3e-3, "124M": 6e-4, "350M": 3e-4, "925M": 2.5e-4}

// scratch holds the options of a model that is trained from scratch.
type scratch struct {
	preset    string
	sizes     llm.Config
	vocab     int
	tokenizer string
}

func (s *scratch) flags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&s.preset, "preset", "", "train a new model of this size: "+
		strings.Join(presetNames, ", ")+"; other options override its values")
	f.IntVar(&s.sizes.Layers, "layers", 0, "blocks of a new model")
	f.IntVar(&s.sizes.Dim, "dim", 0, "features of a new model's residual stream")
	f.IntVar(&s.sizes.Heads, "heads", 0, "attention heads in each block of a new model")
	f.IntVar(&s.sizes.KVHeads, "kv-heads", 0, "key-value heads in each block (default: as many as --heads)")
	f.IntVar(&s.sizes.FF, "ff", 0, "hidden features of each feed-forward layer (default: 8/3 of --dim)")
	f.BoolVar(&s.sizes.Untied, "untied", false, "use separate weights for the embedding and the output layer of a new model")
	f.IntVar(&s.vocab, "vocab", 0, "train a tokenizer with this many tokens on the text, 257 or more")
	f.StringVar(&s.tokenizer, "tokenizer", "", "use the tokenizer in this `path`, a tokenizer.json or a "+
		"model directory, instead of training one")

	completeFlag(c, "preset", presetNames...)
	c.MarkFlagsOneRequired("model", "preset", "layers")
	c.MarkFlagsMutuallyExclusive("model", "preset")
	c.MarkFlagsMutuallyExclusive("model", "layers")
	c.MarkFlagsMutuallyExclusive("vocab", "tokenizer")
}

// requireModel returns an error unless the command line says which model to train.
func requireModel(c *cobra.Command) error {
	if len(given(c, "model", "preset", "layers")) > 0 {
		return nil
	}
	return flagError(c, errors.New("there is no model to train: give --preset or --layers for a new one, or --model "+
		"for an existing one"))
}

// resolve sets the options of a new model that are missing on the command line to the values of the
// preset.
func (o *trainOptions) resolve(c *cobra.Command) error {
	o.learning.base = usualRate
	if o.model != "" {
		return nil
	}

	if o.text.cache == "" {
		o.text.cache = cacheFolder()
	}

	if o.scratch.preset == "" {
		o.scratch.preset = defaultPreset
	}

	values := presets[o.scratch.preset]
	if values == nil {
		return fmt.Errorf("--preset is %.40q, want one of %s", o.scratch.preset,
			strings.Join(presetNames, ", "))
	}

	o.learning.base = presetRates[o.scratch.preset]

	for _, name := range slices.Sorted(maps.Keys(values)) {
		f := c.Flags().Lookup(name)
		if f.Changed || name == "vocab" && o.scratch.tokenizer != "" {
			continue
		}
		if err := f.Value.Set(values[name]); err != nil {
			return fmt.Errorf("--%s: %w", name, err)
		}
	}

	return nil
}

// meantForGPU reports whether a step of the new model takes very long on a CPU. A block has about 12·dim²
// parameters.
func (s *scratch) meantForGPU() bool { return 12*s.sizes.Layers*s.sizes.Dim*s.sizes.Dim > 50_000_000 }

// check returns an error for impossible sizes. The run multiplies the number of blocks by grow.
func (s *scratch) check(grow int) error {
	z := s.sizes
	for _, size := range []struct {
		name         string
		value, least int
	}{{"layers", z.Layers, 1}, {"dim", z.Dim, 1}, {"heads", z.Heads, 1}, {"kv-heads", z.KVHeads, 0},
		{"ff", z.FF, 0}} {
		if size.value < size.least {
			return fmt.Errorf("--%s is %d, want at least 1", size.name, size.value)
		}
	}

	switch {
	case z.Dim%(2*z.Heads) != 0:
		return fmt.Errorf("--dim is %d, want a multiple of %d, which is twice --heads", z.Dim, 2*z.Heads)
	case z.KVHeads > 0 && z.Heads%z.KVHeads != 0:
		return fmt.Errorf("--kv-heads is %d, want a divisor of --heads, %d", z.KVHeads, z.Heads)
	case grow > 1 && z.Layers%grow != 0:
		return fmt.Errorf("--grow is %d, want a divisor of --layers, %d: a new model starts with "+
			"--layers divided by --grow blocks", grow, z.Layers)
	case s.tokenizer == "" && (s.vocab < 257 || s.vocab > 1<<20):
		return fmt.Errorf("--vocab is %d, want 257 to %d", s.vocab, 1<<20)
	}

	return nil
}

// A newModel is the origin of a run that trains from scratch.
type newModel struct {
	config llm.Config
	seed   uint64
	tok    vocabulary
	folder string            // of the tokenizer's files
	files  map[string][]byte // to be written to folder
}

// New models round their vocabulary up to a multiple of vocabularyMultiple, which makes matrix products
// fast.
const vocabularyMultiple = 64

// fromScratch returns the origin of a new model. A continued run keeps its tokenizer.
func (o *trainOptions) fromScratch(c *cobra.Command, m machines, s stage, text *data.Text) (origin,
	error) {
	n := &newModel{config: o.scratch.sizes, seed: o.seed, folder: o.scratch.tokenizer}
	if n.folder == "" {
		n.folder = o.in(tokenizerFolder)
		if err := o.learnTokenizer(c, m, s, text, n); err != nil {
			return nil, err
		}
	} else {
		tok, err := tokenizers.Load(n.folder)
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w: want a tokenizer.json, or a directory that has one", err)
		}
		if err != nil {
			return nil, fmt.Errorf("--tokenizer: %w", err)
		}
		n.tok.Tokenizer = tok
	}

	if o.text.documents && n.tok.EndOfDocument() < 0 {
		return nil, fmt.Errorf("--documents needs a tokenizer with an end-of-text token, and the "+
			"tokenizer_config.json next to %s names none", n.folder)
	}

	ids := n.tok.Tokenizer.VocabSize()
	n.tok.size = (ids + vocabularyMultiple - 1) / vocabularyMultiple * vocabularyMultiple
	n.config.Vocab, n.config.Seq = n.tok.size, o.seq
	if o.grow > 1 {
		n.config.Layers /= o.grow
	}

	n.config = n.config.Default()
	if err := n.config.Check(); err != nil {
		return nil, err
	}

	return n, nil
}

// tokenizerFolder is the subfolder of the run's folder for a tokenizer trained on the text.
const tokenizerFolder = "tokenizer"

// tokenizerConfigFile is the file of a tokenizer's folder that names the special tokens.
const tokenizerConfigFile = "tokenizer_config.json"

// tokenizerPattern splits text into pieces before it is encoded. llama.cpp knows this pattern too.
const tokenizerPattern = "llama3"

// tokenizerText limits the bytes of text for training a tokenizer. Tests change it.
var tokenizerText = 64 << 20

// learnTokenizer trains a tokenizer on the text, or reads the tokenizer of a continued run. Rank 0 does
// this and sends the result to the other ranks.
func (o *trainOptions) learnTokenizer(c *cobra.Command, m machines, s stage, text *data.Text,
	n *newModel) error {
	n.files = map[string][]byte{}
	err := m.atFirst(func() error {
		defer m.team.Busy("training the tokenizer")()
		if s == saved {
			return n.readFiles()
		}
		return o.trainTokenizer(c.Context(), c.ErrOrStderr(), text, n)
	})
	if err != nil {
		return err
	}

	if m.team != nil {
		encoded, err := json.Marshal(n.files)
		if err != nil {
			return err
		}
		all, err := m.team.Exchange(encoded)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(all[0], &n.files); err != nil {
			return err
		}
	}

	n.tok.Tokenizer, err = tokenizers.Parse(n.files[tokenizerName], n.files[tokenizerConfigFile])
	return err
}

// trainTokenizer trains a tokenizer on a sample of the text.
func (o *trainOptions) trainTokenizer(ctx context.Context, stderr io.Writer, text *data.Text,
	n *newModel) error {
	sample, err := text.Sample(tokenizerText)
	if err != nil {
		return fmt.Errorf("--data: %w", err)
	}

	at, erase := bar(stderr, "training the tokenizer", false)
	model, config, err := tokenizers.Train(ctx, bytes.NewReader(sample), o.scratch.vocab,
		tokenizerPattern, func(merges, of int) error {
			at(int64(merges), int64(of))
			return context.Cause(ctx)
		})
	erase()
	if err != nil {
		return err
	}

	n.files[tokenizerName], n.files[tokenizerConfigFile] = model, config
	return nil
}

// readFiles reads the tokenizer that a continued run has trained.
func (n *newModel) readFiles() error {
	for _, name := range []string{tokenizerName, tokenizerConfigFile} {
		text, err := os.ReadFile(filepath.Join(n.folder, name))
		if err != nil {
			return fmt.Errorf("the run cannot continue without its tokenizer: %w", err)
		}
		n.files[name] = text
	}
	return nil
}

func (n *newModel) shape() llm.Config { return n.config }

func (n *newModel) vocabulary() vocabulary { return n.tok }

func (n *newModel) model(_ context.Context, _ io.Writer, change func(*llm.Config),
	lattice ...state.Option) (*llm.Model, error) {
	config := n.config
	change(&config)
	return llm.NewModel(config, tensor.Float32, n.seed, lattice...)
}

func (n *newModel) saving() []hf.SaveOption {
	how := []hf.SaveOption{hf.WithTokenizer(n.folder)}
	for _, name := range slices.Sorted(maps.Keys(n.files)) {
		how = append(how, hf.WithFile(name, n.files[name]))
	}
	if end := n.tok.EndOfDocument(); end >= 0 {
		how = append(how, hf.WithFile("generation_config.json",
			fmt.Appendf(nil, "{\n  \"eos_token_id\": %d\n}\n", end)))
	}
	return how
}

// persist writes the trained tokenizer to the folder of the run.
func (n *newModel) persist() error {
	for _, name := range slices.Sorted(maps.Keys(n.files)) {
		err := atomicfile.WriteMkdir(filepath.Join(n.folder, name), func(f *os.File) error {
			_, err := f.Write(n.files[name])
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (n *newModel) Close() error { return nil }
