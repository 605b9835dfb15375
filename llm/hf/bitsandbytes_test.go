package hf

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/optim"
)

// TestLossesOfBitsandbytes compares the losses of 20 steps on NF4 weights with those of PEFT 0.21.2 on a model
// with Linear4bit layers of bitsandbytes 0.50.2 (double quantization, float32 arithmetic, the embedding rounded
// to bfloat16), with the same initial adapters, batches and AdamW.
func TestLossesOfBitsandbytes(t *testing.T) {
	want := []float64{12.235719, 10.188069, 10.040545, 8.645960, 8.246821, 7.105431, 5.668275, 7.206131, 6.550388,
		8.132438, 8.646023, 7.332015, 6.826635, 6.427178, 5.786701, 6.320852, 7.645540, 6.505453, 6.496853, 6.794683}

	f, err := Open("testdata/tiny")
	require.NoError(t, err)
	defer f.Close()
	c := f.Config
	c.Seq = 24
	base, err := llm.LoadFrozen(t.Context(), cpuops.NF4, c, f)
	require.NoError(t, err)
	targets, err := c.MatchLayers(llm.AllLinear)
	require.NoError(t, err)
	m, err := llm.Adapt(base, llm.LoRA{Rank: 4, Alpha: 8, Targets: targets}, 3)
	require.NoError(t, err)
	o, err := optim.NewAdamW(optim.WithLR(0.01), optim.WithWeightDecay(0))
	require.NoError(t, err)
	e, err := llm.CPUEngine()(m, o, llm.TrainConfig{Batch: 2, Accumulate: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, e.Close()) }()

	r := rand.New(rand.NewPCG(1, 2))
	for step, loss := range want {
		b := data.Batch{Count: 2 * c.Seq}
		at, stride := r.IntN(100), 1+r.IntN(3)
		for i := range 2 * c.Seq {
			b.Inputs = append(b.Inputs, (at+i*stride)%c.Vocab)
			b.Targets = append(b.Targets, (at+(i+1)*stride)%c.Vocab)
		}

		got, err := e.Gradients(b)
		require.NoError(t, err)
		require.InDelta(t, loss, got, 2e-5, "step %d", step)
		_, err = e.Update()
		require.NoError(t, err)
		require.NoError(t, e.Drop())
	}
}
