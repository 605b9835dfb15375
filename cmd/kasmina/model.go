package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"sync/atomic"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/hf"
	tokenizers "github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

// common holds the options of commands that compute with a model.
type common struct {
	model, data, out, device, precision string
	seq                                 int

	// onGPU returns the precision on a GPU if there is no --precision. Without it, that is float32.
	onGPU func() cudaops.Precision

	adapters []string // folders of adapters
	lookup   int      // see llm.BatcherOptions.Lookup
}

func (o *common) modelFlag(c *cobra.Command) {
	c.Flags().StringVarP(&o.model, "model", "m", "", "model `directory` (must contain config.json), or GGUF file")
}

func (o *common) dataFlag(c *cobra.Command) {
	c.Flags().StringVarP(&o.data, "data", "d", "", "text `file`, or a folder of them")
}

func (o *common) machineFlags(c *cobra.Command) {
	o.deviceFlags(c, "type of matrix products: f32 or bf16, and on a GPU also f16 or f8 (default f32)",
		"f32", "bf16", "f16", "f8")
}

// deviceFlags adds --device, and --precision with the given usage and values.
func (o *common) deviceFlags(c *cobra.Command, usage string, precisions ...cobra.Completion) {
	f := c.Flags()
	f.StringVar(&o.device, "device", "auto", "where to compute: cpu, cuda, or auto for a GPU if there is one")
	f.StringVar(&o.precision, "precision", "", usage)
	completeFlag(c, "device", "auto", "cpu", "cuda")
	completeFlag(c, "precision", precisions...)
}

// open opens the device to compute on. It returns nil for the CPU.
func (o *common) open(stderr io.Writer) (*cudaops.Device, cudaops.Precision, error) {
	return o.openFor(nil, stderr)
}

// openFor implements open for one of several processes.
func (o *common) openFor(w *comm.World, stderr io.Writer) (*cudaops.Device, cudaops.Precision,
	error) {
	precision := cudaops.Float32
	if o.precision != "" {
		if err := precision.UnmarshalText([]byte(o.precision)); err != nil {
			return nil, 0, fmt.Errorf("--precision is %q, want f32, bf16, f16 or f8", o.precision)
		}
	}

	switch o.device {
	case "auto", "cuda":
		device, err := openGPU(w)
		if err == nil {
			if o.precision == "" && o.onGPU != nil {
				precision = o.onGPU()
			}
			return device, precision, nil
		}
		if o.device == "cuda" {
			return nil, 0, fmt.Errorf("--device cuda: %w; use --device cpu to compute without a GPU", err)
		}
		if !errors.Is(err, cudaops.ErrNoDevice) {
			fmt.Fprintf(stderr, "note      using the CPU, because the GPU cannot be used: %v\n", err)
		}
	case "cpu":
	default:
		return nil, 0, fmt.Errorf("--device is %q, want cpu, cuda or auto", o.device)
	}

	switch precision {
	case cudaops.Float32, cudaops.BFloat16:
		if err := cpuops.UseBFloat16(precision == cudaops.BFloat16); err != nil {
			return nil, 0, fmt.Errorf("--precision bf16: %w; leave the option out to use f32", err)
		}
		return nil, precision, nil
	}

	return nil, 0, fmt.Errorf("--precision %s needs a GPU; on a CPU, use f32 or bf16", o.precision)
}

// openGPU opens the GPU that belongs to a process.
func openGPU(w *comm.World) (*cudaops.Device, error) {
	at, err := gpu.Ordinal(w)
	if err != nil {
		return nil, err
	}
	return cudaops.Open(cudaops.WithOrdinal(at))
}

// load reads the model of a folder and shows a progress bar.
func load(ctx context.Context, f *hf.Folder, stderr io.Writer, opts ...hf.LoadOption) (*llm.Model,
	error) {
	at, erase := bar(stderr, "loading", true)
	defer erase()
	return f.Load(ctx, append(opts, hf.WithProgress(at))...)
}

// A vocabulary is the tokenizer of a folder, limited to the tokens of its model. For example, the
// published tokenizer of Gemma 3 has an additional token for pictures. Only texts with such a token are
// rejected.
type vocabulary struct {
	*tokenizers.Tokenizer
	size int // of the model's vocabulary
}

