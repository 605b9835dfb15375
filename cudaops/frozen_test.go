package cudaops

import (
	"encoding/binary"
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/graph"
)

// logitsOf are those of a graph for some ids.
func logitsOf(t *testing.T, m *Machine, g *llm.Graph) []float32 {
	t.Helper()
	require.NoError(t, g.LetTokens([]int{3, 1, 4, 1, 5}))
	require.NoError(t, m.RunAll())
	v, err := m.Value(g.Logits)
	require.NoError(t, err)
	return v.Data().([]float32)
}

// valueless returns the graph of a model with parameters that have no value, and a function that
// reads them in a type.
func valueless(t *testing.T, m *llm.Model, kind llm.GraphKind, p Precision) (*llm.Graph,
	func(*gorgonia.Node, func([]byte, Precision) error) error) {
	g, err := m.Graph(kind, 1)
	require.NoError(t, err)
	bare, err := graph.Build(graph.Outline(m.Config), kind, 1)
	require.NoError(t, err)
	values := map[string][]float32{}
	for i, n := range g.Params {
		require.Equal(t, n.Name(), bare.Params[i].Name())
		require.Equal(t, n.Shape(), bare.Params[i].Shape())
		require.Nil(t, bare.Params[i].Value())
		values[n.Name()] = n.Value().Data().([]float32)
	}
	return bare, func(n *gorgonia.Node, put func([]byte, Precision) error) error {
		var all []byte
		for _, v := range values[n.Name()] {
			if p == Float32 {
				all = binary.LittleEndian.AppendUint32(all, math.Float32bits(v))
			} else {
				all = binary.LittleEndian.AppendUint16(all, uint16(half.NewBFloat16(v)))
			}
		}
		for len(all) > 0 {
			n := min(len(all), 40)
			if err := put(all[:n], p); err != nil {
				return err
			}
			all = all[n:]
		}
		return nil
	}
}

// TestFrozen wants frozen parameters to give the same bits in less memory, from values and from
// what is read, in one type and another, and another machine to share them.
func TestFrozen(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testFrozen(t, device, fakeOption)
	})
	t.Run("float32", func(t *testing.T) { testFrozen(t, openGPU(t)) })
	t.Run("bfloat16", func(t *testing.T) { testFrozen(t, openGPU(t), WithPrecision(BFloat16)) })
}

func testFrozen(t *testing.T, device *Device, opts ...MachineOption) {
	for _, untied := range []bool{false, true} {
		c := llm.Config{Vocab: 24, Dim: 16, Layers: 2, Heads: 2, KVHeads: 1, Seq: 8,
			Untied: untied, Traits: llm.Traits{QKNorm: untied, QKVBias: !untied}}.Default()
		m, err := llm.NewModel(c, tensor.Float32, 1)
		require.NoError(t, err)
		for _, x := range m.Params { // that can be read in bfloat16 without another rounding
			for i, v := range x.Value.Float32s() {
				x.Value.Float32s()[i] = half.NewBFloat16(v).Float32()
			}
		}
		open := func(g *llm.Graph, more ...MachineOption) *Machine {
			machine, err := NewMachine(device, g.G, append(append(more, opts...), WithStrict(),
				WithTuning(TuneOff))...)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, machine.Close()) })
			return machine
		}
		g, err := m.Graph(llm.ForLogits, 1)
		require.NoError(t, err)
		plain := open(g, WithParams(g.Params...))
		want := logitsOf(t, plain, g)
		of := open(g, WithFrozen(nil, g.Params...))
		require.Equal(t, want, logitsOf(t, of, g))
		if !untied || of.options.Activation != gpu.Float32 { // copies of which there are in float32
			require.Less(t, of.Memory(), plain.Memory())
		}
		for i := range m.Params {
			v, err := of.Value(g.Params[i])
			require.NoError(t, err)
			require.Equal(t, m.Params[i].Value.Data(), v.Data())
		}
		require.NoError(t, of.Download())
		for _, stored := range []Precision{Float32, BFloat16} {
			bare, read := valueless(t, m, llm.ForLogits, stored)
			owner := open(bare, WithFrozen(read, bare.Params...))
			require.Equal(t, want, logitsOf(t, owner, bare))
			require.Equal(t, of.Memory(), owner.Memory())
			beside, _ := valueless(t, m, llm.ForLogits, stored)
			sharing := open(beside, WithParamsOf(owner))
			require.Equal(t, want, logitsOf(t, sharing, beside))
			require.Equal(t, tasksOf(plain), tasksOf(sharing))
		}
	}
}

