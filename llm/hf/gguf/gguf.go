// Package gguf reads and writes models as GGUF files, the format of llama.cpp. It supports the families
// Llama, Mistral without a window, Qwen 2, Qwen 3, OLMo 2 and GPT-2, with tokenizers that are byte-level
// encodings or SentencePiece's byte-pair encodings. The files include the tokenizer and chat templates.
//
// A GGUF file has this layout:
//
//	file   = "GGUF" ‖ version 3 ‖ number of tensors ‖ number of fields ‖ fields ‖ tensor infos ‖ data
//
// The data of each tensor start at a multiple of 32 bytes. All numbers are little-endian.
package gguf

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/hf"
)

const (
	version   = 3
	alignment = 32
)

// Type is the format of a matrix's elements. Vectors are always float32.
type Type uint32

// The formats of matrices.
const (
	F32  Type = 0
	F16  Type = 1
	Q80  Type = 8 // q8_0: 32 elements of one byte each share a scale
	BF16 Type = 30
)

// fileTypes maps a matrix type to llama.cpp's number for files of that type.
var fileTypes = map[Type]uint32{F32: 0, F16: 1, Q80: 7, BF16: 32}

// ParseType returns the type named f32, f16, bf16 or q8_0.
func ParseType(name string) (Type, error) {
	t, ok := map[string]Type{"f32": F32, "f16": F16, "bf16": BF16, "q8_0": Q80}[name]
	if !ok {
		return 0, fmt.Errorf("gguf: the type is %.40q, want f32, f16, bf16 or q8_0", name)
	}
	return t, nil
}

// An architecture describes how llama.cpp represents a model family.
type architecture struct {
	name string
	// parts names the parts of blocks whose names differ from those in partNames.
	parts map[string]string
	// interleaved reports whether RoPE rotates neighboring features.
	interleaved bool
	// learned reports whether the model uses a table of positions instead of RoPE.
	learned bool
	// layerNorm reports whether the norms are layer norms rather than RMS norms.
	layerNorm bool
	// fused reports whether queries, keys and values share one tensor.
	fused bool
	// outBias reports whether the output layer of attention may have a bias.
	outBias bool
	// ownOutput reports whether llama.cpp needs a tensor for the output layer even if the model uses
	// its embedding table there.
	ownOutput bool
}

// architectures maps family names from config.json to llama.cpp's architectures.
var architectures = map[string]architecture{
	"llama":   {name: "llama", interleaved: true, outBias: true},
	"mistral": {name: "llama", interleaved: true, outBias: true},
	"qwen2":   {name: "qwen2"},
	"qwen3":   {name: "qwen3"},
	"gpt2": {name: "gpt2", learned: true, layerNorm: true, fused: true, outBias: true,
		parts: map[string]string{"self_attn.q_proj": "attn_qkv"}},
	"olmo2": {name: "olmo2", ownOutput: true, parts: map[string]string{
		"post_attention_layernorm":   "post_attention_norm",
		"post_feedforward_layernorm": "post_ffw_norm",
	}},
}

// Save writes a model that was loaded from a folder, along with the folder's tokenizer and chat template.
//
// The file at path must not exist, and appears only once it is complete. If another process creates
// the file first, Save leaves it alone and returns an error that wraps fs.ErrExist. Unless progress
// is nil, Save calls it with the number of tensor bytes written so far.
func Save(ctx context.Context, path string, f *hf.Folder, m *llm.Model, t Type,
	progress func(done, total int64)) error {
	if err := save(ctx, path, f, m, t, progress); err != nil {
		return fmt.Errorf("gguf: %w", err)
	}
	return nil
}

// Check returns an error if Save would reject any model of the given configuration, for example
// because llama.cpp lacks its architecture or the folder's tokenizer. Long runs call Check before
// their first step.
func Check(f *hf.Folder, c llm.Config, t Type) error {
	if _, known := fileTypes[t]; !known {
		return fmt.Errorf("gguf: the type is %d, want F32, F16, BF16 or Q80", t)
	}

	if err := c.Check(); err != nil {
		return fmt.Errorf("gguf: %w", err)
	}

	c = c.Plain()
	if _, err := fieldsOf(f, c, t); err != nil {
		return fmt.Errorf("gguf: %w", err)
	}

	if _, _, err := architectures[f.Family].layoutOf(c, t); err != nil {
		return fmt.Errorf("gguf: %w", err)
	}

	return nil
}

