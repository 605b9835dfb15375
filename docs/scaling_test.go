package docs_test

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/llm"
)

// Inputs of SCALING.md. Bandwidths are in bytes per second.
const (
	hostGPUs   = 8
	infiniBand = 400e9 / 8            // per GPU
	ethernet   = 100e9 / 8 / hostGPUs // per GPU of a host
	netShare   = 0.9                  // assumed usable share of a network's bandwidth
	peerDelay  = 3e-6                 // s, assumed, for each peer in an exchange
	h100Memory = 3.35e12              // from the data sheet
	adamShare  = 4173e9 / 4800e9      // measured share of the data sheet's bandwidth on an H200: BENCHMARKS.md
	adamBytes  = 4173e9 * 2587e-6     // moved by AdamW at 350M: BENCHMARKS.md
	cardBytes  = 80e9                 // memory of an H100
)

// scaled is a model of the tables.
type scaled struct {
	name   string
	config llm.Config
	batch  int     // sequences per GPU
	pace   float64 // tokens per second on one GPU
}

// scaledModels returns the models of the tables, with the speeds from BENCHMARKS.md.
func scaledModels(t *testing.T) []scaled {
	gpt := func(dim, layers, heads, ff, seq int) llm.Config {
		return llm.Config{Vocab: 50304, Dim: dim, Layers: layers, Heads: heads, FF: ff,
			Seq: seq}.Default()
	}
	measured := pairs(t)
	all := []scaled{
		{"124M", gpt(768, 12, 12, 0, 1024), 32, measured[0].one},
		{"350M", gpt(1024, 24, 16, 2816, 1024), 16, measured[1].one},
		{"925M", gpt(2048, 16, 16, 5632, 2048), 8, measured[2].one},
		{"8B", llm.Config{Vocab: 128256, Dim: 4096, Layers: 32, Heads: 32, KVHeads: 8, FF: 14336,
			Seq: 8192, Untied: true}.Default(), 1, 0},
	}

	// Apart from the update, the 8B model is assumed to compute as many FLOPs per second as the 925M
	// model.
	like, last := all[2], &all[3]
	seconds := (like.compute() - like.update()) / (like.tokens() * like.config.FLOPs())
	last.pace = last.tokens() / (last.tokens()*last.config.FLOPs()*seconds + last.update())
	return all
}

// paramsOf returns the number of parameters of a model.
func paramsOf(c llm.Config) float64 {
	tables := 1
	if c.Untied {
		tables = 2
	}
	block := 2*c.Dim*c.HeadDim*(c.Heads+c.KVHeads) + 3*c.Dim*c.FF + 2*c.Dim
	return float64(tables*c.Vocab*c.Dim + c.Layers*block + c.Dim)
}

func (m scaled) tokens() float64  { return float64(m.batch * m.config.Seq) }
func (m scaled) compute() float64 { return m.tokens() / m.pace } // s, including the update
func (m scaled) update() float64  { return updateOf(paramsOf(m.config)) }

// updateOf returns the time of AdamW on one H100.
func updateOf(params float64) float64 {
	per := adamBytes / paramsOf(llm.Config{Vocab: 50304, Dim: 1024, Layers: 24, Heads: 16, FF: 2816,
		Seq: 1024}.Default())
	return per * params / (h100Memory * adamShare)
}

// moved is the number of bytes exchanged in a step for each parameter: the gradient and the new value in
// bf16.
const moved = 2 + 2

// addBytes is the memory traffic in bytes, per element, for adding a contribution in bf16 to a sum. Two
// GPUs add during the update, and more than two in separate kernels.
const addBytes = 2 + 4 + 4

// pair is a row of measurements in BENCHMARKS.md.
type pair struct{ params, tokens, one, two float64 }