// tokenizerOf reads the tokenizer of a folder, for its model.
func tokenizerOf(f *hf.Folder) (vocabulary, error) {
	tok, err := f.Tokenizer()
	if errors.Is(err, fs.ErrNotExist) {
		return vocabulary{}, fmt.Errorf("%s has no tokenizer.json: copy the tokenizer.json of the model there", f.Dir)
	}
	return vocabulary{tok, f.Config.Vocab}, err
}

// VocabSize returns the number of ids that both the tokenizer and the model have.
func (v vocabulary) VocabSize() int { return min(v.size, v.Tokenizer.VocabSize()) }

// check returns an error that names the first token outside the model's vocabulary.
func (v vocabulary) check(ids []int) error {
	for _, id := range ids {
		if id >= v.size {
			token, _ := v.Token(id)
			return fmt.Errorf("the text has the token %.60q with the id %d, and the model has %d "+
				"tokens: remove it, or use the tokenizer that belongs to the model", token, id,
				v.size)
		}
	}
	return nil
}

// inference loads a model for sequences of seq tokens and shows a progress bar. If device is nil, the model
// computes on the CPU. Otherwise its weights are read directly to the device. If adapter is not nil, it becomes
// part of the model.
func (o *common) inference(ctx context.Context, f *openedModel, adapter *llm.Adapter, seq int,
	device *cudaops.Device, p cudaops.Precision, stderr io.Writer) (*llm.Inference, error) {
	return o.adaptedInference(ctx, f, adapter, nil, seq, device, p, stderr)
}

// adaptedInference is like inference, but also loads adapters on the device among which texts can choose.
func (o *common) adaptedInference(ctx context.Context, f *openedModel, adapter *llm.Adapter, chosen []*llm.Adapter,
	seq int, device *cudaops.Device, p cudaops.Precision, stderr io.Writer) (*llm.Inference, error) {
	at, erase := bar(stderr, "loading", true)
	defer erase()

	config := f.Config
	config.Seq = seq
	w := newCounted(f.Folder, at)
	seeded := adapter != nil && len(adapter.Seeds) > 0
	if seeded && device != nil {
		return nil, errors.New("on a GPU, chunk seeds work with generate, chat and serve only: measure with --device cpu")
	}
	if adapter != nil {
		config.Adapter, w.adapter = adapter.LoRA, adapter
	}

	if device != nil {
		var opts []cudaops.MachineOption
		if t, packed := o.packedType(); packed {
			weights, err := llm.PackLayers(ctx, t, config, w)
			if err != nil {
				return nil, err
			}
			opts = append(opts, cudaops.WithWeights(weights))
		}
		if len(chosen) > 0 {
			return gpu.LoadAdapted(ctx, device, p, config, w, chosen, opts...)
		}
		return gpu.Load(ctx, device, p, config, w, opts...)
	}

	m, err := llm.LoadCompact(ctx, o.weightType(f.Folder), config, w)
	if err == nil && seeded {
		m, err = m.WithSeeds(adapter)
	}
	if err != nil {
		return nil, err
	}
	return m.Inference(), nil
}

// counted is a folder that reports the number of weight bytes read so far.
type counted struct {
	*hf.Folder
	adapter *llm.Adapter // may be nil
	at      func(done, of int64)
	done    atomic.Int64
	total   int64
}

func newCounted(f *hf.Folder, at func(done, of int64)) *counted {
	w := &counted{Folder: f, at: at}
	for _, t := range f.Tensors() {
		w.total += t.Bytes
	}
	return w
}

// Read implements gpu.Weights and llm.WeightReader.
func (w *counted) Read(ctx context.Context, name string,
	put func(part []byte, dtype string) error) error {
	if w.adapter != nil && llm.IsAdapterParam(name) {
		v := w.adapter.Param(name)
		if v == nil {
			return fmt.Errorf("the adapters have no %s", name)
		}
		part, err := binary.Append(nil, binary.LittleEndian, v.Float32s())
		if err != nil {
			return err
		}
		return put(part, "float32")
	}
	return w.Folder.Read(ctx, name, func(part []byte, dtype string) error {
		w.at(w.done.Add(int64(len(part))), w.total)
		return put(part, dtype)
	})
}
