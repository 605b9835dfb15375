package hf

import (
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

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/internal/regular"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
)

// tokenizerFiles lists the files of a folder that belong to its tokenizer.
var tokenizerFiles = []string{"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
	"added_tokens.json", "chat_template.jinja", "chat_template.json", "tokenizer.model",
	"vocab.json", "merges.txt"}

const (
	maxTokenizer = 64 << 20
	shardBytes   = 5 << 30
)

// SaveOption configures what SavePretrained writes.
type SaveOption func(*saving)

type saving struct {
	like     *Folder
	tokens   string // folder or file of the tokenizer; "" means the tokenizer of like
	dtype    safetensors.DType
	shard    int64
	files    map[string][]byte
	progress func(done, total int64)
	err      error
}

// Like takes everything that the model itself doesn't hold from a folder, namely config.json and
// generation_config.json, the types of tensors, and the tokenizer's files. The folder may already be
// closed.
func Like(f *Folder) SaveOption { return func(s *saving) { s.like = f } }

// WithDtype writes all tensors as float32, float16 or bfloat16. By default, each tensor keeps its type in
// the folder given to [Like], or is written as float32 without a folder.
func WithDtype(name string) SaveOption {
	return func(s *saving) {
		for d, n := range dtypeNames {
			if n == name {
				s.dtype = d
				return
			}
		}
		s.err = fmt.Errorf("WithDtype: %.40q, want float32, float16 or bfloat16", name)
	}
}

var dtypeNames = map[safetensors.DType]string{safetensors.F32: "float32",
	safetensors.F16:  "float16",
	safetensors.BF16: "bfloat16"}

// WithShardSize limits the size of each file of weights. The default is 5 GiB.
func WithShardSize(bytes int64) SaveOption {
	return func(s *saving) {
		if s.shard = bytes; bytes < 1 {
			s.err = fmt.Errorf("WithShardSize: %d bytes, want at least 1", bytes)
		}
	}
}

// WithFile adds a file to the folder, such as tokenizer.json. It takes precedence over a file of [Like].
func WithFile(name string, content []byte) SaveOption {
	return func(s *saving) { s.files[name] = content }
}

// WithTokenizer writes the tokenizer at path instead of the tokenizer of [Like]. The path is a
// tokenizer.json or a model folder. Chat templates are part of the tokenizer.
func WithTokenizer(path string) SaveOption { return func(s *saving) { s.tokens = path } }

// WithSaveProgress makes SavePretrained call f whenever bytes of the weights have been written.
func WithSaveProgress(f func(done, total int64)) SaveOption {
	return func(s *saving) { s.progress = f }
}

// SavePretrained writes a model as a folder that transformers can load, with config.json,
// generation_config.json, safetensors files and the files of a tokenizer.
//
// The folder must be new or empty, and appears only once it is complete. If another process writes to it
// first, SavePretrained does not touch it and returns an error that wraps fs.ErrExist.
//
// SavePretrained rejects models with seeds that change their results, because transformers does not
// support such layers. Dormant seeds are dropped. If a trainer is running, SavePretrained waits until the
// current step ends, and the run waits for SavePretrained.
func SavePretrained(ctx context.Context, dir string, m *llm.Model, opts ...SaveOption) error {
	s := &saving{shard: shardBytes, files: map[string][]byte{}}
	for _, opt := range opts {
		opt(s)
	}

	if err := s.save(ctx, dir, m); err != nil {
		return fmt.Errorf("hf: SavePretrained: %w", err)
	}

	return nil
}

// CheckSave returns an error if SavePretrained would reject any model of the given configuration.
// Long runs call it before their first step.
func CheckSave(c llm.Config, opts ...SaveOption) error {
	s := &saving{shard: shardBytes, files: map[string][]byte{}}
	for _, opt := range opts {
		opt(s)
	}

	if err := c.Check(); err != nil {
		return fmt.Errorf("hf: CheckSave: %w", err)
	}

	config, err := s.config(c)
	if s.err != nil {
		err = s.err
	}
	if err == nil {
		err = s.collect(config)
	}
	if err != nil {
		return fmt.Errorf("hf: CheckSave: %w", err)
	}

	return nil
}

