package cudaops

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op"
)

// tuned is what a machine that tunes one product of 6×5×4 did.
type tuned struct {
	way, timings int
	log          string
	value        []float32
}

// smallCache is a GPU whose cache is quickly overwritten.
func smallCache(name string) []gpu.DeviceInfo {
	info := fake.New(fake.Config{}).Devices()
	info[0].Name, info[0].L2 = name, 1<<10
	return info
}

// tuneProduct makes and runs such a machine on a fake GPU whose ways differ as given.
func tuneProduct(t *testing.T, path string, ways [3]fake.Way, name string, opts ...MachineOption) tuned {
	t.Helper()
	device, _, fakeOption := openFake(t, fake.Config{Ways: ways, Devices: smallCache(name)})
	g := gorgonia.NewGraph()
	matrix := func(name string, rows, columns int) *gorgonia.Node {
		return gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(rows, columns), gorgonia.WithName(name),
			gorgonia.WithValue(tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(tensor.Range(tensor.Float32, 0, rows*columns)))))
	}
	y, err := op.Linear(matrix("x", 6, 4), matrix("w", 5, 4))
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	private := func(c *machineConfig) error { c.tuneLeast, c.tunePath = 1, path; return nil }
	m, err := NewMachine(device, g, append([]MachineOption{fakeOption, private, WithLogger(slog.New(slog.NewTextHandler(&log, nil)))}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	v, err := m.Value(y)
	if err != nil {
		t.Fatal(err)
	}
	r := tuned{log: log.String(), value: flat(t, v)}
	for _, c := range m.runner.Program.Calls {
		if p, ok := c.Params.(program.Matmul); ok {
			r.way = m.runner.Products.Find(p).Way
		}
	}
	r.timings = m.chooser.Timings()
	return r
}

func TestTuning(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	const card = "Some GPU"
	path := filepath.Join(t.TempDir(), "tune.json")
	slowFirst := [3]fake.Way{{Took: 9 * time.Millisecond}, {Took: 2 * time.Millisecond}, {Took: 5 * time.Millisecond}}
	fastFirst := [3]fake.Way{{Took: 1 * time.Millisecond}, {Took: 2 * time.Millisecond}, {Took: 5 * time.Millisecond}}
	cached, full := WithTuning(TuneCached), WithTuning(TuneFull)

	if r := tuneProduct(t, path, slowFirst, card); r.way != 0 || r.timings != 0 {
		t.Errorf("Float32 without an option: way %d, %d timings, want no tuning", r.way, r.timings)
	}
	first := tuneProduct(t, path, slowFirst, card, cached)
	if first.way != 1 || first.timings < 3 || first.log != "" {
		t.Errorf("the first time: way %d, %d timings, want way 1 after at least 3\n%s", first.way, first.timings, first.log)
	}
	if b, err := os.ReadFile(path); err != nil || !strings.Contains(string(b), card) || !strings.Contains(string(b), "cuBLASLt 130000") {
		t.Errorf("stored: %s, %v", b, err)
	}
	second := tuneProduct(t, path, fastFirst, card, cached)
	if second.way != 1 || second.timings != first.timings {
		t.Errorf("the second time: way %d, %d timings, want what is stored and no more timings", second.way, second.timings)
	}
	for i, v := range second.value {
		if v != first.value[i] {
			t.Fatal("other bits with the same choice")
		}
	}
	third := tuneProduct(t, path, fastFirst, card, full)
	if third.way != 0 || third.timings < second.timings+3 {
		t.Errorf("TuneFull: way %d, %d timings, want way 0, timed anew", third.way, third.timings)
	}
	if r := tuneProduct(t, path, slowFirst, card, cached); r.way != 0 || r.timings != third.timings {
		t.Errorf("after TuneFull: way %d, %d timings, want the new choice", r.way, r.timings)
	}
	if r := tuneProduct(t, path, slowFirst, "Another GPU", cached); r.way != 1 || r.timings == third.timings {
		t.Errorf("on another card: way %d, %d timings, want a choice of its own", r.way, r.timings)
	}
	t.Setenv("KASMINA_TUNE", "off")
	if r := tuneProduct(t, path, slowFirst, "Another GPU", full); r.way != 0 || r.timings != 0 {
		t.Errorf("with KASMINA_TUNE=off: way %d, %d timings", r.way, r.timings)
	}
}

// TestChoiceWithdrawn wants another way where the one chosen before, for a call of the same shape, does not take the arguments.
func TestChoiceWithdrawn(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "off")
	t.Setenv("KASMINA_WAYS", "")
	device, _, fakeOption := openFake(t, fake.Config{})
	m, err := NewMachine(device, gorgonia.NewGraph(), fakeOption, WithWays("Some=b"))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for i, c := range []struct {
		ways []string
		want int
	}{{[]string{"a", "b"}, 1}, {[]string{"a"}, 0}, {[]string{"b", "a"}, 1}} {
		g := lower.Group{Op: "Some", Shape: "one"}
		for _, name := range c.ways {
			g.Alternatives = append(g.Alternatives, lower.Alternative{Name: name})
		}
		if way, _, err := m.chooser.Choose(g); err != nil || way != c.want {
			t.Errorf("call %d: way %d, error %v, want %d", i, way, err, c.want)
		}
	}
}

