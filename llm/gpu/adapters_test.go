package gpu_test

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state/control"
)

// adapters trains LoRA seeds in a frozen model on a device, or on the CPU if device is nil. It returns
// the losses, the record of the seeds planted, and the final parameters.
func adapters(t *testing.T, device *cudaops.Device, p cudaops.Precision, growth llm.Growth,
	save string) (losses []float64, record string, params map[string][]float32) {
	t.Helper()
	c := siteModel()
	c.Streams = nil
	tr := trainerOf(t, device, p, c, llm.TrainConfig{Steps: 12, Batch: 4, Frozen: true, Directed: true})
	var lines bytes.Buffer
	growth.Record = &lines
	if growth.Replay == nil {
		growth.Controller = control.NewAdapters(6000)
	}

	require.NoError(t, tr.Grow(growth))
	host := map[string][]float32{}
	for _, q := range tr.Model.Params {
		host[q.Name] = append([]float32(nil), q.Value.Float32s()...)
	}

	tr.On(llm.MergeAtEnd(tr), func(e llm.Event) error {
		if e.Kind != llm.StepEnd {
			return nil
		}
		losses = append(losses, e.Loss)
		if e.Step == 5 {
			return tr.Save(save)
		}
		return nil
	})

	require.NoError(t, tr.Run(context.Background()))
	params = map[string][]float32{}
	for _, q := range tr.Model.Params {
		params[q.Name] = q.Value.Float32s()
	}

	require.Equal(t, host["model.embed_tokens.weight"], params["model.embed_tokens.weight"])
	require.NotEqual(t, host["model.layers.0.self_attn.o_proj.weight"],
		params["model.layers.0.self_attn.o_proj.weight"])
	return losses, lines.String(), params
}

// TestAdaptersOnGPU checks that LoRA seeds in a frozen model are planted at the same sites as on the
// CPU and learn as they do there, and that repeated runs are bit-identical in each precision.
func TestAdaptersOnGPU(t *testing.T) {
	device := open(t)
	dir := t.TempDir()
	want, planted, _ := adapters(t, nil, cudaops.Float32, llm.Growth{}, filepath.Join(dir, "cpu"))
	for _, p := range []cudaops.Precision{cudaops.Float32, cudaops.BFloat16, cudaops.Float16} {
		t.Run(p.String(), func(t *testing.T) {
			path := filepath.Join(dir, fmt.Sprint(p))
			losses, where, params := adapters(t, device, p, llm.Growth{}, path)
			again, _, same := adapters(t, device, p, llm.Growth{}, path)
			require.Equal(t, losses, again)
			require.Equal(t, params, same)
			if p == cudaops.Float32 {
				require.Equal(t, planted, where)
			}
			off := map[cudaops.Precision]float64{cudaops.Float32: 1e-4}[p]
			if off == 0 {
				off = 2e-2
			}
			require.InDeltaSlice(t, want, losses, off)
			t.Log(p, losses[0], losses[len(losses)-1], want[len(want)-1])
		})
	}
}