func (s *saving) save(ctx context.Context, dir string, m *llm.Model) (err error) {
	if s.err != nil {
		return s.err
	}

	done, err := m.Current()
	if err != nil {
		return err
	}
	defer done()

	m, err = m.Plain()
	if err != nil {
		return err
	}

	config, err := s.config(m.Config)
	if err != nil {
		return err
	}

	if err := s.collect(config); err != nil {
		return err
	}

	return atomicfile.CreateFolder(dir, func(dir string) error {
		if err := s.writeWeights(ctx, dir, m); err != nil {
			return err
		}
		return s.writeFiles(dir)
	})
}

// writeFiles writes the small files.
func (s *saving) writeFiles(dir string) error {
	for _, name := range slices.Sorted(maps.Keys(s.files)) {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
			return err
		}
		err := atomicfile.Write(path, func(f *os.File) error {
			_, err := f.Write(s.files[name])
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Plain returns the model as other programs represent it. Fossilized growth at weights and in the
// residual stream becomes part of the model, in which case the parameters are copies. If any other
// seed changes the model's results, Plain returns an error that names the seed.
//
// While a trainer runs, Plain waits until the current step ends. If it returns m itself, further
// training changes the result.
func Plain(m *llm.Model) (*llm.Model, error) {
	done, err := m.Current()
	if err != nil {
		return nil, err
	}
	defer done()
	return m.Plain()
}

// collect gathers the small files.
func (s *saving) collect(config []byte) error {
	s.add(configName, config)
	switch {
	case s.like == nil:
		s.add(generationName, []byte("{\n  \"_from_model_config\": true\n}\n"))
	case s.like.generation != nil:
		s.add(generationName, s.like.generation)
	default:
		s.add(generationName, s.like.generationOf())
	}

	return s.collectTokenizer()
}

// add adds a file unless an option has added one of that name.
func (s *saving) add(name string, content []byte) {
	if _, ok := s.files[name]; !ok {
		s.files[name] = content
	}
}

// collectTokenizer gathers the files of the tokenizer.
func (s *saving) collectTokenizer() error {
	dir := s.tokens
	if dir == "" && s.like != nil && s.like.files != nil {
		for _, name := range tokenizerFiles {
			if text, ok := s.like.files.Texts[name]; ok {
				s.add(name, text)
			}
		}
		return nil
	}
	if dir == "" && s.like != nil {
		dir = s.like.Dir
	}

	if dir == "" {
		return nil
	}

	if info, err := os.Stat(dir); err == nil && !info.IsDir() {
		text, err := regular.Read(dir, maxTokenizer, "a tokenizer's file has")
		s.add(tokenizerFiles[0], text)
		return err
	}

	names, err := templateFiles(dir)
	if err != nil {
		return err
	}

	for _, name := range slices.Concat(tokenizerFiles, names) {
		text, err := regular.Read(filepath.Join(dir, name), maxTokenizer, "a tokenizer's file has")
		if err == nil {
			s.add(name, text)
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}

	return nil
}

// templateFiles returns the names of a folder's additional chat templates.
func templateFiles(dir string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(dir, chat.TemplateFolder))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}

	var names []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".jinja") {
			names = append(names, filepath.Join(chat.TemplateFolder, e.Name()))
		}
	}

	return names, nil
}

// generationOf returns a generation_config.json with the settings that came from config.json.
func (f *Folder) generationOf() []byte {
	fields := map[string]any{"_from_model_config": true}
	if g := f.Generation; g.Begin >= 0 {
		fields["bos_token_id"] = g.Begin
	}

	if g := f.Generation; g.Pad >= 0 {
		fields["pad_token_id"] = g.Pad
	}

	if len(f.Generation.End) == 1 {
		fields["eos_token_id"] = f.Generation.End[0]
	} else if len(f.Generation.End) > 1 {
		fields["eos_token_id"] = f.Generation.End
	}

	if g := f.Generation; g.Sample {
		fields["do_sample"], fields["temperature"] = true, g.Temperature
		fields["top_k"], fields["top_p"] = g.TopK, g.TopP
	}

	text, _ := json.MarshalIndent(fields, "", "  ") // can't fail: fields holds only numbers, lists of numbers and a boolean
	return append(text, '\n')
}

