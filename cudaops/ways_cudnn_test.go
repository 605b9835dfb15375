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

// dnnWays is kernels with three ways to compute attention, of which cuDNN's differs as given.
type dnnWays struct {
	kernelSet
	fake    *fakeKernels
	way     fake.Way
	asked   bool // whether there is a cuDNN
	none    bool // there is none
	bytes   int  // of its workspace
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

func (k *dnnWays) PlanDnnAttention(_ kernels.AttentionShape, _ driver.DType, rows ...kernels.Rows) error {
	if k.planned++; k.way.Fails || len(rows) != 4 && len(rows) != 8 {
		return errors.New("no engine")
	}
	return nil
}

func (k *dnnWays) AttentionVariants(kernels.AttentionShape, driver.DType, ...kernels.Rows) []kernels.AttentionVariant {
	return []kernels.AttentionVariant{kernels.AttentionHopper, kernels.AttentionMMA, kernels.AttentionPlain}
}

func (k *dnnWays) AttentionStatsBytes(a kernels.AttentionShape, t driver.DType) int {
	if a.Variant == kernels.AttentionCuDNN {
		return k.bytes
	}
	return k.kernelSet.AttentionStatsBytes(a, t)
}

// end changes a result, and takes as long as the way does.
func (k *dnnWays) end(s driver.Stream, op string, v kernels.AttentionVariant, y driver.Ptr) error {
	k.ran = append(k.ran, op+" "+v.String())
	way := k.way
	if v != kernels.AttentionCuDNN {
		way = fake.Way{Took: 5e6}
	}
	return k.fake.launch(s, func(l *fake.Launch) {
		l.Took = way.Took
		first := &floatsAt(l, y, 1)[0]
		switch {
		case way.Wrong:
			*first += 100
		case way.Wavers && len(k.ran)%2 == 0:
			*first *= 1 + 1e-6
		}
	})
}

func (k *dnnWays) Attention(s driver.Stream, a kernels.AttentionShape, y kernels.Rows, lse driver.Ptr, q, key, v kernels.Rows,
	t driver.DType) error {
	if k.way.Fails && a.Variant == kernels.AttentionCuDNN {
		return errors.New("no engine")
	}
	return joined(k.kernelSet.Attention(s, a, y, lse, q, key, v, t), k.end(s, attentionOp, a.Variant, y.Ptr))
}

func (k *dnnWays) AttentionBackward(s driver.Stream, a kernels.AttentionShape, dq, dk, dv kernels.Rows, stats driver.Ptr,
	g, q, key, v, y kernels.Rows, lse driver.Ptr, t driver.DType) error {
	if k.way.Fails && a.Variant == kernels.AttentionCuDNN {
		return errors.New("no engine")
	}
	err := k.fake.launch(s, func(l *fake.Launch) { clear(fake.Slice[byte](l, stats, k.AttentionStatsBytes(a, t))) })
	return joined(err, k.kernelSet.AttentionBackward(s, a, dq, dk, dv, stats, g, q, key, v, y, lse, t),
		k.end(s, attentionBackwardOp, a.Variant, dq.Ptr))
}

// dnnRun is what a machine did that trains a small model.
type dnnRun struct {
	*dnnWays
	ways    map[string]Choice
	arena   int
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
	r := dnnRun{dnnWays: &k, ways: map[string]Choice{}, arena: m.program.arena}
	for range 2 {
		k.ran = nil
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		r.last = slices.Clone(k.ran[max(0, len(k.ran)-2):])
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

// TestDnnWay wants cuDNN's attention where it is the fastest, right and repeatable, and its workspace only there.
func TestDnnWay(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	cached := WithTuning(TuneCached)
	path := filepath.Join(t.TempDir(), "tune.json")
	const large = 1 << 20
	fast, slow := dnnWays{way: fake.Way{Took: 1e6}, bytes: large}, dnnWays{way: fake.Way{Took: 20e6}, bytes: large}
	without := runDnn(t, path, dnnWays{none: true}, cached)
	if w := without.ways[attentionBackwardOp].Way; w == "cudnn" || !without.asked {
		t.Fatalf("without cuDNN: way %q, asked for %v", w, without.asked)
	}
	first := runDnn(t, path, fast, cached)
	for _, op := range []string{attentionOp, attentionBackwardOp} {
		if c := first.ways[op]; c.Way != "cudnn" || c.Source != Measured || c.Of != 4 {
			t.Errorf("fast: %+v", c)
		}
	}
	if want := []string{"Attention cudnn", "AttentionBackward cudnn"}; !slices.Equal(first.last, want) || first.log != "" {
		t.Errorf("fast: ran %q, log %s", first.last, first.log)
	}
	if d := first.arena - without.arena; d < large/2 {
		t.Errorf("fast: the arena has %d bytes, %d without cuDNN", first.arena, without.arena)
	}
	if !slices.Equal(first.loss, without.loss) {
		t.Error("other numbers with cuDNN")
	}
	again := runDnn(t, path, slow, cached)
	if c := again.ways[attentionBackwardOp]; c.Way != "cudnn" || c.Source != Stored || again.timings != first.timings {
		t.Errorf("a second start: %+v, %d timings, want %d", c, again.timings, first.timings)
	}
	for name, c := range map[string]struct {
		ways    dnnWays
		options []MachineOption
		warning string
	}{
		"slow":      {slow, nil, ""},
		"wrong":     {dnnWays{way: fake.Way{Took: 1e6, Wrong: true}, bytes: large}, nil, "differs by"},
		"wavering":  {dnnWays{way: fake.Way{Took: 1e6, Wavers: true}, bytes: large}, nil, "other bits"},
		"no engine": {dnnWays{way: fake.Way{Fails: true}, bytes: large}, nil, "no engine"},
		"forced upon what has no engine": {dnnWays{way: fake.Way{Fails: true}, bytes: large}, []MachineOption{WithWays("Attention*=cudnn")},
			"is not computed by cuDNN: no engine"},
	} {
		r := runDnn(t, filepath.Join(t.TempDir(), "tune.json"), c.ways, append(c.options, cached)...)
		for _, op := range []string{attentionOp, attentionBackwardOp} {
			if r.ways[op].Way == "cudnn" {
				t.Errorf("%s: %+v", name, r.ways[op])
			}
		}
		if !strings.Contains(r.log, c.warning) || (c.warning == "") != (r.log == "") {
			t.Errorf("%s: log %q, want a warning %q", name, r.log, c.warning)
		}
		if r.arena != without.arena {
			t.Errorf("%s: the arena has %d bytes, %d without cuDNN", name, r.arena, without.arena)
		}
	}
	// A workspace above the limit leaves only the forward pass.
	huge := dnnWays{way: fast.way, bytes: 1<<30/dnnShare + 1}
	if r := runDnn(t, filepath.Join(t.TempDir(), "tune.json"), huge, cached); r.ways[attentionOp].Way != "cudnn" ||
		r.ways[attentionBackwardOp].Way == "cudnn" || r.arena != without.arena {
		t.Errorf("a large workspace: %+v", r.ways)
	}
}

// TestDnnByRule wants cuDNN not even to be looked for where it is not to be chosen.
func TestDnnByRule(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	fast := dnnWays{way: fake.Way{Took: 1e6}, bytes: 1 << 10}
	for _, opts := range [][]MachineOption{
		{WithTuning(TuneOff)}, {WithTuning(TuneOff), WithWays("RMSNorm=cudnn")}, {WithTuning(TuneCached), WithWays("Attention*!=cudnn")},
		{WithTuning(TuneCached), WithWays("Attention*=mma")}, {WithTuning(TuneCached), WithWays("*=cudnn", "*=plain")},
	} {
		r := runDnn(t, filepath.Join(t.TempDir(), "tune.json"), fast, opts...)
		if r.asked || r.ways[attentionOp].Way == "cudnn" || r.ways[attentionBackwardOp].Way == "cudnn" {
			t.Errorf("%+v", r.ways)
		}
	}
	k := tunedKernels{&fast, &tuner{rules: []wayRule{{op: "*", way: "cudnn"}}}}
	a := kernels.AttentionShape{Batch: 1, Seq: 8, Heads: 1, KVHeads: 1, HeadDim: 64, Causal: true}
	for documents, want := range []int{4, 3} { // which cuDNN does not know of
		a.Documents = driver.Ptr(documents)
		if v := k.attentionVariants(attentionOp, a, driver.BFloat16, make([]kernels.Rows, 4)...); len(v) != want {
			t.Errorf("%v with documents at %d", v, documents)
		}
	}
	r := runDnn(t, "", fast, WithTuning(TuneOff), WithWays("AttentionBackward=cudnn"))
	if b := r.ways[attentionBackwardOp]; b.Way != "cudnn" || b.Source != Forced || r.ways[attentionOp].Way != "hopper" || r.planned == 0 {
		t.Errorf("forced: %+v", r.ways)
	}
}
