package cudaops

import (
	"bytes"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
)

// dnnWays is kernels with three ways to compute attention and, forward, cuDNN's, which differs as given.
type dnnWays struct {
	kernelSet
	fake    *fakeKernels
	way     fake.Way
	asked   bool // whether there is a cuDNN
	none    bool // there is none
	ran     []string
	planned int
}

func (k *dnnWays) DnnVersion() int {
	k.asked = true
	if k.none {
		return 0
	}
	return 91901
}

func (k *dnnWays) PlanDnnAttention(_ kernels.AttentionShape, _ driver.DType, _, _, _, _ kernels.Rows) error {
	if k.planned++; k.way.Fails {
		return errors.New("no engine")
	}
	return nil
}

func (k *dnnWays) AttentionVariants(kernels.AttentionShape, driver.DType, ...kernels.Rows) []kernels.AttentionVariant {
	return []kernels.AttentionVariant{kernels.AttentionHopper, kernels.AttentionMMA, kernels.AttentionPlain}
}

// Attention changes a result, and takes as long as the way does.
func (k *dnnWays) Attention(s driver.Stream, a kernels.AttentionShape, y kernels.Rows, lse driver.Ptr, q, key, v kernels.Rows,
	t driver.DType) error {
	way := k.way
	if a.Variant != kernels.AttentionCuDNN {
		way = fake.Way{Took: 5e6}
	}
	if way.Fails {
		return errors.New("no engine")
	}
	k.ran = append(k.ran, a.Variant.String())
	return joined(k.kernelSet.Attention(s, a, y, lse, q, key, v, t), k.fake.launch(s, func(l *fake.Launch) {
		l.Took = way.Took
		if way.Wrong {
			floatsAt(l, y.Ptr, 1)[0] += 100
		}
	}))
}

// dnnRun is what a machine did that trains a small model.
type dnnRun struct {
	*dnnWays
	ways    map[string]Choice
	timings int
	log     string
	last    []string // what its last run launched
	loss    []float32
}

