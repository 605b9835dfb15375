package llm

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// The tests that kill a process run this test binary again as their child. What it shall do stands in this variable.
const childVariable = "LLM_TEST_CHILD"

// optimizers by the names in childVariable.
var optimizers = map[string]func() (optim.Optimizer, error){"adamw": adamW, "muon": muon}

// TestChild is the child: it trains until it is killed, and saves to the file at the path that it is given.
func TestChild(t *testing.T) {
	task := strings.Fields(os.Getenv(childVariable))
	if len(task) == 0 {
		return // this is not a child
	}
	path := task[2]
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1 << 30, optimizer: optimizers[task[1]]})
	switch task[0] {
	case "train": // saves once, at step 20, and trains on
		tr.On(func(e Event) error {
			if e.Kind == StepEnd && e.Step == 20 {
				if err := tr.Save(path); err != nil {
					return err
				}
				fmt.Println("saved")
			}
			return nil
		})
	case "save": // goes on from where the last child was killed, saving all the time
		if _, err := os.Stat(path); err == nil {
			if err := tr.Resume(t.Context(), path); err != nil {
				fmt.Println("refused:", err)
				return
			}
		}
		said := false
		tr.On(Checkpoint(tr, path, 1), func(e Event) error {
			if e.Kind == Saved && !said {
				said = true
				fmt.Println("saving")
			}
			return nil
		})
	}
	if err := tr.Run(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// startChild runs the child and returns once it has printed the line want.
func startChild(t *testing.T, task, want string) *exec.Cmd {
	t.Helper()
	c := exec.Command(os.Args[0], "-test.run=^TestChild$", "-test.v")
	c.Env = append(os.Environ(), childVariable+"="+task)
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if lines.Text() == want {
			go func() {
				for lines.Scan() { // so that the child never waits for us
				}
			}()
			return c
		}
		if strings.HasPrefix(lines.Text(), "refused:") {
			t.Fatal(lines.Text())
		}
	}
	t.Fatalf("the child ended without printing %q: %v", want, c.Wait())
	return nil
}

func kill(t *testing.T, c *exec.Cmd) {
	t.Helper()
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	c.Wait() // reports the kill
}

// TestResume wants 40 steps straight to equal 20 steps, a kill, and 20 resumed steps, bit for bit.
func TestResume(t *testing.T) {
	for name, optimizer := range optimizers {
		t.Run(name, func(t *testing.T) {
			straight := newTrainer(t, trainerOptions{config: tiny(), steps: 40, optimizer: optimizer})
			if err := straight.Run(context.Background()); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(t.TempDir(), "model.safetensors")
			kill(t, startChild(t, "train "+name+" "+path, "saved"))
			resumed := newTrainer(t, trainerOptions{config: tiny(), steps: 40, optimizer: optimizer})
			if err := resumed.Resume(t.Context(), path); err != nil {
				t.Fatal(err)
			}
			if resumed.Step() != 20 {
				t.Fatalf("resumed at step %d, want 20", resumed.Step())
			}
			if err := resumed.Run(context.Background()); err != nil {
				t.Fatal(err)
			}
			checkSame(t, straight, resumed)
			if a, b := straight.Last().Loss, resumed.Last().Loss; a != b {
				t.Errorf("the last loss is %v, and %v resumed", a, b)
			}
		})
	}
}

// TestKillWhileSaving kills a training process that saves after every step, in turn at a random moment and soon after it has
// begun a file, and each time wants a checkpoint that the next process resumes from.
func TestKillWhileSaving(t *testing.T) {
	kills := 200
	if testing.Short() {
		kills = 20
	}
	r := texttest.Rand(t)
	path := filepath.Join(t.TempDir(), "model.safetensors")
	var left []string         // by the last kill
	half := func() []string { // a new file that the process was writing, if there is one
		files, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".*"))
		if err != nil {
			t.Fatal(err)
		}
		if slices.Equal(files, left) {
			return nil
		}
		return files
	}
	last, during, i := 0, 0, 0
	// How many kills meet a half-written file is up to the disk: missing ones are waited for.
	for ; i < kills || i < 10*kills && during < kills/20; i++ {
		c := startChild(t, "save adamw "+path, "saving")
		if i < kills && i%2 == 0 {
			time.Sleep(time.Duration(r.Int64N(int64(30 * time.Millisecond))))
		} else {
			for begin := time.Now(); half() == nil && time.Since(begin) < 10*time.Second; {
			}
		}
		kill(t, c)
		if files := half(); files != nil {
			left = files
			during++
		}
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1 << 30, optimizer: adamW})
		if err := tr.Resume(t.Context(), path); err != nil {
			t.Fatalf("kill %d: %v", i, err)
		}
		if tr.Step() <= last {
			t.Fatalf("kill %d: the checkpoint is of step %d, and was of step %d before", i, tr.Step(), last)
		}
		last = tr.Step()
	}
	if during < kills/20 {
		t.Errorf("only %d of %d kills came while a file was being written", during, i)
	}
	t.Logf("%d kills, %d of them while a file was being written; step %d", i, during, last)
}