func save(ctx context.Context, path string, f *hf.Folder, m *llm.Model, t Type,
	progress func(done, total int64)) error {
	if _, known := fileTypes[t]; !known {
		return fmt.Errorf("the type is %d, want F32, F16, BF16 or Q80", t)
	}

	done, err := m.Current()
	if err != nil {
		return err
	}
	defer done()

	if m, err = m.Plain(); err != nil {
		return err
	}

	fields, err := fieldsOf(f, m.Config, t)
	if err != nil {
		return err
	}

	tensors, err := tensorsOf(m, architectures[f.Family], t)
	if err != nil {
		return err
	}

	return atomicfile.CreateMkdir(path, func(file *os.File) error {
		return write(ctx, file, fields, tensors, progress)
	})
}

func write(ctx context.Context, file io.Writer, fields *fields, tensors []source,
	progress func(done, total int64)) error {
	head := []byte("GGUF")
	head = binary.LittleEndian.AppendUint32(head, version)
	head = binary.LittleEndian.AppendUint64(head, uint64(len(tensors)))
	head = binary.LittleEndian.AppendUint64(head, fields.count)
	head = append(head, fields.bytes...)
	offset := int64(0)
	for _, t := range tensors {
		head = appendString(head, t.name)
		head = binary.LittleEndian.AppendUint32(head, uint32(len(t.shape)))
		for _, d := range slices.Backward(t.shape) {
			head = binary.LittleEndian.AppendUint64(head, uint64(d))
		}
		head = binary.LittleEndian.AppendUint32(head, uint32(t.dtype))
		head = binary.LittleEndian.AppendUint64(head, uint64(offset))
		offset += aligned(t.size())
	}

	w := bufio.NewWriterSize(file, 1<<20)
	pad := func(n int64) error {
		_, err := w.Write(make([]byte, aligned(n)-n))
		return err
	}
	if _, err := w.Write(head); err != nil {
		return err
	}

	if err := pad(int64(len(head))); err != nil {
		return err
	}

	done := int64(0)
	for _, t := range tensors {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := t.write(w); err != nil {
			return fmt.Errorf("tensor %s: %w", t.name, err)
		}
		if err := pad(t.size()); err != nil {
			return err
		}
		if done += aligned(t.size()); progress != nil {
			progress(done, offset)
		}
	}

	return w.Flush()
}

func aligned(n int64) int64 { return (n + alignment - 1) / alignment * alignment }

func appendString(b []byte, s string) []byte {
	return append(binary.LittleEndian.AppendUint64(b, uint64(len(s))), s...)
}

// fields holds the metadata of a file.
type fields struct {
	count uint64
	bytes []byte
}

// The types of metadata values.
const (
	kindUint32  = 4
	kindInt32   = 5
	kindFloat32 = 6
	kindBool    = 7
	kindString  = 8
	kindArray   = 9
)

// set adds a field.
func (f *fields) set(key string, value any) {
	f.count++
	f.bytes = appendString(f.bytes, key)
	u32 := func(v uint32) { f.bytes = binary.LittleEndian.AppendUint32(f.bytes, v) }
	array := func(kind uint32, n int) {
		u32(kindArray)
		u32(kind)
		f.bytes = binary.LittleEndian.AppendUint64(f.bytes, uint64(n))
	}
	switch v := value.(type) {
	case int:
		u32(kindUint32)
		u32(uint32(v))
	case float64:
		u32(kindFloat32)
		u32(math.Float32bits(float32(v)))
	case bool:
		u32(kindBool)
		f.bytes = append(f.bytes, map[bool]byte{true: 1}[v])
	case string:
		u32(kindString)
		f.bytes = appendString(f.bytes, v)
	case []string:
		array(kindString, len(v))
		for _, s := range v {
			f.bytes = appendString(f.bytes, s)
		}
	case []int32:
		array(kindInt32, len(v))
		for _, x := range v {
			u32(uint32(x))
		}
	case []float32:
		array(kindFloat32, len(v))
		for _, x := range v {
			u32(math.Float32bits(x))
		}
	}
}

