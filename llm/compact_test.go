package llm

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/sampler"
)

// compactConfigs returns configurations that together have all ops that read matrices, and rows that do not
// fill a block of q8_0.
func compactConfigs() map[string]Config {
	llama := Config{Vocab: 256, Dim: 32, Layers: 2, Heads: 4, KVHeads: 2, FF: 72, Seq: 24}
	gpt2 := llama
	gpt2.KVHeads, gpt2.Positions, gpt2.PlainMLP, gpt2.GELU, gpt2.LayerNorm = 4, gpt2.Seq, true, true, true
	gpt2.QKVBias, gpt2.Blocks = true, []Block{{NoRoPE: true}, {NoRoPE: true}}
	gemma := llama
	gemma.GELU, gemma.Untied, gemma.Blocks = true, true, []Block{{Window: 5}, {}}
	adapted := llama
	adapted.Adapter = LoRA{Rank: 4, Alpha: 8, Magnitude: true,
		Targets: []string{"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"}}
	all := map[string]Config{"Llama": llama, "GPT-2": gpt2, "Gemma": gemma, "adapters": adapted}
	for name, c := range all {
		all[name] = c.Default()
	}
	return all
}

// rounded returns a model with the values of m in float64, and rounds the same matrices as a compact model.
func rounded(t *testing.T, m *Model, typ cpuops.WeightType) *Model {
	t.Helper()
	wide, err := NewModelFrom(m.Config, tensor.Float64, func(p Param) error {
		values := slices.Clone(m.Param(p.Name).Float32s())
		shape := p.Value.Shape()
		compact := len(shape) == 2 && !isSmall(p.Name)
		for row := 0; compact && row < len(values); row += shape[1] {
			roundRow(values[row:][:shape[1]], typ)
		}
		for i, x := range values {
			p.Value.Float64s()[i] = float64(x)
		}
		return nil
	})
	require.NoError(t, err)
	return wide
}

// roundRow rounds a row of a matrix as bfloat16 or as llama.cpp's q8_0.
func roundRow(row []float32, typ cpuops.WeightType) {
	switch typ {
	case cpuops.Float32:
		return
	case cpuops.BFloat16:
		for i, x := range row {
			row[i] = half.NewBFloat16(x).Float32()
		}
		return
	}
	for block := range slices.Chunk(row, 32) {
		largest := float32(0)
		for _, x := range block {
			largest = max(largest, x, -x)
		}
		scale := largest / 127
		for i, x := range block {
			block[i] = float32(half.NewFloat16(float64(scale)).Float64() * math.Round(float64(x*(1/scale))))
		}
	}
}

func newCompactPair(t *testing.T, c Config, typ cpuops.WeightType) (*CompactModel, *Model) {
	t.Helper()
	m, err := NewModel(c, tensor.Float32, 7)
	require.NoError(t, err)
	for _, p := range m.Params { // larger than the initial values, so that errors show
		for i := range p.Value.Float32s() {
			p.Value.Float32s()[i] *= 3
		}
	}
	compact, err := m.Compact(typ)
	require.NoError(t, err)
	return compact, rounded(t, m, typ)
}

// TestCompactModel compares compact models with models in float64 that have the rounded weights. Logits and
// losses must agree. The test continues texts by one token at a time, up to and beyond the window.
func TestCompactModel(t *testing.T) {
	for name, c := range compactConfigs() {
		for _, typ := range []cpuops.WeightType{cpuops.Float32, cpuops.BFloat16, cpuops.Q8} {
			t.Run(name+" "+typ.String(), func(t *testing.T) {
				r := randtest.New(t)
				compact, wide := newCompactPair(t, c, typ)
				whole := wholeLogits(t, wide)
				defer whole.Machine.Close()
				inference := compact.Inference()
				defer func() { require.NoError(t, inference.Close()) }()
				next, err := inference.Decoder()
				require.NoError(t, err)
				text := []int{3, 1, 4}
				for range c.Seq {
					seen := text[max(0, len(text)-c.Seq):]
					got, err := next(t.Context(), seen)
					require.NoError(t, err)
					want, err := whole.Next(t.Context(), seen)
					require.NoError(t, err)
					require.Less(t, apartBy(t, got, want), 2e-5, "after %d tokens", len(text))
					text = append(text, r.IntN(256))
				}

				b := data.Batch{Inputs: text[:c.Seq], Targets: text[1 : c.Seq+1], Count: c.Seq}
				got, err := inference.Loss(b)
				require.NoError(t, err)
				want, err := (&Inference{Model: wide}).Loss(b)
				require.NoError(t, err)
				require.InEpsilon(t, want, got, 1e-5)
			})
		}
	}
}

