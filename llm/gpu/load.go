package gpu

import (
	"cmp"
	"context"
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op/kvcache"
)

// Weights reads the parameters of a model by name, like hf.Folder. Read passes the elements of a
// parameter to put, in order and in parts, as little-endian numbers of type float32, float16 or
// bfloat16. Several goroutines may call Read concurrently.
type Weights interface {
	Read(ctx context.Context, name string, put func(part []byte, dtype string) error) error
}

var dtypes = map[string]cudaops.Precision{"float32": cudaops.Float32, "float16": cudaops.Float16,
	"bfloat16": cudaops.BFloat16}

// Load reads weights directly to the device and returns an inference for losses and generation. The
// host doesn't keep the weights, and the device stores matrices in the type that the precision uses
// for activations, such as two bytes per element with BFloat16 (see [cudaops.WithFrozen]).
//
// Kernels are chosen by rules unless an option requests tuning. Close the inference before the device.
func Load(ctx context.Context, device *cudaops.Device, precision cudaops.Precision, c llm.Config,
	w Weights, opts ...cudaops.MachineOption) (*llm.Inference, error) {
	i, err := load(ctx, device, precision, c, w, nil, opts)
	if err != nil {
		return nil, fmt.Errorf("llm/gpu: Load: %w", err)
	}
	return i, nil
}

// LoadAdapted is [Load] for a model with adapters. A batcher of the inference continues each text with one of the
// adapters or with none, in the same passes; see [llm.Batcher.Adapted].
func LoadAdapted(ctx context.Context, device *cudaops.Device, precision cudaops.Precision, c llm.Config, w Weights,
	adapters []*llm.Adapter, opts ...cudaops.MachineOption) (*llm.Inference, error) {
	set, err := llm.NewAdapterSet(ctx, c, adapters, w)
	if err != nil {
		return nil, fmt.Errorf("llm/gpu: LoadAdapted: %w", err)
	}
	i, err := load(ctx, device, precision, c, w, set, opts)
	if err != nil {
		return nil, fmt.Errorf("llm/gpu: LoadAdapted: %w", err)
	}
	return i, nil
}

func load(ctx context.Context, device *cudaops.Device, precision cudaops.Precision, c llm.Config,
	w Weights, set *llm.AdapterSet, opts []cudaops.MachineOption) (*llm.Inference, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}

	// A small graph for logits has the same parameters as all other graphs.
	g, err := llm.BuildGraph(llm.Outline(c), llm.ForLogits, 1, llm.WithWindow(1), llm.WithAdapterSet(set))
	if err != nil {
		return nil, err
	}

	all := append([]cudaops.MachineOption{cudaops.WithPrecision(precision),
		cudaops.WithTuning(cudaops.TuneOff)}, opts...)
	read := func(n *gorgonia.Node, put func([]byte, cudaops.Precision) error) error {
		typed := func(part []byte, dtype string) error {
			t, ok := dtypes[dtype]
			if !ok {
				return fmt.Errorf("%s is of dtype %.40q, want float32, float16 or bfloat16",
					n.Name(), dtype)
			}
			return put(part, t)
		}
		if ok, err := set.Read(n.Name(), typed); ok {
			return err
		}
		return w.Read(ctx, n.Name(), typed)
	}

	owner, err := cudaops.NewMachine(device, g.G,
		append([]cudaops.MachineOption{cudaops.WithFrozen(read, g.Params...)}, all...)...)
	if err != nil {
		return nil, err
	}

	i := llm.InferenceOf(c, func(g *llm.Graph) (llm.Machine, error) {
		return cudaops.NewMachine(device, g.G, append(append(draws(g),
			cudaops.WithParamsOf(owner), cudaops.WithOutputs(g.Outputs()...)), all...)...)
	}, owner.Close)
	i.DrawsOnDevice, i.Adapters = cudaops.DecodesOnDevice(), set
	return i, nil
}

// draws returns the option that makes the machine of a graph draw tokens, if it should.
func draws(g *llm.Graph) []cudaops.MachineOption {
	if !g.Draws {
		return nil
	}
	return []cudaops.MachineOption{cudaops.WithDraws(g.Logits, g.IDs)}
}

// NewBatcher returns a batcher for an inference returned by [Load]. The batcher takes ownership of the
// inference.
//
// If o.Tokens is 0, the cache is large enough for o.Texts texts of up to 8,192 tokens each, or for a
// single text of maximum length if that is longer, but takes at most three quarters of the device's free
// memory.
func NewBatcher(device *cudaops.Device, precision cudaops.Precision, c llm.Config, i *llm.Inference,
	o llm.BatcherOptions) (*llm.Batcher, error) {
	if o.Tokens == 0 {
		free, _, err := device.Memory()
		if err != nil {
			return nil, fmt.Errorf("llm/gpu: NewBatcher: %w", err)
		}
		o.Tokens = cacheTokens(c.Default(), precision, cmp.Or(o.Texts, 32), int(free/4*3))
	}

	return i.NewBatcher(o)
}

// longText is the length of texts for which NewBatcher reserves memory. Longer texts are rare.
const longText = 8192

// cacheTokens returns the number of tokens to reserve memory for, given the number of texts and the
// maximum number of bytes. A text occupies whole pages.
func cacheTokens(c llm.Config, p cudaops.Precision, texts, bytes int) int {
	element := 2
	if p == cudaops.Float32 {
		element = 4
	}
	each := 2 * element * c.Layers * c.KVHeads * c.HeadDim
	pages := (min(c.Seq, longText) + kvcache.PageTokens - 1) / kvcache.PageTokens
	return min(max(c.Seq, texts*pages*kvcache.PageTokens), bytes/each)
}