// TestTuningDrops wants ways that are wrong or fail never to be chosen, and a warning of each.
func TestTuningDrops(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	want := tuneProduct(t, "", [3]fake.Way{}, "GPU 0").value
	for i, c := range []struct {
		ways    [3]fake.Way
		way     int
		warning string
	}{
		{[3]fake.Way{{Took: 9e6}, {Took: 1e6, Wrong: true}, {Took: 5e6}}, 2, "differs by"},
		{[3]fake.Way{{Fails: true}, {Took: 2e6}, {Took: 1e6}}, 2, "a way that fails"},
		{[3]fake.Way{{Took: 1e6}, {Took: 995e3}, {Took: 996e3}}, 0, ""}, // no gain worth other bits
	} {
		r := tuneProduct(t, filepath.Join(t.TempDir(), "tune.json"), c.ways, "Some GPU", WithTuning(TuneCached))
		if r.way != c.way || !strings.Contains(r.log, c.warning) || (c.warning == "") == strings.Contains(r.log, "WARN") {
			t.Errorf("case %d: way %d, want %d; log %q", i, r.way, c.way, r.log)
		}
		for j, v := range r.value {
			if v != want[j] {
				t.Fatalf("case %d: element %d is %v, want %v", i, j, v, want[j])
			}
		}
	}
}

// TestTuningIgnores wants stored choices that make no sense to be ignored.
func TestTuningIgnores(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	path := filepath.Join(t.TempDir(), "tune.json")
	ways := [3]fake.Way{{Took: 9e6}, {Took: 1e6}, {Took: 5e6}}
	tuneProduct(t, path, ways, "Some GPU", WithTuning(TuneCached))
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	from := bytes.LastIndex(b, []byte("{")) // of the choice
	for name, id := range map[string]string{"text": `"fast"`, "unknown": `{"way": "7"}`, "cut": "{"} {
		other := filepath.Join(t.TempDir(), "tune.json")
		damaged := string(b[:from]) + id + "}}"
		if err := os.WriteFile(other, []byte(damaged), 0o644); err != nil {
			t.Fatal(err)
		}
		r := tuneProduct(t, other, ways, "Some GPU", WithTuning(TuneCached))
		if r.way != 1 || r.timings < 3 {
			t.Errorf("%s: way %d, %d timings, want it timed", name, r.way, r.timings)
		}
		if warned := strings.Contains(r.log, "ignored"); warned != (name != "unknown") {
			t.Errorf("%s: log %q", name, r.log)
		}
	}
}

func TestTuningOptions(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	for name, f := range map[string]func(){"option": func() {}, "environment": func() { t.Setenv("KASMINA_TUNE", "sometimes") }} {
		f()
		opts := []MachineOption{fakeOption}
		if name == "option" {
			opts = append(opts, WithTuning(7))
		}
		if _, err := NewMachine(device, gorgonia.NewGraph(), opts...); err == nil || !strings.Contains(err.Error(), "off") && !strings.Contains(err.Error(), "TuneOff") {
			t.Errorf("%s: error %v", name, err)
		}
	}
}
