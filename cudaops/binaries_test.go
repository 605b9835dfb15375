package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/cudaops/internal/tune"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// cards is GPUs of the compute capabilities that the units have machine code for. Their cache is
// small, since timing overwrites it.
var cards = []gpu.DeviceInfo{
	{Name: "A100", Major: 8, SMs: 108, SharedPerBlock: 163 << 10, SharedPerSM: 164 << 10},
	{Name: "L40S", Major: 8, Minor: 9, SMs: 142, SharedPerBlock: 99 << 10, SharedPerSM: 100 << 10},
	{Name: "H200", Major: 9, SMs: 132, SharedPerBlock: 227 << 10, SharedPerSM: 228 << 10},
	{Name: "B200", Major: 10, SMs: 148, SharedPerBlock: 227 << 10, SharedPerSM: 228 << 10},
}

const hopper = 2 // in cards

// openBinaries returns a device on which kernels do nothing, but exist only if the binary of their
// unit has them, and take only the arguments that they have there.
func openBinaries(t *testing.T, card gpu.DeviceInfo) *Device {
	t.Helper()
	card.Memory, card.L2, card.RegistersPerSM, card.ThreadsPerSM = 1<<30, 1<<16, 65536, 1536
	device, err := Open(withDriver(fake.New(fake.Config{Devices: []gpu.DeviceInfo{card},
		Images: kerneltest.Kernels})))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, device.Close()) })
	return device
}

// launch runs what a machine has to do as it is, recorded and replayed, with updates behind it.
func launch(t *testing.T, m *Machine) {
	t.Helper()
	for range 3 {
		require.NoError(t, m.RunAll())
		if m.optimizer == nil {
			continue
		}
		// of memory that nothing has written
		if _, err := m.Update(); !errors.Is(err, ErrNonFinite) {
			require.NoError(t, err)
		}
	}
	require.NoError(t, m.Close())
}

// TestModelFitsBinaries launches the kernels of models in training, and of their updates, in every
// precision, on every card that has machine code: in all ways, since each is timed.
func TestModelFitsBinaries(t *testing.T) {
	for i, card := range cards {
		for _, p := range []Precision{Float32, Float16, BFloat16, Float8} {
			if p == Float8 && i != hopper {
				continue
			}
			t.Run(fmt.Sprint(card.Name, " ", p), func(t *testing.T) {
				device := openBinaries(t, card)
				var log bytes.Buffer
				timed := func(c *machineConfig) error {
					c.tuning, c.tuneLeast, c.tunePath = tune.Full, 1,
						filepath.Join(t.TempDir(), "tune.json")
					return nil
				}
				_, larger := float8Model(t, llm.ForTraining, 1, 128)
				for _, of := range []struct {
					*batch
					newOptimizer func() (optim.Optimizer, error)
				}{{grafted(t, 1), newAdamW}, {larger, newMuon}} {
					m, err := NewMachine(device, of.G, WithPrecision(p), WithParams(of.Params...),
						WithOutputs(of.Loss), timed,
						WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
					require.NoError(t, err)
					rule, err := of.newOptimizer()
					require.NoError(t, err)
					require.NoError(t, m.SetOptimizer(rule, 1))
					launch(t, m)
				}
				require.NotRegexp(t, "cuModule|cuLaunch|cuFunc|kernels[.:]", log.String(),
					"a way that cannot be launched is left out with a warning")
			})
		}
	}
}

// TestKasminaFitsBinaries launches the kernels of layers with narrow and wide slots, with all
// telemetry and samples of it.
func TestKasminaFitsBinaries(t *testing.T) {
	device := openBinaries(t, cards[hopper])
	for name, mode := range map[string]state.Telemetry{
		"all": {Mode: state.Debug}, "sampled": {Mode: state.Sampling, Every: 2, Share: 0.5},
	} {
		for _, width := range []int{3, 24} {
			t.Run(fmt.Sprint(name, " ", width), func(t *testing.T) {
				k := newWideKasminaGraph(t, 1, width, []state.Option{state.WithTelemetry(mode)})
				launch(t, k.open(t, device))
			})
		}
	}
}

// TestStockFitsBinaries launches the kernels of Gorgonia's own ops.
func TestStockFitsBinaries(t *testing.T) {
	for _, p := range []Precision{Float32, BFloat16} {
		t.Run(fmt.Sprint(p), func(t *testing.T) {
			device, r := openBinaries(t, cards[hopper]), rand.New(rand.NewPCG(1, 1))
			for _, c := range stockCases(r) {
				graph, err := c.graph(tensor.Float32, !c.constant)
				require.NoError(t, err)
				results := gorgonia.Nodes{graph.out}
				if !c.constant {
					results = append(results, derivatives(graph.in)...)
				}
				var values [][]float64
				for _, s := range c.shapes {
					values = append(values, make([]float64, opbase.Size(s)))
				}
				require.NoError(t,
					graph.let(values, make([]float64, opbase.Size(graph.out.Shape()))))
				m, err := NewMachine(device, graph.g, WithPrecision(p), WithStrict(),
					WithOutputs(results...))
				require.NoError(t, err, c.name)
				launch(t, m)
			}
		})
	}
}