// pairs returns the measurements with bf16 gradients, one per model.
func pairs(t *testing.T) (all []pair) {
	text, err := os.ReadFile("../BENCHMARKS.md")
	require.NoError(t, err)
	number := func(s string) float64 {
		f, err := strconv.ParseFloat(strings.ReplaceAll(s, ",", ""), 64)
		require.NoError(t, err)
		return f
	}
	shapes := map[string]llm.Config{
		"124M": {Vocab: 50304, Dim: 768, Layers: 12, Heads: 12, Seq: 1024},
		"350M": {Vocab: 50304, Dim: 1024, Layers: 24, Heads: 16, FF: 2816, Seq: 1024},
		"925M": {Vocab: 50304, Dim: 2048, Layers: 16, Heads: 16, FF: 5632, Seq: 2048}}
	line := regexp.MustCompile(
		`(?m)^\| (124M|350M|925M) \| (\d+) × (\d+) \| ([\d,]+) \| ([\d,]+) \|`)
	for _, m := range line.FindAllStringSubmatch(string(text), -1) {
		all = append(all, pair{paramsOf(shapes[m[1]].Default()), number(m[2]) * number(m[3]),
			number(m[4]), number(m[5])})
	}

	require.Len(t, all, 3)
	return all
}

// fit returns the delay of a step and the bandwidth of an exchange over NVLink that fit the measurements
// best. It fits a line to the additional time on two GPUs, plus the half of the update that each GPU
// saves.
func fit(t *testing.T) (delay, speed float64) {
	var n, sx, sy, sxx, sxy float64
	for _, p := range pairs(t) {
		x := p.params * moved / 2
		y := 2*p.tokens/p.two - p.tokens/p.one + updateOf(p.params)/2
		n, sx, sy, sxx, sxy = n+1, sx+x, sy+y, sxx+x*x, sxy+x*y
	}
	slope := (n*sxy - sx*sy) / (n*sxx - sx*sx)
	return (sy - slope*sx) / n, 1 / slope
}

// exchange describes how data is exchanged.
type exchange struct {
	net        float64 // bandwidth of a GPU to other hosts, in bytes per second
	hidden     bool    // exchanges that overlap with the passes take no time during them
	hostsFirst bool    // gradients are added within each host before they are sent
}

// step returns the duration of a step on the given number of GPUs, with bf16 gradients.
func (m scaled) step(t *testing.T, gpus float64, how exchange) float64 {
	delay, nvlink := fit(t)
	params := paramsOf(m.config)
	share := (gpus - 1) / gpus
	gradients, weights := 2*params*share/nvlink, 2*params*share/nvlink
	if gpus > hostGPUs {
		out := (gpus - hostGPUs) / gpus
		crossing := 2 * params * out
		if how.hostsFirst {
			crossing /= hostGPUs
		}
		gradients = max(gradients, crossing/(how.net*netShare))
		weights = max(weights, 2*params*out/hostGPUs/(how.net*netShare))
	}

	compute := m.compute() - m.update()
	if how.hidden {
		gradients = max(0, gradients-compute*2/3)
		weights = max(0, weights-compute/3)
	}

	adding := params * addBytes / (h100Memory * adamShare)
	return compute + m.update()/gpus + adding + delay + 2*peerDelay*(gpus-1) + gradients + weights
}

// short formats a speed in tokens per second.
func short(x float64) string {
	switch {
	case x >= 9.995e6:
		return fmt.Sprintf("%.1f M", x/1e6)
	case x >= 1e6:
		return fmt.Sprintf("%.2f M", x/1e6)
	}
	return fmt.Sprintf("%.0f k", x/1e3)
}

// scalingTables returns the tables of SCALING.md.
func scalingTables(t *testing.T) []string {
	models := scaledModels(t)
	bytes := "| model | parameters | tokens per GPU | one GPU, ms | gradients sent | " +
		"parameters received | " +
		"state per GPU |\n| --- | --- | --- | --- | --- | --- | --- |\n"
	paces := "| model | GPUs | InfiniBand | % | hidden | hosts first | Ethernet | % | " +
		"hidden | hosts first |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
	for _, m := range models {
		p := paramsOf(m.config)
		bytes += fmt.Sprintf("| %s | %.0f M | %.0f | %.0f | %.2f GB | %.2f GB | %.1f GB |\n",
			m.name, p/1e6, m.tokens(), 1e3*m.compute(), 2*p*7/8/1e9, 2*p*7/8/1e9,
			stateBytes(p, 8)/1e9)
		for _, n := range []float64{8, 64, 512, 1024} {
			pace := func(how exchange) float64 { return n * m.tokens() / m.step(t, n, how) }
			percent := func(how exchange) string {
				return fmt.Sprintf("%.0f", 100*pace(how)/(n*m.pace))
			}
			paces += fmt.Sprintf("| %s | %.0f |", m.name, n)
			for _, net := range []float64{infiniBand, ethernet} {
				if n == hostGPUs && net == ethernet {
					paces += " – | – | – | – |"
					continue
				}
				first := percent(exchange{net, true, true})
				if n == hostGPUs {
					first = "–"
				}
				paces += fmt.Sprintf(" %s | %s | %s | %s |", short(pace(exchange{net: net})),
					percent(exchange{net: net}), percent(exchange{net, true, false}), first)
			}
			paces += "\n"
		}
	}

	return []string{bytes, paces, divisions(t, models[3])}
}