// TestFrozenErrors wants what is read to be as much as there is.
func TestFrozenErrors(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	m, err := llm.NewModel(llm.Config{Vocab: 24, Dim: 16, Layers: 1, Heads: 2, Seq: 8}.Default(),
		tensor.Float32, 1)
	require.NoError(t, err)
	broken := errors.New("the disk is gone")
	for want, change := range map[string]func([]byte, func([]byte, Precision) error) error{
		"elements of": func(part []byte, put func([]byte, Precision) error) error { return nil },
		"more than its": func(part []byte, put func([]byte, Precision) error) error {
			return errors.Join(put(part, Float32), put(part, Float32))
		},
		"no number of elements": func(part []byte, put func([]byte, Precision) error) error {
			return put(part[:3], Float32)
		},
		"numbers of type f8": func(part []byte, put func([]byte, Precision) error) error {
			return put(part, Float8)
		},
		broken.Error(): func([]byte, func([]byte, Precision) error) error { return broken },
	} {
		g, read := valueless(t, m, llm.ForLogits, Float32)
		_, err := NewMachine(device, g.G, fakeOption, WithFrozen(func(n *gorgonia.Node,
			put func([]byte, Precision) error) error {
			return read(n, func(part []byte, _ Precision) error { return change(part, put) })
		}, g.Params...))
		require.ErrorContains(t, err, want)
	}
	g, _ := valueless(t, m, llm.ForLogits, Float32)
	_, err = NewMachine(device, g.G, fakeOption, WithFrozen(nil, g.Params...))
	require.ErrorContains(t, err, "has no value")
	_, err = NewMachine(device, g.G, fakeOption, WithFrozen(nil, g.Logits))
	require.ErrorContains(t, err, "is no input")
}

// TestDecoding wants machines that keep keys and values to have the logits that the CPU has, of
// texts that grow by one token or by many, and beyond what is kept at first; and refusals of what
// fits no cache.
func TestDecoding(t *testing.T) {
	device, _, kernels := openFake(t, fake.Config{})
	for name, traits := range map[string]llm.Traits{
		"llama": {}, "windows": {Blocks: []llm.Block{{Window: 7}, {}}}, "norms": {QKNorm: true},
		"biases": {QKVBias: true}, "gemma": {GELU: true, PostNorms: true, NormPlusOne: true},
		"without RoPE": {Blocks: []llm.Block{{}, {NoRoPE: true}}},
	} {
		t.Run(name, func(t *testing.T) {
			c := llm.Config{Vocab: 19, Dim: 16, Layers: 2, Heads: 4, KVHeads: 2, Seq: 1100,
				Traits: traits}
			m, err := llm.NewModel(c.Default(), tensor.Float32, 1)
			require.NoError(t, err)
			decode := func(make func(*graph.Graph) (graph.Machine, error)) *graph.Decoding {
				d, err := graph.NewDecoding(m.Parts(), make)
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, d.Close()) })
				return d
			}
			var attention *Machine
			var cached *gorgonia.Node
			onGPU := decode(func(g *graph.Graph) (graph.Machine, error) {
				made, err := NewMachine(device, g.G, kernels, WithStrict(),
					WithParams(g.Params...), WithOutputs(g.Outputs()...))
				if err == nil && g.Position != nil {
					attention = made
					for n := range made.runner.Program.Kept {
						cached = n
					}
				}
				return made, err
			})
			onCPU := decode(nil)
			var tokens []int
			for i := range c.Seq {
				tokens = append(tokens, i*i%19)
			}
			for _, n := range []int{1, 2, 3, 20, 21, 22, 140, 141, 1022, 1023, 1024, 1025, 1026, 5, 6,
				1100} {
				want, err := onCPU.Next(t.Context(), tokens[:n])
				require.NoError(t, err)
				got, err := onGPU.Next(t.Context(), tokens[:n])
				require.NoError(t, err)
				require.InDeltaSlice(t, want, got, 1e-5, n)
			}
			require.ErrorContains(t, attention.Keep(cached, nil, nil, nil), "want a machine on the same")
			require.ErrorContains(t, attention.Keep(nil, attention, nil, nil), "no attention")
			require.ErrorContains(t, attention.Keep(cached, attention, cached, cached), "is not kept")
		})
	}
}