// fieldsOf returns the metadata that describes a model and its tokenizer.
func fieldsOf(f *hf.Folder, c llm.Config, t Type) (*fields, error) {
	a, ok := architectures[f.Family]
	if !ok {
		return nil, fmt.Errorf("models of the family %s cannot be written, want one of %s", f.Family,
			strings.Join(slices.Sorted(maps.Keys(architectures)), ", "))
	}

	if err := a.check(c); err != nil {
		return nil, err
	}

	arch := a.name
	all := &fields{}
	all.set("general.architecture", arch)
	all.set("general.type", "model")
	all.set("general.name", f.Name())
	all.set("general.file_type", int(fileTypes[t]))
	all.set("general.quantization_version", 2)
	set := func(key string, value any) { all.set(arch+"."+key, value) }
	set("block_count", c.Layers)
	set("context_length", f.Config.Seq) // training may have used shorter texts
	set("embedding_length", c.Dim)
	set("feed_forward_length", c.FF)
	set("attention.head_count", c.Heads)
	set("attention.head_count_kv", c.KVHeads)
	set("attention.key_length", c.HeadDim)
	set("attention.value_length", c.HeadDim)
	if a.layerNorm {
		set("attention.layer_norm_epsilon", c.Eps)
	} else {
		set("attention.layer_norm_rms_epsilon", c.Eps)
	}

	if !a.learned {
		set("rope.dimension_count", c.HeadDim)
		set("rope.freq_base", c.Base)
	}

	set("vocab_size", c.Vocab)
	if s := c.Scaling; s.BetaFast != 0 {
		if s.BetaFast != 32 || s.BetaSlow != 1 || s.Unrounded || s.Magnitude != 0 {
			return nil,
				errors.New("rope_scaling: llama.cpp supports YaRN only with beta_fast 32 and " +
					"beta_slow 1, and without other factors")
		}
		all.set(arch+".rope.scaling.type", "yarn")
		all.set(arch+".rope.scaling.factor", s.Factor)
		all.set(arch+".rope.scaling.original_context_length", s.Original)
	} else if s.Factor != 0 && s.HighFreq == 0 {
		all.set(arch+".rope.scaling.type", "linear")
		all.set(arch+".rope.scaling.factor", s.Factor)
	}

	return all, addTokenizer(all, f, c.Vocab)
}

// check returns an error if llama.cpp's implementation of the architecture can't run the configuration.
func (a architecture) check(c llm.Config) error {
	for i, b := range c.Blocks {
		if b.Window > 0 || b.NoRoPE != a.learned || b.Base != 0 {
			return fmt.Errorf("block %d has a window or its own rotary angles, which llama.cpp's "+
				"%s does not support", i, a.name)
		}
	}

	if c.OutBias && !a.outBias {
		return fmt.Errorf("the output layer of attention has a bias, which llama.cpp's %s does not support",
			a.name)
	}

	return nil
}

// partNames holds the names that most architectures of llama.cpp use for the parts of blocks.
var partNames = map[string]string{
	"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
	"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
	"self_attn.q_norm": "attn_q_norm",
	"self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
	"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}

// nameOf returns llama.cpp's name for a parameter.
func (a architecture) nameOf(name string) (string, error) {
	switch name {
	case embedding:
		return "token_embd.weight", nil
	case positions:
		return "position_embd.weight", nil
	case "model.norm.weight":
		return "output_norm.weight", nil
	case "model.norm.bias":
		return "output_norm.bias", nil
	case "lm_head.weight":
		return output, nil
	}

	block, part, ok := strings.Cut(strings.TrimPrefix(name, "model.layers."), ".")
	dot := strings.LastIndexByte(part, '.')
	if ok && dot > 0 {
		if to := cmp.Or(a.parts[part[:dot]], partNames[part[:dot]]); to != "" {
			return "blk." + block + "." + to + part[dot:], nil
		}
	}

	return "", fmt.Errorf("llama.cpp has no tensor for %s", name)
}

const (
	embedding = "model.embed_tokens.weight"    // the parameter with the embedding table
	positions = "model.embed_positions.weight" // the parameter with the table of learned positions
	output    = "output.weight"                // llama.cpp's tensor for the output layer
)

// together returns, in order, the parameters fused into one tensor with the given one. It returns nil
// if the parameter belongs to the tensor of an earlier parameter.
func (a architecture) together(name string) []string {
	before, after, found := strings.Cut(name, "self_attn.q_proj")
	switch {
	case !a.fused:
	case found:
		return []string{name, before + "self_attn.k_proj" + after, before + "self_attn.v_proj" + after}
	case strings.Contains(name, "self_attn.k_proj"), strings.Contains(name, "self_attn.v_proj"):
		return nil
	}
	return []string{name}
}
