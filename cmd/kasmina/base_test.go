package main

import (
	"bytes"
	"fmt"
	"math"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/hf"
)

// TestPrintShift compares models whose logits are known multiples of each other.
func TestPrintShift(t *testing.T) {
	f, err := hf.Open(tiny)
	require.NoError(t, err)
	defer f.Close()
	tokens := []int{5, 9, 2, 40, 11}
	scaled := func(by float32) *llm.Model {
		m, err := f.Load(t.Context())
		require.NoError(t, err)
		for i := range m.Param("model.norm.weight").Float32s() {
			m.Param("model.norm.weight").Float32s()[i] *= by
		}
		return m
	}

	m := scaled(1)
	logits, err := llm.AllLogits(t.Context(), m, tokens)
	require.NoError(t, err)
	sum, most := 0.0, 0.0
	for _, x := range logits.Float32s() {
		sum, most = sum+math.Abs(float64(x)), max(most, math.Abs(float64(x)))
	}

	for _, c := range []struct {
		by   float32
		same int // number of tokens that stay the likeliest
	}{{1, 5}, {2, 5}, {-1, 0}} {
		var told bytes.Buffer
		require.NoError(t, printShift(t.Context(), &told, m, scaled(c.by), tokens))
		by := math.Abs(float64(c.by) - 1)
		require.Contains(t, told.String(), fmt.Sprintf("the logits differ by %.3g on average and by at most %.3g, and the likeliest "+
			"next token is the same at %d of 5 positions\n", by*sum/float64(len(logits.Float32s())), by*most, c.same))
	}
}

// TestMergedShift checks that merging adapters that were trained next to weights in NF4 prints the distance of the saved
// model from the trained one, and that merging other adapters prints none.
func TestMergedShift(t *testing.T) {
	const prefix = "merged    into the weights of the model's files; compared with the "
	data := writeTuning(t, 40)
	adapter, merged := filepath.Join(t.TempDir(), "out"), filepath.Join(t.TempDir(), "merged")
	_, err := kasmina(t, finetuneArgs(data, adapter, "--base", "nf4")...)
	require.NoError(t, err)
	told := stderrOf(t, "convert", "-m", adapter, "-o", merged, "--precision", "f32")

	f, err := hf.Open(tiny)
	require.NoError(t, err)
	defer f.Close()
	base, err := llm.LoadFrozen(t.Context(), cpuops.NF4, f.Config, f)
	require.NoError(t, err)
	trained, err := hf.LoadAdapter(t.Context(), adapter, base, f)
	require.NoError(t, err)
	saved, err := hf.Load(t.Context(), merged)
	require.NoError(t, err)

	tok, err := tokenizerOf(f)
	require.NoError(t, err)
	tokens := tok.Encode([]byte(shiftText))
	tokens = tokens[:min(len(tokens), mostShift)]
	from, err := llm.AllLogits(t.Context(), trained, tokens)
	require.NoError(t, err)
	to, err := llm.AllLogits(t.Context(), saved, tokens)
	require.NoError(t, err)
	sum, most := 0.0, 0.0
	for i, x := range from.Float32s() {
		d := math.Abs(float64(x - to.Float32s()[i]))
		sum, most = sum+d, max(most, d)
	}
	mean := sum / float64(len(from.Float32s()))
	require.Greater(t, mean, 0.01) // NF4 changes the logits

	var printedMean, printedMost float64
	var same, of int
	at := bytes.Index([]byte(told), []byte(prefix))
	require.GreaterOrEqual(t, at, 0, told)
	_, err = fmt.Sscanf(told[at+len(prefix):], "nf4 weights used in training, the logits differ by %g on average and by at most %g, and the "+
		"likeliest next token is the same at %d of %d positions", &printedMean, &printedMost, &same, &of)
	require.NoError(t, err)
	require.InEpsilon(t, mean, printedMean, 0.01)
	require.InEpsilon(t, most, printedMost, 0.01)
	require.Equal(t, len(tokens), of)
	require.Less(t, same, of+1)

	for _, c := range []struct {
		more    []string
		printed bool
	}{{[]string{"--base", "nf4"}, true}, {nil, false}, {[]string{"--base", "nf4", "--quiet"}, false}} {
		args := append(finetuneArgs(data, filepath.Join(t.TempDir(), "out"), "--merge", "--steps", "2"), c.more...)
		told := stderrOf(t, args...)
		require.Equal(t, c.printed, bytes.Contains([]byte(told), []byte(prefix+"nf4 weights")), told)
	}
}