func runDnn(t *testing.T, path string, k dnnWays, opts ...MachineOption) dnnRun {
	t.Helper()
	device, _, fakeOption := openFake(t, fake.Config{Devices: smallCache("GPU")})
	g, params, keep := fuseCase{}.graph(t, 3)
	var log bytes.Buffer
	private := func(c *machineConfig) error {
		c.tuneLeast, c.tunePath = 1e12, path
		inner := c.kernels
		c.kernels = func(ctx driver.Context) (kernelSet, error) {
			set, err := inner(ctx)
			if k.kernelSet = set; err == nil {
				k.fake = set.(*moduleOf).fakeKernels
			}
			return &k, err
		}
		return nil
	}
	m, err := NewMachine(device, g, append([]MachineOption{WithParams(params...), WithOutputs(keep...), fakeOption, private,
		WithLogger(slog.New(slog.NewTextHandler(&log, nil)))}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	r := dnnRun{dnnWays: &k, ways: map[string]Choice{}}
	for range 2 {
		k.ran = nil
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		r.last = k.ran[max(0, len(k.ran)-1):]
		for _, n := range append(keep, derivatives(params)...) {
			v, err := m.Value(n)
			if err != nil {
				t.Fatal(err)
			}
			r.loss = append(r.loss, flat(t, v)...)
		}
	}
	for _, c := range m.Choices() {
		r.ways[c.Op] = c
	}
	if r.log = log.String(); m.tuner.store != nil {
		r.timings = m.tuner.store.Timings()
	}
	return r
}

// TestDnnWay wants cuDNN's attention where it is the fastest and right, and never for a gradient.
func TestDnnWay(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	cached := WithTuning(TuneCached)
	path := filepath.Join(t.TempDir(), "tune.json")
	fast, slow := dnnWays{way: fake.Way{Took: 1e6}}, dnnWays{way: fake.Way{Took: 20e6}}
	without := runDnn(t, path, dnnWays{none: true}, cached)
	if w := without.ways[attentionOp].Way; w == "cudnn" || !without.asked {
		t.Fatalf("without cuDNN: way %q, asked for %v", w, without.asked)
	}
	first := runDnn(t, path, fast, cached)
	if c := first.ways[attentionOp]; c.Way != "cudnn" || c.Source != Measured || c.Of != 4 {
		t.Errorf("fast: %+v", c)
	}
	if c := first.ways["AttentionBackward"]; c.Of != 3 {
		t.Errorf("fast: %+v", c)
	}
	if !slices.Equal(first.last, []string{"cudnn"}) || strings.Contains(first.log, "WARN") {
		t.Errorf("fast: ran %q, log %s", first.last, first.log)
	}
	if !slices.Equal(first.loss, without.loss) {
		t.Error("other numbers with cuDNN")
	}
	again := runDnn(t, path, slow, cached)
	if c := again.ways[attentionOp]; c.Way != "cudnn" || c.Source != Stored || again.timings != first.timings {
		t.Errorf("a second start: %+v, %d timings, want %d", c, again.timings, first.timings)
	}
	fails := dnnWays{way: fake.Way{Fails: true}}
	for name, c := range map[string]struct {
		ways    dnnWays
		options []MachineOption
		warning string
	}{
		"slow":                           {slow, nil, ""},
		"wrong":                          {dnnWays{way: fake.Way{Took: 1e6, Wrong: true}}, nil, "differs by"},
		"no engine":                      {fails, nil, "no engine"},
		"forced upon what has no engine": {fails, []MachineOption{WithWays("Attention=cudnn")}, "is not computed by cuDNN: no engine"},
	} {
		r := runDnn(t, filepath.Join(t.TempDir(), "tune.json"), c.ways, append(c.options, cached)...)
		if r.ways[attentionOp].Way == "cudnn" {
			t.Errorf("%s: %+v", name, r.ways[attentionOp])
		}
		if !strings.Contains(r.log, c.warning) || (c.warning == "") == strings.Contains(r.log, "WARN") {
			t.Errorf("%s: log %q, want a warning %q", name, r.log, c.warning)
		}
	}
}

// TestDnnByRule wants cuDNN not even to be looked for where it is not to be chosen.
func TestDnnByRule(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	fast := dnnWays{way: fake.Way{Took: 1e6}}
	for _, opts := range [][]MachineOption{
		{WithTuning(TuneOff)}, {WithTuning(TuneOff), WithWays("RMSNorm=cudnn")}, {WithTuning(TuneCached), WithWays("Attention!=cudnn")},
		{WithTuning(TuneCached), WithWays("Attention*=mma")}, {WithTuning(TuneCached), WithWays("*=cudnn", "*=plain")},
	} {
		r := runDnn(t, filepath.Join(t.TempDir(), "tune.json"), fast, opts...)
		if r.asked || r.ways[attentionOp].Way == "cudnn" {
			t.Errorf("%+v", r.ways)
		}
	}
	k := tunedKernels{&fast, &tuner{rules: []wayRule{{op: "*", way: "cudnn"}}}}
	a := kernels.AttentionShape{Batch: 1, Seq: 8, Heads: 1, KVHeads: 1, HeadDim: 64, Causal: true}
	var r kernels.Rows
	for documents, want := range []int{4, 3} { // which cuDNN does not know of
		a.Documents = driver.Ptr(documents)
		if v := k.forwardVariants(a, driver.BFloat16, r, r, r, r); len(v) != want {
			t.Errorf("%v with documents at %d", v, documents)
		}
	}
	forced := runDnn(t, "", fast, WithTuning(TuneOff), WithWays("Attention=cudnn"))
	if c := forced.ways[attentionOp]; c.Way != "cudnn" || c.Source != Forced || forced.planned == 0 {
		t.Errorf("forced: %+v", forced.ways)
	}
}