// dtypeOf returns a parameter's type in the written files.
func (s *saving) dtypeOf(name string) safetensors.DType {
	if s.dtype != "" {
		return s.dtype
	}

	if s.like != nil {
		if d := s.like.weights.dtypeOf(name); d != "" {
			return d
		}
		if d := s.like.weights.dtypeOf(embedName); d != "" {
			return d
		}
	}

	return safetensors.F32
}

// writeWeights writes the parameters to one file, or to several files and an index.
func (s *saving) writeWeights(ctx context.Context, dir string, m *llm.Model) error {
	shards, total := s.shards(m)
	var done int64
	index := map[string]string{}
	for i, shard := range shards {
		name := weightsName
		if len(shards) > 1 {
			name = fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, len(shards))
		}
		for j := range shard {
			index[shard[j].Name] = name
			write := shard[j].Write
			shard[j].Write = func(w io.Writer) error {
				return write(writerFunc(func(p []byte) (int, error) {
					if ctx.Err() != nil {
						return 0, context.Cause(ctx)
					}
					if done += int64(len(p)); s.progress != nil {
						s.progress(done, total)
					}
					return w.Write(p)
				}))
			}
		}
		err := safetensors.SaveSources(filepath.Join(dir, name), shard,
			map[string]string{"format": "pt"})
		if err != nil {
			return err
		}
	}

	if len(shards) == 1 {
		return nil
	}

	text, err := json.MarshalIndent(map[string]any{
		"metadata":   map[string]any{"total_size": total, "total_parameters": m.NumParams()},
		"weight_map": index}, "", "  ")
	if err == nil {
		s.files[indexName] = append(text, '\n')
	}

	return err
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// shards divides the parameters among files.
func (s *saving) shards(m *llm.Model) (shards [][]safetensors.Source, total int64) {
	layout := plainLayout
	if s.like != nil {
		layout = s.like.layout
	}

	var size int64
	for _, t := range layout(m.Config.Plain()) {
		source := s.source(t, m)
		bytes := int64(tensor.Shape(t.shape).TotalSize()) * int64(source.DType.Size())
		if n := len(shards); n == 0 || size+bytes > s.shard {
			shards, size = append(shards, nil), 0
		}
		last := &shards[len(shards)-1]
		*last = append(*last, source)
		size, total = size+bytes, total+bytes
	}

	return shards, total
}

// unfit returns a function that reports whether a number exceeds the range of a type.
func unfit(dtype safetensors.DType) func(float32) bool {
	return func(x float32) bool {
		if dtype == safetensors.F32 {
			return false
		}
		_, fits := half.Narrow(x, dtype == safetensors.BF16)
		return !fits
	}
}

// source returns a tensor that is converted while being written.
func (s *saving) source(t stored, m *llm.Model) safetensors.Source {
	const piece = 1 << 16
	dtype := s.dtypeOf(t.params[0])
	return safetensors.Source{Name: t.name, DType: dtype, Shape: t.shape,
		Write: func(w io.Writer) error {
			p := t.assemble(m)
			var buffer []byte
			var small []float32
			for at, n := 0, p.Shape().TotalSize(); at < n; at += piece {
				to := min(at+piece, n)
				switch x := p.Data().(type) {
				case []float32:
					small = x[at:to]
				case []float64:
					small = small[:0]
					for _, v := range x[at:to] {
						small = append(small, float32(v))
					}
				}
				if bad := slices.IndexFunc(small, notFinite); bad >= 0 {
					return fmt.Errorf("%w: element %d is %v", llm.ErrDiverged, at+bad, small[bad])
				}
				if bad := slices.IndexFunc(small, unfit(dtype)); bad >= 0 {
					return fmt.Errorf("element %d of %s is %v, which %s cannot hold: ask for another "+
						"type", at+bad, t.name, small[bad], dtype)
				}
				buffer = narrow(buffer[:0], small, dtype)
				if _, err := w.Write(buffer); err != nil {
					return err
				}
			}
			return nil
		}}
}
