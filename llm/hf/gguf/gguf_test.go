package gguf

import (
	"context"
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/hf"
)

// reader parses a file that a test wrote.
type reader struct {
	t    *testing.T
	rest []byte
}

func (r *reader) take(n uint64) []byte {
	require.LessOrEqual(r.t, n, uint64(len(r.rest)))
	b := r.rest[:n]
	r.rest = r.rest[n:]
	return b
}
func (r *reader) u32() uint32    { return binary.LittleEndian.Uint32(r.take(4)) }
func (r *reader) u64() uint64    { return binary.LittleEndian.Uint64(r.take(8)) }
func (r *reader) string() string { return string(r.take(r.u64())) }

func (r *reader) value(kind uint32) any {
	switch kind {
	case kindUint32:
		return r.u32()
	case kindInt32:
		return int32(r.u32())
	case kindFloat32:
		return math.Float32frombits(r.u32())
	case kindBool:
		return r.take(1)[0] == 1
	case kindString:
		return r.string()
	}

	require.EqualValues(r.t, kindArray, kind)
	element, n := r.u32(), r.u64()
	all := make([]any, n)
	for i := range all {
		all[i] = r.value(element)
	}

	return all
}

type written struct {
	shape []int
	dtype Type
	data  []byte
}

// read returns the metadata and tensors of a file.
func read(t *testing.T, path string) (map[string]any, map[string]written) {
	all, err := os.ReadFile(path)
	require.NoError(t, err)
	r := &reader{t, all}
	require.Equal(t, "GGUF", string(r.take(4)))
	require.EqualValues(t, 3, r.u32())
	n, count := r.u64(), r.u64()
	fields := map[string]any{}
	for range count {
		key := r.string()
		require.NotContains(t, fields, key)
		fields[key] = r.value(r.u32())
	}

	type info struct {
		name   string
		offset uint64
		written
	}
	var infos []info
	for range n {
		x := info{name: r.string()}
		for range r.u32() {
			x.shape = append([]int{int(r.u64())}, x.shape...)
		}
		x.dtype, x.offset = Type(r.u32()), r.u64()
		require.Zero(t, x.offset%alignment)
		infos = append(infos, x)
	}

	at := aligned(int64(len(all) - len(r.rest)))
	tensors := map[string]written{}
	for _, x := range infos {
		size := source{shape: x.shape, dtype: x.dtype}.size()
		begin := at + int64(x.offset)
		require.LessOrEqual(t, begin+size, int64(len(all)))
		x.data = all[begin:][:size]
		tensors[x.name] = x.written
	}

	return fields, tensors
}

// values returns the elements of a tensor.
func (w written) values() (x []float32) {
	for b := w.data; len(b) > 0; {
		switch w.dtype {
		case F32:
			x, b = append(x, math.Float32frombits(binary.LittleEndian.Uint32(b))), b[4:]
		case F16:
			x, b = append(x, float32(half.Float16(binary.LittleEndian.Uint16(b)).Float64())), b[2:]
		case BF16:
			x, b = append(x, half.BFloat16(binary.LittleEndian.Uint16(b)).Float32()), b[2:]
		default:
			scale := float32(half.Float16(binary.LittleEndian.Uint16(b)).Float64())
			for _, q := range b[2:34] {
				x = append(x, scale*float32(int8(q)))
			}
			b = b[34:]
		}
	}

	return x
}

const tiny = "../testdata/tiny"

func load(t *testing.T, dir string) (*hf.Folder, *llm.Model) {
	f, err := hf.Open(dir)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	m, err := f.Load(t.Context())
	require.NoError(t, err)
	return f, m
}

