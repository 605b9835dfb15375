// Package hf loads and saves models as folders in the format of Hugging Face's transformers.
//
//	f, err := hf.Open("Llama-3.2-1B")        // reads config.json, generation_config.json and headers of weights
//	m, err := f.Load(ctx)                    // returns an llm.Model to run, train and grow
//	err = hf.SavePretrained(ctx, "out", m, hf.Like(f)) // writes a folder that transformers loads
//
// It reads the families Llama, Mistral, Qwen 2 and 3, SmolLM 3, OLMo 2, GPT-2 and the text part of Gemma
// 3.
//
// Nothing is ignored silently. A field of config.json that is neither understood nor known to be
// irrelevant causes an error that names it, and so does an unexpected tensor in the weights.
package hf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/kasmina-go/kasmina/llm"
)

// ErrFolder is wrapped by errors about folders that don't contain a model or contain contradictory files.
var ErrFolder = errors.New("not a model that can be loaded")

// A Folder is a model folder whose description has been read and checked against the headers of its
// weights. Call Close after use. All methods except Close may be called concurrently.
type Folder struct {
	Dir        string
	Family     string     // model_type of config.json, such as "llama"
	Config     llm.Config // Seq is max_position_embeddings
	Generation Generation

	traits     *traits
	config     []byte // contents of config.json
	generation []byte // contents of generation_config.json, nil if missing
	weights    *weights
	layout     layout
	files      *Files // nil unless the folder exists only in memory
	texts      string // folder with another tokenizer and chat template, or ""
}

// Open reads config.json, generation_config.json and the headers of the weights. It checks that the
// weights consist of exactly the tensors that the configuration calls for, each with the right shape.
func Open(dir string) (*Folder, error) {
	f := &Folder{Dir: dir}
	if err := f.open(); err != nil {
		return nil, fmt.Errorf("hf: %s: %w: %w", dir, ErrFolder, err)
	}
	return f, nil
}

func (f *Folder) open() error {
	if f.files == nil {
		if info, err := os.Stat(f.Dir); err != nil {
			return err
		} else if !info.IsDir() {
			return errors.New("it is a file, want the folder with config.json")
		}
	}

	var err error
	f.config, err = f.read(configName, maxConfig)
	if errors.Is(err, fs.ErrNotExist) && IsAdapter(f.Dir) {
		return fmt.Errorf("it holds adapters and no model: merge them into their model with kasmina convert "+
			"--model %s --out NEW", f.Dir)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return errors.New("it has no config.json: name the folder of a downloaded model, or the result of a " +
			"finished run")
	} else if err != nil {
		return err
	}

	if f.traits, err = parseConfig(f.config); err != nil {
		return fmt.Errorf("%s: %w", configName, err)
	}

	if f.Config, err = f.traits.config(); err != nil {
		return fmt.Errorf("%s: %w", configName, err)
	}

	f.Family = f.traits.family
	if err := f.readGeneration(); err != nil {
		return fmt.Errorf("%s: %w", generationName, err)
	}

	stored := plainLayout
	if f.files != nil {
		f.weights, err = f.openFiles()
	} else if f.weights, err = openWeights(f.Dir); err == nil {
		stored = f.traits.layout(f.weights)
	}
	if err != nil {
		return err
	}

	f.layout = f.traits.layout(f.weights)
	if err := f.weights.fit(f.Config, stored(f.Config), derived); err != nil {
		return errors.Join(err, f.Close())
	}

	return nil
}

// Close closes the files of the weights.
func (f *Folder) Close() error {
	if f == nil || f.weights == nil {
		return nil
	}
	return f.weights.close()
}