// TestResumeErrors wants an error that says what is wrong, and a trainer that is as before.
func TestResumeErrors(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "model.safetensors")
	source := newTrainer(t, trainerOptions{config: tiny(), steps: 5})
	source.On(Checkpoint(source, path, 0))
	if err := source.Run(context.Background()); err != nil {
		t.Fatal(err)
	}
	modelOnly := filepath.Join(dir, "only.safetensors")
	if err := source.Model.Save(modelOnly); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	damaged := func(change func([]byte) []byte) string {
		p := filepath.Join(dir, "damaged.safetensors")
		if err := os.WriteFile(p, change(slices.Clone(whole)), 0o666); err != nil {
			t.Fatal(err)
		}
		return p
	}
	edited := func(change func(tensors map[string]safetensors.Tensor, metadata map[string]string)) string {
		list, metadata, err := safetensors.Load(path)
		if err != nil {
			t.Fatal(err)
		}
		tensors := map[string]safetensors.Tensor{}
		for _, x := range list {
			tensors[x.Name] = x
		}
		for k := range metadata {
			if strings.HasPrefix(k, "kasmina.digest") || strings.HasPrefix(k, "kasmina.crc32c") {
				delete(metadata, k)
			}
		}
		change(tensors, metadata)
		p := filepath.Join(dir, "edited.safetensors")
		if err := safetensors.Save(p, slices.Collect(maps.Values(tensors)), metadata); err != nil {
			t.Fatal(err)
		}
		return p
	}
	const some = "model.layers.0.mlp.gate_proj.weight"
	for name, c := range map[string]struct {
		path string
		o    trainerOptions
		want string
		is   error
	}{
		"missing":          {path: filepath.Join(dir, "none"), want: "none", is: os.ErrNotExist},
		"truncated":        {path: damaged(func(b []byte) []byte { return b[:len(b)-100] }), want: "damaged.safetensors", is: safetensors.ErrCorrupt},
		"other sequence":   {path: path, o: trainerOptions{config: func() Config { c := tiny(); c.Seq = 6; return c }()}, want: "Seq is 6 here and 12 there", is: ErrArchitecture},
		"other layers":     {path: path, o: trainerOptions{config: func() Config { c := tiny(); c.Layers = 3; return c }()}, want: "Layers is 3 here and 2 there", is: ErrArchitecture},
		"other seeds":      {path: path, o: trainerOptions{config: func() Config { c := tiny(); c.Seeds, c.Slots = 8, 9; return c }()}, want: "Seeds is 8 here and 4 there", is: ErrArchitecture},
		"other type":       {path: path, o: trainerOptions{dt: tensor.Float64}, want: "F32|F64", is: ErrArchitecture},
		"other optimiser":  {path: path, o: trainerOptions{optimizer: muon}, want: "optim.Muon"},
		"model alone":      {path: modelOnly, want: "LoadModel"},
		"not a checkpoint": {path: edited(func(_ map[string]safetensors.Tensor, m map[string]string) { delete(m, configKey) }), want: configKey, is: ErrArchitecture},
	} {
		t.Run(name, func(t *testing.T) { refuses(t, c.path, c.o, c.want, c.is) })
	}
	// These share a file, so they run one after the other.
	for name, c := range map[string]struct {
		change func(tensors map[string]safetensors.Tensor, metadata map[string]string)
		want   string
	}{
		"missing tensor": {func(x map[string]safetensors.Tensor, _ map[string]string) { delete(x, some) }, some + " is missing"},
		"wrong shape": {func(x map[string]safetensors.Tensor, _ map[string]string) {
			e := x[some]
			e.Shape = []int{e.Shape[1], e.Shape[0]}
			x[some] = e
		}, some},
		"bad config":     {func(_ map[string]safetensors.Tensor, m map[string]string) { m[configKey] = "{" }, "configuration"},
		"hostile config": {func(_ map[string]safetensors.Tensor, m map[string]string) { m[configKey] = `{"vocab":-5}` }, "Vocab is -5"},
		"huge config": {func(_ map[string]safetensors.Tensor, m map[string]string) {
			m[configKey] = strings.Replace(m[configKey], `"ff":`, `"ff":1`+strings.Repeat("0", 15), 1)
		}, "FF is 1000000000000000"},
		"negative step": {func(_ map[string]safetensors.Tensor, m map[string]string) { m[trainingKey] = `{"step":-1}` }, "step -1"},
		"no settings": {func(_ map[string]safetensors.Tensor, m map[string]string) {
			m[trainingKey] = strings.Replace(m[trainingKey], `"settings"`, `"others"`, 1)
		}, "Batch is 3 here and 0 there"},
		"other tokenizer": {func(_ map[string]safetensors.Tensor, m map[string]string) {
			m[trainingKey] = strings.Replace(m[trainingKey], `"tokenizer":"`,
				`"tokenizer":"\u001b[2J`, 1)
		}, `those of "\x1b[2J`},
		"other data": {func(_ map[string]safetensors.Tensor, m map[string]string) {
			m[trainingKey] = strings.Replace(m[trainingKey], `"data":"words"`, `"data":"others"`, 1)
		}, "fingerprint"},
		"missing lattice": {func(x map[string]safetensors.Tensor, _ map[string]string) {
			maps.DeleteFunc(x, func(n string, _ safetensors.Tensor) bool { return strings.HasPrefix(n, "lattice.1.") })
		}, "layer \"1\""},
		"altered seed": {func(x map[string]safetensors.Tensor, _ map[string]string) {
			x["lattice.1.stage"].Data.([]uint8)[2] ^= 1
		}, "seed 2"},
		"lost moments": {func(x map[string]safetensors.Tensor, _ map[string]string) {
			maps.DeleteFunc(x, func(n string, _ safetensors.Tensor) bool {
				return strings.HasPrefix(n, optimizerPrefix+some) && strings.HasSuffix(n, "sq")
			})
		}, some},
	} {
		t.Run(name, func(t *testing.T) { refuses(t, edited(c.change), trainerOptions{}, c.want, nil) })
	}
	t.Run("every altered byte", func(t *testing.T) {
		r := rand.New(rand.NewPCG(1, 2))
		for range 200 {
			at, bit := r.IntN(len(whole)), byte(1)<<r.IntN(8)
			p := damaged(func(b []byte) []byte { b[at] ^= bit; return b })
			if _, err := LoadModel(t.Context(), p); !errors.Is(err, safetensors.ErrCorrupt) {
				t.Fatalf("byte %d, bit %08b: got %v, want ErrCorrupt", at, bit, err)
			}
		}
	})
}

