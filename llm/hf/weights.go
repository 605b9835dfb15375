package hf

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/kasmina-go/kasmina/internal/regular"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
)

const (
	weightsName = "model.safetensors"
	indexName   = "model.safetensors.index.json"
	maxIndex    = 64 << 20
	maxShards   = 10000

	embedName = "model.embed_tokens.weight"
	headName  = "lm_head.weight"
)

// weights holds the tensors of one or more files.
type weights struct {
	files []*safetensors.File
	names []string                     // of the files
	in    map[string]*safetensors.File // by name of tensor
	order []string                     // names of the tensors

	places map[string]place // by name of parameter

	types   map[string]string // see Weights.Types
	release func() error      // may be nil
}

// openWeights opens the weight files and checks that the index agrees with them.
func openWeights(dir string) (*weights, error) {
	w := &weights{in: map[string]*safetensors.File{}}
	index, err := regular.Read(filepath.Join(dir, indexName), maxIndex, "an index of weights has")
	switch {
	case err == nil:
		err = w.openShards(dir, index)
	case errors.Is(err, fs.ErrNotExist):
		if err = w.add(dir, weightsName); errors.Is(err, fs.ErrNotExist) {
			err = noWeights(dir)
		}
	}
	if err != nil {
		return nil, errors.Join(err, w.close())
	}

	return w, nil
}

// noWeights returns an error that names the folder's unsupported weight files, if any.
func noWeights(dir string) error {
	if found, _ := filepath.Glob(filepath.Join(dir, "*.gguf")); len(found) > 0 {
		return fmt.Errorf("it has no %s: name the GGUF file %s itself", weightsName, found[0])
	}
	for _, pattern := range []string{"pytorch_model*.bin", "*.pth", "*.pt"} {
		if found, _ := filepath.Glob(filepath.Join(dir, pattern)); len(found) > 0 {
			return fmt.Errorf("it has %s and no %s: only safetensors can be read; "+
				"save_pretrained of transformers writes them", filepath.Base(found[0]), weightsName)
		}
	}
	return fmt.Errorf("it has no %s and no %s: the weights are missing", weightsName, indexName)
}