// TestCompactGreedy checks that a generator, which caches keys and values, draws the same tokens as a program
// that computes the whole window again for each token.
func TestCompactGreedy(t *testing.T) {
	for name, c := range compactConfigs() {
		for _, typ := range []cpuops.WeightType{cpuops.Float32, cpuops.BFloat16, cpuops.Q8} {
			t.Run(name+" "+typ.String(), func(t *testing.T) {
				c.Seq = 64
				if c.Positions > 0 {
					c.Positions = c.Seq
				}
				compact, _ := newCompactPair(t, c, typ)
				greedy, err := sampler.New(sampler.Config{Vocab: c.Vocab})
				require.NoError(t, err)
				g := compact.Generator()
				defer g.Close()
				text := []int{5, 6}
				for token, err := range g.Generate(t.Context(), text, 60, greedy) {
					require.NoError(t, err)
					text = append(text, token)
				}

				graph, err := BuildGraph(compact.parts, ForLogits, 1)
				require.NoError(t, err)
				machine, err := compact.machine(graph)
				require.NoError(t, err)
				defer machine.Close()
				for i := 2; i < len(text); i++ {
					logits, err := Runner{graph, machine}.Next(t.Context(), text[:i])
					require.NoError(t, err)
					x := logits.([]float32)
					require.Equal(t, slices.Index(x, slices.Max(x)), text[i], "token %d", i)
				}
			})
		}
	}
}

// TestCompactBatcher checks that the logits of a text are bit-identical whether it is alone or continued together
// with eight more, no matter how its prompt is divided among passes.
func TestCompactBatcher(t *testing.T) {
	randtest.Concurrent(t)
	for name, c := range compactConfigs() {
		typ := cpuops.Q8
		if name == "Llama" {
			typ = cpuops.BFloat16
		}
		c.Seq = 96
		if c.Positions > 0 {
			c.Positions = c.Seq
		}
		t.Run(name+" "+typ.String(), func(t *testing.T) {
			r := randtest.New(t)
			compact, _ := newCompactPair(t, c, typ)
			texts := make([][]int, 9)
			for i := range texts {
				for range 20 + r.IntN(c.Seq-20) {
					texts[i] = append(texts[i], r.IntN(c.Vocab))
				}
			}

			logits := func(b *Batcher, text []int, from int) (all [][]float32, err error) {
				next, err := b.Decoder()
				if err != nil {
					return nil, err
				}
				for n := from; n <= len(text); n++ {
					x, err := next(t.Context(), text[:n])
					if err != nil {
						return nil, err
					}
					all = append(all, x.([]float32))
				}
				return all, nil
			}
			open := func(o BatcherOptions) *Batcher {
				b, err := compact.Inference().NewBatcher(o)
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, b.Close()) })
				return b
			}

			alone := open(BatcherOptions{Texts: 1, Rows: 128, Kept: -1})
			together := open(BatcherOptions{Texts: 9, Rows: 11, Kept: -1})
			var work sync.WaitGroup
			for i, text := range texts {
				from := 1 + rand.New(rand.NewPCG(1, uint64(i))).IntN(len(text))
				work.Go(func() {
					got, err := logits(together, text, from)
					if err != nil {
						t.Error(err)
						return
					}
					want, err := logits(alone, text, from)
					if err != nil {
						t.Error(err)
						return
					}
					for n := range want {
						if !slices.Equal(want[n], got[n]) {
							t.Errorf("text %d: logits after %d tokens depend on other texts", i, from+n)
							return
						}
					}
				})
			}
			work.Wait()
		})
	}
}

// reader passes values as a file's bytes, in parts of odd sizes.
type reader struct {
	values map[string][]float32
	dtype  string
	change func(name string, part []byte) []byte
}