// refuses wants Resume to fail, and the trainer to be as it was.
func refuses(t *testing.T, path string, o trainerOptions, want string, is error) {
	t.Helper()
	if o.config.Vocab == 0 {
		o.config = tiny()
	}
	o.steps = 3
	tr, same := newTrainer(t, o), newTrainer(t, o)
	for _, x := range []*Trainer{tr, same} {
		if err := x.Run(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	tr.Config.Steps = 100 // for a checkpoint of a later step than both are at
	err := tr.Resume(t.Context(), path)
	if err == nil {
		t.Fatal("no error")
	}
	if is != nil && !errors.Is(err, is) {
		t.Errorf("error %q is not %q", err, is)
	}
	for _, word := range strings.Split(want, "|") {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error %q does not say %q", err, word)
		}
	}
	checkSame(t, same, tr)
}

// TestLoadModelKeepsLatticeOptions wants the file to say whether there are gates.
func TestLoadModelKeepsLatticeOptions(t *testing.T) {
	for name, c := range map[string]struct {
		opts []state.Option
		want error
	}{"gates": {nil, state.ErrGate}, "no gates": {[]state.Option{state.WithoutGates()}, nil}} {
		m, err := NewModel(tiny(), tensor.Float32, 1, c.opts...)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "model.safetensors")
		if err := m.Save(path); err != nil {
			t.Fatal(err)
		}
		if m, err = LoadModel(t.Context(), path); err != nil {
			t.Fatal(err)
		}
		if err := m.Germinate(0, 0, state.GerminationRequest{Slot: 1}); err != nil {
			t.Fatal(err)
		}
		if err := m.Kasmina.Lattice(0).Transition(0, state.Training); err != nil {
			t.Fatal(err)
		}
		if err := m.Kasmina.Lattice(0).Transition(0, state.Grafting); !errors.Is(err, c.want) {
			t.Errorf("%s: the transition to Grafting gives %v, want %v", name, err, c.want)
		}
	}
}

// TestLoadModel wants a model from a file to be the one that was saved.
func TestLoadModel(t *testing.T) {
	for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		path := filepath.Join(t.TempDir(), "model.safetensors")
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: 4, dt: dt})
		tr.On(Checkpoint(tr, path, 0))
		if err := tr.Run(context.Background()); err != nil {
			t.Fatal(err)
		}
		m, err := LoadModel(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		checkSame(t, tr, &Trainer{Model: m, Loader: tr.Loader, Optimizer: tr.Optimizer, last: tr.Last()})
		for i, l := range m.Kasmina.Lattices() {
			if err := l.Verify(); err != nil {
				t.Errorf("lattice %d: %v", i, err)
			}
		}
		if m.NumParams() != tr.Model.NumParams() || m.NumSeeds() != 8 {
			t.Errorf("%d parameters and %d seeds, want %d and 8", m.NumParams(), m.NumSeeds(), tr.Model.NumParams())
		}
	}
}