// TestSave checks that every parameter is saved in its type and with that type's accuracy, and that
// the tokenizer is saved.
func TestSave(t *testing.T) {
	f, m := load(t, tiny)
	for name, worst := range map[string]float64{"f32": 0, "f16": 1e-3, "bf16": 0, "q8_0": 5e-3} {
		kind, err := ParseType(name)
		require.NoError(t, err)
		path := filepath.Join(t.TempDir(), "x", "m.gguf")
		var seen, total int64
		require.NoError(t, Save(t.Context(), path, f, m, kind, func(done, size int64) {
			require.Greater(t, done, seen)
			seen, total = done, size
		}))
		require.Equal(t, total, seen)
		fields, tensors := read(t, path)
		require.Equal(t, "llama", fields["general.architecture"])
		require.EqualValues(t, 2, fields["llama.block_count"])
		require.InDelta(t, 1e-6, fields["llama.attention.layer_norm_rms_epsilon"], 1e-12)
		require.Equal(t, "qwen2", fields["tokenizer.ggml.pre"])
		require.Equal(t, true, fields["tokenizer.ggml.add_bos_token"])
		require.Contains(t, fields["tokenizer.chat_template"], "add_generation_prompt")
		tokens := fields["tokenizer.ggml.tokens"].([]any)
		require.Len(t, tokens, 400)
		require.Equal(t, "<|begin_of_text|>", tokens[0])
		require.EqualValues(t, control, fields["tokenizer.ggml.token_type"].([]any)[0])
		require.Len(t, fields["tokenizer.ggml.merges"], 400-256-2)
		require.Len(t, tensors, len(m.Params))
		for _, p := range m.Params {
			to, err := architectures["llama"].nameOf(p.Name)
			require.NoError(t, err)
			require.Contains(t, tensors, to)
			x := tensors[to]
			require.Equal(t, []int(p.Value.Shape()), x.shape)
			want := p.Value.Float32s()
			if len(x.shape) == 2 {
				require.Equal(t, kind, x.dtype)
			} else {
				require.Equal(t, F32, x.dtype)
			}
			got := x.values()
			// Features that RoPE rotates together are neighbors in the file.
			if to == "blk.1.attn_q.weight" || to == "blk.1.attn_k.weight" {
				w := x.shape[1]
				require.InDeltaSlice(t, want[:w], got[:w], worst)
				require.InDeltaSlice(t, want[4*w:5*w], got[w:2*w], worst)
				require.InDeltaSlice(t, want[9*w:10*w], got[10*w:11*w], worst)
			} else if to[:3] != "blk" || to[6:10] != "attn" {
				require.InDeltaSlice(t, want, got, max(worst, worst*float64(largest(want))))
			}
		}
	}
}

func largest(x []float32) (m float32) {
	for _, v := range x {
		m = max(m, v, -v)
	}
	return m
}

// TestRefused checks that the error names what llama.cpp can't run, or a missing tokenizer.
func TestRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.gguf")
	for folder, want := range map[string]string{"gemma3": "family gemma3_text cannot be written",
		"mistral": "has a window", "llama2": "no such file"} {
		f, m := load(t, filepath.Join("../testdata", folder))
		require.ErrorContains(t, Save(t.Context(), path, f, m, F32, nil), want, folder)
	}

	_, err := ParseType("q4")
	require.ErrorContains(t, err, "want f32, f16, bf16 or q8_0")
	f, m := load(t, tiny)
	require.ErrorContains(t, Save(t.Context(), path, f, m, Type(2), nil), "the type is 2")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, Save(ctx, path, f, m, F32, nil), context.Canceled)
	require.NoFileExists(t, path)
	m.Params[0].Value.Float32s()[3] = float32(math.Inf(1))
	require.ErrorIs(t, Save(t.Context(), path, f, m, F32, nil), llm.ErrDiverged)
}

// TestRotaryFactors checks that fast pairs keep their speed, that slow pairs are slowed by the full
// factor, and that the pairs in between are interpolated.
func TestRotaryFactors(t *testing.T) {
	c := llm.Config{HeadDim: 64, Base: 500000}
	c.Scaling.Factor, c.Scaling.LowFreq, c.Scaling.HighFreq, c.Scaling.Original = 32, 1, 4, 8192
	x := rotaryFactors(c)
	require.Len(t, x, 32)
	require.EqualValues(t, 1, x[0])
	require.EqualValues(t, 32, x[31])
	require.IsNonDecreasing(t, x)
}

// TestChatTemplates checks that all chat templates are copied, even if this module can't render them.
// render.
func TestChatTemplates(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS(tiny)))
	template := "{% block x %}{% generation %}{{ messages }}{% endgeneration %}{% endblock %}"
	require.NoError(t, os.WriteFile(filepath.Join(dir, "chat_template.jinja"), []byte(template), 0o600))
	additional := filepath.Join(dir, "additional_chat_templates")
	require.NoError(t, os.Mkdir(additional, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(additional, "tool_use.jinja"), []byte("tools"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(additional, "my-rag.jinja"), []byte("rag"), 0o600))

	f, m := load(t, dir)
	path := filepath.Join(t.TempDir(), "m.gguf")
	require.NoError(t, Save(t.Context(), path, f, m, F32, nil))
	fields, _ := read(t, path)
	require.Equal(t, template, fields["tokenizer.chat_template"])
	require.Equal(t, "tools", fields["tokenizer.chat_template.tool_use"])
	require.Equal(t, "rag", fields["tokenizer.chat_template.my_rag"])
	require.Equal(t, []any{"my_rag", "tool_use"}, fields["tokenizer.chat_templates"])
}