// openShards opens the files that an index names.
func (w *weights) openShards(dir string, text []byte) error {
	fail := func(format string, args ...any) error {
		return fmt.Errorf("%s: %w", indexName, fmt.Errorf(format, args...))
	}
	if _, err := os.Stat(filepath.Join(dir, weightsName)); err == nil {
		return fail("%s exists too, and it is unclear which one applies: remove one",
			weightsName)
	}

	if err := checkJSON(text); err != nil {
		return fail("%w", err)
	}

	var index struct {
		Map map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(text, &index); err != nil {
		return fail("%w", err)
	}

	if len(index.Map) == 0 {
		return fail("weight_map is empty, want the file of every tensor")
	}

	shards := slices.Sorted(maps.Values(index.Map))
	shards = slices.Compact(shards)
	if len(shards) > maxShards {
		return fail("it names %d files, want at most %d", len(shards), maxShards)
	}

	for _, name := range shards {
		if name != filepath.Base(name) || !filepath.IsLocal(name) {
			return fail("it names the file %.80q, want one in the same folder", name)
		}
		if err := w.add(dir, name); errors.Is(err, fs.ErrNotExist) {
			return fail("the file %s is missing: copy or download it again", name)
		} else if err != nil {
			return err
		}
	}

	at := map[*safetensors.File]string{}
	for i, f := range w.files {
		at[f] = w.names[i]
	}

	for _, tensor := range slices.Sorted(maps.Keys(index.Map)) {
		f, ok := w.in[tensor]
		if !ok {
			return fail("tensor %.100q is not in %s, contrary to the index", tensor, index.Map[tensor])
		}
		if at[f] != index.Map[tensor] {
			return fail("tensor %.100q is in %s, but the index says %s", tensor, at[f], index.Map[tensor])
		}
	}

	for _, tensor := range w.order {
		if _, ok := index.Map[tensor]; !ok {
			return fail("tensor %.100q of %s is not in the index", tensor, at[w.in[tensor]])
		}
	}

	return nil
}

// add opens a file. It is an error if one of its tensors is also in another file.
func (w *weights) add(dir, name string) error {
	f, err := safetensors.Open(filepath.Join(dir, name))
	if err != nil {
		return err
	}

	w.files, w.names = append(w.files, f), append(w.names, name)
	for _, tensor := range f.Names() {
		if other, ok := w.in[tensor]; ok {
			return fmt.Errorf("tensor %.100q is in %s and in %s: want it once", tensor,
				w.names[slices.Index(w.files, other)], name)
		}
		w.in[tensor] = f
		w.order = append(w.order, tensor)
	}

	return nil
}

func (w *weights) close() error {
	var errs []error
	for _, f := range w.files {
		errs = append(errs, f.Close())
	}
	if w.release != nil {
		errs = append(errs, w.release())
	}
	return errors.Join(errs...)
}

// derived matches tensors that old versions of transformers saved although they follow from the
// configuration: frequencies of rotary embeddings, and causal masks.
var derived = regexp.MustCompile(`^model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq$|` +
	`^(transformer\.)?h\.\d+\.attn\.(masked_)?bias$`)

// checkLeftover checks that no tensors are left over, except an output layer that equals the embedding.
func (w *weights) checkLeftover(c llm.Config, rest map[string]*safetensors.File) error {
	if _, both := rest[headName]; both && !c.Untied {
		delete(rest, headName)
		if err := w.sameHead(); err != nil {
			return err
		}
	}

	if len(rest) > 0 {
		names := slices.Sorted(maps.Keys(rest))
		return fmt.Errorf("tensor %.100q does not belong to the model that config.json "+
			"describes, and there are %d such tensors", names[0], len(names))
	}

	return nil
}

func readable(d safetensors.DType) bool {
	return d == safetensors.F32 || d == safetensors.F16 || d == safetensors.BF16
}

// sameHead checks that the output layer equals the embedding, as tie_word_embeddings claims.
func (w *weights) sameHead() error {
	embedding := w.places[embedName].name
	a, b := w.in[embedding], w.in[headName]
	da, sa, _ := a.Info(embedding)
	db, sb, _ := b.Info(headName)
	same := da == db && slices.Equal(sa, sb)
	if same {
		x, err := a.Tensor(context.Background(), embedding)
		if err != nil {
			return err
		}
		left := bytesOf(x)
		err = b.Chunks(context.Background(), headName, func(part []byte) error {
			same = same && bytes.Equal(part, left[:len(part)])
			left = left[len(part):]
			return nil
		})
		if err != nil {
			return err
		}
	}

	if !same {
		return fmt.Errorf("tensor %s differs from %s, and config.json has tie_word_embeddings: "+
			"one of them is wrong", headName, embedding)
	}

	return nil
}

// TensorInfo describes a tensor of the weights. Bytes is its size in the safetensors file.
type TensorInfo struct {
	Name, Type, File string
	Shape            []int
	Bytes            int64
}

// Tensors describes the tensors of the weights, in the order of the files.
func (f *Folder) Tensors() []TensorInfo {
	if f.weights == nil {
		return nil
	}

	all := make([]TensorInfo, 0, len(f.weights.order))
	for i, file := range f.weights.files {
		for _, name := range file.Names() {
			dtype, shape, _ := file.Info(name)
			all = append(all, TensorInfo{name, cmp.Or(f.weights.types[name], string(dtype)), f.weights.names[i],
				shape, file.Bytes(name)})
		}
	}

	return all
}

// dtypeOf returns a parameter's type in the weights, or "" if it is missing.
func (w *weights) dtypeOf(param string) safetensors.DType {
	p, ok := w.places[param]
	if !ok {
		return ""
	}
	d, _, _ := w.in[p.name].Info(p.name)
	return d
}