func (r reader) Read(ctx context.Context, name string, put func([]byte, string) error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	var all []byte
	size := 2
	for _, x := range r.values[name] {
		switch r.dtype {
		case "float32":
			all, size = binary.LittleEndian.AppendUint32(all, math.Float32bits(x)), 4
		case "float16":
			all = binary.LittleEndian.AppendUint16(all, uint16(half.NewFloat16(float64(x))))
		default:
			all = binary.LittleEndian.AppendUint16(all, uint16(half.NewBFloat16(x)))
		}
	}
	if r.change != nil {
		all = r.change(name, all)
	}
	for part := range slices.Chunk(all, 777*size) {
		if err := put(part, r.dtype); err != nil {
			return err
		}
	}
	return nil
}

// TestLoadCompact checks that a model read from files of any type is the model that Compact returns, and
// the errors for files that do not fit.
func TestLoadCompact(t *testing.T) {
	c := compactConfigs()["GPT-2"]
	m, err := NewModel(c, tensor.Float32, 3)
	require.NoError(t, err)
	r := reader{values: map[string][]float32{}}
	for _, p := range m.Params {
		for i, x := range p.Value.Float32s() { // exact in all types
			p.Value.Float32s()[i] = half.NewBFloat16(float32(half.NewFloat16(float64(x)).Float64())).Float32()
		}
		r.values[p.Name] = p.Value.Float32s()
	}

	loss := func(m *CompactModel) float64 {
		text := []int{9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25}
		i := m.Inference()
		defer i.Close()
		x, err := i.Loss(data.Batch{Inputs: text[:24], Targets: text[1:], Count: 24})
		require.NoError(t, err)
		return x
	}
	for _, typ := range []cpuops.WeightType{cpuops.BFloat16, cpuops.Q8} {
		want, err := m.Compact(typ)
		require.NoError(t, err)
		size := 0
		for name, x := range r.values {
			if len(m.Param(name).Shape()) == 2 && name != PositionsName {
				size += len(x)
			}
		}
		require.Less(t, want.Bytes(), 3*size)
		for _, r.dtype = range []string{"float32", "float16", "bfloat16"} {
			got, err := LoadCompact(t.Context(), typ, c, r)
			require.NoError(t, err)
			require.Equal(t, want.Bytes(), got.Bytes())
			require.Equal(t, loss(want), loss(got), "%v %v", typ, r.dtype)
		}
	}

	broken := errors.New("broken")
	canceled, cancel := context.WithCancelCause(t.Context())
	cancel(broken)
	_, err = LoadCompact(canceled, cpuops.Q8, c, r)
	require.ErrorIs(t, err, broken)
	_, err = LoadCompact(t.Context(), 7, c, r)
	require.ErrorContains(t, err, "want Float32, BFloat16, Q8, Float8 or NF4")
	r.dtype = "float32"
	for _, name := range []string{embedName, normName} {
		for want, change := range map[string]func([]byte) []byte{
			"elements, want":      func(b []byte) []byte { return b[4:] },
			"elements":            func(b []byte) []byte { return append(b, 0, 0, 0, 0) },
			"of dtype \"int8\"":   nil,
			"not finite or too l": func(b []byte) []byte { b[3], b[2] = 0x7f, 0xc0; return b },
		} {
			bad := r
			if bad.change = func(n string, b []byte) []byte {
				if n == name {
					return change(b)
				}
				return b
			}; change == nil {
				bad.dtype, bad.change = "int8", nil
			}
			if _, err := LoadCompact(t.Context(), cpuops.Q8, c, bad); name == embedName || want[0] != 'n' {
				require.ErrorContains(t, err, want, name)
			}
		}
	}

	wide, err := NewModel(c, tensor.Float64, 3)
	require.NoError(t, err)
	_, err = wide.Compact(cpuops.Q8)
	require.ErrorContains(t, err, "want float32")
	seeds, err := NewModel(tiny(), tensor.Float32, 3)
	require.NoError(t, err)
	_, err = seeds.Compact(cpuops.Q8)
	require.ErrorContains(t, err, "has seeds")
	_, err = LoadCompact(t.Context(), cpuops.Q8, tiny(), r)
	require.ErrorContains(t, err, "no seeds")
}