// stateBytes returns the memory per GPU: bf16 weights and gradients, and for its share float32 weights,
// sums and two moments.
func stateBytes(params, gpus float64) float64 { return params * (2 + 2 + 16/gpus) }

// divisions returns a table of the bytes moved by other forms of parallelism.
func divisions(t *testing.T, m scaled) string {
	_, nvlink := fit(t)
	p, c := paramsOf(m.config), m.config
	activations := m.tokens() * float64(c.Dim) * 2
	table := "| 8B on 8 GPUs | bytes per GPU | NVLink | InfiniBand | Ethernet | state per GPU |\n" +
		"| --- | --- | --- | --- | --- | --- |\n"
	for _, d := range []struct {
		name         string
		bytes, state float64
	}{
		{"this module", moved * p * 7 / 8, stateBytes(p, 8)},
		{"ZeRO-3", (2 + 2 + 2) * p * 7 / 8, p * (4 + 2 + 2 + 4 + 8) / 8},
		{"tensor", float64(4*c.Layers) * activations * 2 * 7 / 8, p * (4 + 2 + 2 + 4 + 8) / 8},
		{"pipeline", 2 * activations, p * (4 + 2 + 2 + 4 + 8) / 8},
	} {
		table += fmt.Sprintf("| %s | %.2f GB | %s | %s | %s | %.1f GB |\n", d.name, d.bytes/1e9,
			milliseconds(d.bytes/nvlink), milliseconds(d.bytes/(infiniBand*netShare)),
			milliseconds(d.bytes/(ethernet*netShare)), d.state/1e9)
	}

	return table
}

func milliseconds(s float64) string {
	switch {
	case s < 0.01:
		return fmt.Sprintf("%.1f ms", 1e3*s)
	case s < 10:
		return fmt.Sprintf("%.0f ms", 1e3*s)
	}
	return fmt.Sprintf("%.0f s", s)
}

// TestScaling computes the tables and figures of SCALING.md from the measurements.
func TestScaling(t *testing.T) {
	m, err := llm.NewModel(llm.Config{Vocab: 96, Dim: 16, Layers: 3, Heads: 4, KVHeads: 2, FF: 24,
		Seq: 8, Untied: true}.Default(), tensor.Float32, 1)
	require.NoError(t, err)
	require.Equal(t, float64(m.NumParams()), paramsOf(m.Config))
	text, err := os.ReadFile("SCALING.md")
	require.NoError(t, err)
	for _, table := range scalingTables(t) {
		require.Contains(t, string(text), table, "want this table:\n%s", table)
	}

	delay, nvlink := fit(t)
	words := strings.Join(strings.Fields(string(text)), " ") // without line breaks
	require.Contains(t, words, fmt.Sprintf("a constant delay of %.1f ms", 1e3*delay))
	require.Contains(t, words, fmt.Sprintf("at %.0f GB/s", nvlink/1e9))
	for _, p := range pairs(t) { // the line must fit each measurement
		predicted := p.tokens/p.one - updateOf(p.params)/2 + delay + p.params*moved/2/nvlink
		require.InEpsilon(t, 2*p.tokens/p.two, predicted, 0.005)
	}

	large := paramsOf(scaledModels(t)[3].config)
	require.Greater(t, stateBytes(large, 2), cardBytes)
	require.Less(t, stateBytes(large, 8), cardBytes)
	require.Contains(t, words, fmt.Sprintf("on two GPUs, it would be %.0f GB per GPU", stateBytes(large, 2)/1e9))
}
