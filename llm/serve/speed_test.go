package serve

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/sampler"
)

// BenchmarkServer compares the speed of the server with that of the bare decoder, in turns: eight texts of a model
// with 124 million parameters, streamed and not. It reports the server's share of the decoder's speed.
func BenchmarkServer(b *testing.B) {
	c := llm.Config{Vocab: 50304, Dim: 768, Layers: 12, Heads: 12, FF: 2048, Seq: 1024}.Default()
	m, err := llm.NewModel(c, tensor.Float32, 1)
	require.NoError(b, err)
	compact, err := m.Compact(cpuops.Q8)
	require.NoError(b, err)
	batcher, err := llm.NewCompactBatcher(compact, llm.BatcherOptions{Texts: 8})
	require.NoError(b, err)
	defer batcher.Close()
	model := newModel(b, batcher.Generator(), chatTemplate)
	model.Context = 1024
	cl := serveModel(b, model, Options{Slots: 8})

	const texts, tokens = 8, 24
	together := func(one func(i int)) time.Duration {
		began := time.Now()
		var all sync.WaitGroup
		for i := range texts {
			all.Go(func() { one(i) })
		}
		all.Wait()
		return time.Since(began)
	}
	bare := func(i int) {
		s, err := sampler.New(sampler.Config{Temperature: 1, Seed: uint64(i), Vocab: 400})
		if err != nil {
			b.Error(err)
			return
		}
		for _, err := range batcher.Generator().Generate(b.Context(), []int{i + 5, 6, 7}, tokens, s) {
			if err != nil {
				b.Error(err)
			}
		}
	}
	served := func(stream bool) func(i int) {
		return func(i int) {
			answer, err := http.Post(cl.url+textPath, "application/json", strings.NewReader(fmt.Sprintf(
				`{"prompt":[%d,6,7],"max_tokens":%d,"seed":%d,"ignore_eos":true,"stream":%v}`, i+5, tokens, i, stream)))
			if err != nil {
				b.Error(err)
				return
			}
			io.Copy(io.Discard, answer.Body)
			answer.Body.Close()
		}
	}

	best := [3]time.Duration{}
	for b.Loop() {
		for k, one := range []func(i int){bare, served(false), served(true)} {
			if d := together(one); best[k] == 0 || d < best[k] {
				best[k] = d
			}
		}
	}
	b.ReportMetric(texts*tokens/best[0].Seconds(), "tok/s")
	b.ReportMetric(best[0].Seconds()/best[1].Seconds(), "share")
	b.ReportMetric(best[0].Seconds()/best[2].Seconds(), "streamed-share")
}
