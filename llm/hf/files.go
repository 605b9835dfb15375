package hf

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/internal/regular"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
	tokenizers "github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

// Files holds the contents of a model folder that exists only in memory, because the model is stored in another
// format. Package gguf creates Files from GGUF files.
type Files struct {
	// Texts has the contents of config.json, tokenizer.json, and other small files of a folder, by name.
	Texts map[string][]byte

	// Weights returns the weights of a model with the configuration that config.json describes.
	Weights func(llm.Config) (Weights, error)

	// Close releases the weights. It may be nil.
	Close func() error
}

// Weights are weights in the format of a safetensors file, with one tensor for each parameter that
// llm.Config.Parameters lists.
type Weights struct {
	io.ReaderAt
	Size int64 // in bytes

	// Types maps the names of tensors that have been converted to their original types.
	Types map[string]string
}

// OpenFiles is like Open, for a folder in memory. The path appears in errors and becomes the Dir of the result. If
// OpenFiles fails, it closes the files.
func OpenFiles(path string, files Files) (*Folder, error) {
	f := &Folder{Dir: path, files: &files}
	if err := f.open(); err != nil {
		if files.Close != nil && f.weights == nil {
			err = errors.Join(err, files.Close())
		}
		return nil, fmt.Errorf("hf: %s: %w: %w", path, ErrFolder, err)
	}
	return f, nil
}

// Text returns the contents of a small file, such as tokenizer.json. If the file is missing, the error wraps
// fs.ErrNotExist.
func (f *Folder) Text(name string) ([]byte, error) { return f.read(name, maxTokenizer) }

// read is Text for a file of at most limit bytes.
func (f *Folder) read(name string, limit int64) ([]byte, error) {
	if f.files == nil {
		return regular.Read(filepath.Join(f.Dir, name), limit, "a "+name+" has")
	}
	text, ok := f.files.Texts[name]
	if !ok {
		return nil, &fs.PathError{Op: "open", Path: filepath.Join(f.Dir, name), Err: fs.ErrNotExist}
	}
	return text, nil
}

// Name returns the name of the model: the base name of its folder, or of its file without the extension .gguf.
func (f *Folder) Name() string {
	dir := f.Dir
	if absolute, err := filepath.Abs(dir); err == nil {
		dir = absolute
	}
	return strings.TrimSuffix(filepath.Base(dir), ".gguf")
}

// textDir returns the folder with the tokenizer and the chat template, or "" if they are in memory.
func (f *Folder) textDir() string {
	if f.texts == "" && f.files == nil {
		return f.Dir
	}
	return f.texts
}

// Tokenizer reads the model's tokenizer. If the model has no tokenizer, the error wraps fs.ErrNotExist.
func (f *Folder) Tokenizer() (*tokenizers.Tokenizer, error) {
	if dir := f.textDir(); dir != "" {
		return tokenizers.Load(dir)
	}

	text, err := f.Text(tokenizerName)
	if err != nil {
		return nil, fmt.Errorf("hf: Tokenizer: %w", err)
	}
	t, err := tokenizers.Parse(text, f.files.Texts[tokenizerConfigName])
	if err != nil {
		return nil, fmt.Errorf("hf: Tokenizer: %s: %w", f.Dir, err)
	}
	return t, nil
}

// Template reads the model's chat template. If the model has no template, the error wraps chat.ErrNoTemplate.
func (f *Folder) Template() (*chat.Template, error) {
	if dir := f.textDir(); dir != "" {
		return chat.Load(dir)
	}
	t, err := chat.Parse("", f.files.Texts[tokenizerConfigName])
	if err != nil {
		return nil, fmt.Errorf("hf: Template: %s: %w", f.Dir, err)
	}
	return t, nil
}

// Templates returns the texts of the model's chat templates by name. If there are none, the error wraps
// chat.ErrNoTemplate.
func (f *Folder) Templates() (chat.Sources, error) {
	if dir := f.textDir(); dir != "" {
		return chat.LoadSources(dir)
	}

	var config struct {
		Templates json.RawMessage `json:"chat_template"`
	}
	if text := f.files.Texts[tokenizerConfigName]; text != nil {
		if err := json.Unmarshal(text, &config); err != nil {
			return nil, fmt.Errorf("hf: Templates: %s: %w", f.Dir, err)
		}
	}
	sources, err := chat.ParseSources(config.Templates)
	if err != nil {
		return nil, fmt.Errorf("hf: Templates: %s: %w", f.Dir, err)
	}
	return sources, nil
}

const (
	tokenizerName       = "tokenizer.json"
	tokenizerConfigName = "tokenizer_config.json"
)

// openFiles opens the weights of a folder in memory.
func (f *Folder) openFiles() (*weights, error) {
	in, err := f.files.Weights(f.Config)
	if err != nil {
		return nil, err
	}

	file, err := safetensors.NewFile(f.Dir, in, in.Size)
	if err != nil {
		return nil, err
	}
	w := &weights{in: map[string]*safetensors.File{}, files: []*safetensors.File{file},
		names: []string{filepath.Base(f.Dir)}, order: slices.Clone(file.Names()), types: in.Types, release: f.files.Close}
	for _, name := range w.order {
		w.in[name] = file
	}
	return w, nil
}
