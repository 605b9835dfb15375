package llm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// childVariable names an environment variable. The tests that kill a process run this test binary again
// as their child, and the variable contains the child's task.
const childVariable = "LLM_TEST_CHILD"

// optimizers maps the names used in childVariable.
var optimizers = map[string]func() (optim.Optimizer, error){"adamw": adamW, "muon": muon}

// TestChild is the child: it trains until it is killed, and saves to the file at the given path.
func TestChild(t *testing.T) {
	task := strings.Fields(os.Getenv(childVariable))
	if len(task) == 0 {
		return // not a child
	}

	path := task[2]
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1 << 30,
		optimizer: optimizers[task[1]]})
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
	case "save": // resumes from where the last child was killed, and saves after every step
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
				for lines.Scan() { // keep reading, so that the child never blocks on its output
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

// TestResume checks that 40 steps in one run equal 20 steps, a kill, and 20 steps in a resumed run, bit
// for bit.
func TestResume(t *testing.T) {
	for name, optimizer := range optimizers {
		t.Run(name, func(t *testing.T) {
			straight := newTrainer(t, trainerOptions{config: tiny(), steps: 40,
				optimizer: optimizer})
			if err := straight.Run(context.Background()); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(t.TempDir(), "model.safetensors")
			kill(t, startChild(t, "train "+name+" "+path, "saved"))
			resumed := newTrainer(t, trainerOptions{config: tiny(), steps: 40,
				optimizer: optimizer})
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

// TestKillWhileSaving repeatedly kills a training process that saves after every step, alternately at a
// random moment and soon after it has started to write a file. The next process must always be able to
// resume from the checkpoint.
func TestKillWhileSaving(t *testing.T) {
	kills := 8
	if randtest.Long() {
		kills = 60
	}

	r := randtest.New(t)
	path := filepath.Join(t.TempDir(), "model.safetensors")
	var left []string         // temporary files from before the last kill
	half := func() []string { // a new temporary file that the process is writing, if any
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
	// The disk determines how many kills hit a half-written file, so continue until there are enough.
	for ; i < kills || i < 10*kills && during < 1+kills/20; i++ {
		c := startChild(t, "save adamw "+path, "saving")
		if i < kills && i%2 == 0 {
			time.Sleep(time.Duration(r.Int64N(int64(30 * time.Millisecond))))
		} else {
			for begin := time.Now(); half() == nil && time.Since(begin) < 10*time.Second; {
				time.Sleep(50 * time.Microsecond) // yields the processor to the child
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
			t.Fatalf("kill %d: the checkpoint is of step %d, and was of step %d before", i,
				tr.Step(), last)
		}
		last = tr.Step()
	}

	if during < 1+kills/20 {
		t.Errorf("only %d of %d kills came while a file was being written", during, i)
	}

	t.Logf("%d kills, %d of them while a file was being written; step %d", i, during, last)
}

// TestResumeErrors checks that the error explains the problem and that the trainer does not change.
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

	edited := func(change func(tensors map[string]safetensors.Tensor,
		metadata map[string]string)) string {
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
		if err := safetensors.Save(p, inOrder(tensors), metadata); err != nil {
			t.Fatal(err)
		}
		return p
	}

	const some = "model.layers.0.mlp.gate_proj.weight"
	empty := filepath.Join(dir, "empty.safetensors")
	if err := os.WriteFile(empty, nil, 0o666); err != nil {
		t.Fatal(err)
	}

	for name, c := range map[string]struct {
		path string
		o    trainerOptions
		want string
		is   error
	}{
		"missing": {path: filepath.Join(dir, "none"), want: "none", is: os.ErrNotExist},
		"truncated": {path: damaged(func(b []byte) []byte {
			return b[:len(b)-100]
		}), want: "damaged.safetensors", is: safetensors.ErrCorrupt},
		"empty":   {path: empty, want: "cut short", is: safetensors.ErrCorrupt},
		"no path": {path: "", want: `the path is ""`},
		"other sequence": {path: path, o: trainerOptions{config: func() Config {
			c := tiny()
			c.Seq = 6
			return c
		}()}, want: "Seq is 6 here and 12 there", is: ErrArchitecture},
		"other layers": {path: path, o: trainerOptions{config: func() Config {
			c := tiny()
			c.Layers = 3
			return c
		}()}, want: "Layers is 3 here and 2 there", is: ErrArchitecture},
		"other seeds": {path: path, o: trainerOptions{config: func() Config {
			c := tiny()
			c.Seeds, c.Slots = 8, 9
			return c
		}()}, want: "Seeds is 8 here and 4 there", is: ErrArchitecture},
		"other type": {path: path, o: trainerOptions{dt: tensor.Float64},
			want: "F32|F64", is: ErrArchitecture},
		"other optimizer": {path: path, o: trainerOptions{optimizer: muon}, want: "optim.Muon"},
		"model alone":     {path: modelOnly, want: "LoadModel"},
		"not a checkpoint": {path: edited(func(_ map[string]safetensors.Tensor,
			m map[string]string) {
			delete(m, modelfile.ConfigKey)
		}), want: modelfile.ConfigKey, is: ErrArchitecture},
	} {
		t.Run(name, func(t *testing.T) {
			refuses(t, c.path, c.o, c.want, c.is)
			if c.is == safetensors.ErrCorrupt {
				refuses(t, c.path, c.o, "resume from another checkpoint", c.is)
			}
		})
	}

	// These tests share a file, so they run one after the other.
	for name, c := range map[string]struct {
		change func(tensors map[string]safetensors.Tensor, metadata map[string]string)
		want   string
	}{
		"missing tensor": {func(x map[string]safetensors.Tensor, _ map[string]string) {
			delete(x, some)
		}, some + " is missing"},
		"wrong shape": {func(x map[string]safetensors.Tensor, _ map[string]string) {
			e := x[some]
			e.Shape = []int{e.Shape[1], e.Shape[0]}
			x[some] = e
		}, some},
		"bad config": {func(_ map[string]safetensors.Tensor, m map[string]string) {
			m[modelfile.ConfigKey] = "{"
		}, "configuration"},
		"hostile config": {func(_ map[string]safetensors.Tensor, m map[string]string) {
			m[modelfile.ConfigKey] = `{"vocab":-5}`
		}, "Vocab is -5"},
		"huge config": {func(_ map[string]safetensors.Tensor, m map[string]string) {
			m[modelfile.ConfigKey] = strings.Replace(m[modelfile.ConfigKey], `"ff":`,
				`"ff":1`+strings.Repeat("0", 15), 1)
		}, "FF is 1000000000000000"},
		"negative step": {func(_ map[string]safetensors.Tensor, m map[string]string) {
			m[modelfile.TrainingKey] = `{"step":-1}`
		}, "step -1"},
		"no settings": {func(_ map[string]safetensors.Tensor, m map[string]string) {
			m[modelfile.TrainingKey] = strings.Replace(m[modelfile.TrainingKey],
				`"settings"`, `"others"`, 1)
		}, "Batch is 3 here and 0 there"},
		"other tokenizer": {func(_ map[string]safetensors.Tensor, m map[string]string) {
			m[modelfile.TrainingKey] = strings.Replace(m[modelfile.TrainingKey], `"tokenizer":"`,
				`"tokenizer":"\u001b[2J`, 1)
		}, `tokenizer "\x1b[2J`},
		"other data": {func(_ map[string]safetensors.Tensor, m map[string]string) {
			m[modelfile.TrainingKey] = strings.Replace(m[modelfile.TrainingKey],
				`"data":"words"`, `"data":"others"`, 1)
		}, "fingerprint"},
		"missing lattice": {func(x map[string]safetensors.Tensor, _ map[string]string) {
			maps.DeleteFunc(x, func(n string, _ safetensors.Tensor) bool {
				return strings.HasPrefix(n, "lattice.1.")
			})
		}, "layer \"1\""},
		"altered seed": {func(x map[string]safetensors.Tensor, _ map[string]string) {
			x["lattice.1.stage"].Data.([]uint8)[2] ^= 1
		}, "seed 2"},
		"lost moments": {func(x map[string]safetensors.Tensor, _ map[string]string) {
			maps.DeleteFunc(x, func(n string, _ safetensors.Tensor) bool {
				return strings.HasPrefix(n, modelfile.OptimizerPrefix+some) &&
					strings.HasSuffix(n, "sq")
			})
		}, some},
	} {
		t.Run(name, func(t *testing.T) {
			refuses(t, edited(c.change), trainerOptions{}, c.want, nil)
		})
	}

	t.Run("every altered byte", func(t *testing.T) {
		r := randtest.New(t)
		flips := 60
		if randtest.Long() {
			flips = 500
		}
		for range flips {
			at, bit := r.IntN(len(whole)), byte(1)<<r.IntN(8)
			p := damaged(func(b []byte) []byte { b[at] ^= bit; return b })
			if _, err := LoadModel(t.Context(), p); !errors.Is(err, safetensors.ErrCorrupt) {
				t.Fatalf("byte %d, bit %08b: got %v, want ErrCorrupt", at, bit, err)
			}
		}
	})
}

// refuses checks that Resume fails and that the trainer does not change.
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

	tr.Config.Steps = 100 // the checkpoint is from a later step
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

// TestLoadModelKeepsLatticeOptions checks that a file records whether the lattices have gates.
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

// TestLoadModel checks that a saved model can be loaded unchanged.
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
		checkSame(t, tr, &Trainer{Model: m, Loader: tr.Loader,
			Optimizer: tr.Optimizer, last: tr.Last()})
		for i, l := range m.Kasmina.Lattices() {
			if err := l.Verify(); err != nil {
				t.Errorf("lattice %d: %v", i, err)
			}
		}
		if m.NumParams() != tr.Model.NumParams() || m.NumSeeds() != 8 {
			t.Errorf("%d parameters and %d seeds, want %d and 8", m.NumParams(),
				m.NumSeeds(), tr.Model.NumParams())
		}
	}
}

// smallConfig returns the configuration of smallCheckpoint.
func smallConfig() Config {
	return Config{Vocab: 3, Dim: 4, Layers: 1, Heads: 2, Seq: 2, FF: 1, Kasmina: []int{0},
		Seeds: 2}.Default()
}

// rewritten changes a trained small checkpoint and saves it with valid checksums.
func rewritten(t testing.TB, change func(tensors map[string]safetensors.Tensor,
	metadata map[string]string)) string {
	t.Helper()
	tensors, metadata := trainedCheckpoint(t)
	byName := map[string]safetensors.Tensor{}
	for _, x := range tensors {
		byName[x.Name] = x
	}
	change(byName, metadata)
	path := filepath.Join(t.TempDir(), "m.safetensors")
	require.NoError(t, safetensors.Save(path, inOrder(byName), metadata))
	return path
}

// inOrder returns tensors sorted by name.
func inOrder(byName map[string]safetensors.Tensor) []safetensors.Tensor {
	return slices.SortedFunc(maps.Values(byName), func(a, b safetensors.Tensor) int {
		return strings.Compare(a.Name, b.Name)
	})
}

// trainedCheckpoint returns a small checkpoint after one step, so that it contains optimizer state.
func trainedCheckpoint(t testing.TB) ([]safetensors.Tensor, map[string]string) {
	t.Helper()
	tr := smallTrainer(t, smallConfig())
	require.NoError(t, tr.step())
	path := filepath.Join(t.TempDir(), "m.safetensors")
	require.NoError(t, tr.Save(path))
	tensors, metadata, err := safetensors.Load(path)
	require.NoError(t, err)
	return tensors, metadata
}

// stateOf returns everything that a trainer would save, as text.
func stateOf(t testing.TB, tr *Trainer) string {
	t.Helper()
	var b strings.Builder
	for _, p := range tr.Model.Params {
		fmt.Fprintf(&b, "%s %x\n", p.Name, p.Value.Data())
	}

	for _, a := range tr.Model.Kasmina.Arrays() {
		fmt.Fprintln(&b, a.Name, a.Shape, a.Data)
	}

	for _, s := range tr.Optimizer.State() {
		fmt.Fprintln(&b, s.Name, s.Shape, s.Data)
	}

	fmt.Fprintln(&b, tr.Loader.State(), tr.last.Step, tr.last.Loss, tr.Optimizer.LR())
	return b.String()
}

// TestImpossibleNumbers checks that files with impossible numbers are rejected even if their
// checksums are valid, that the error locates the number, and that nothing changes.
func TestImpossibleNumbers(t *testing.T) {
	const weight = "model.layers.0.mlp.up_proj.weight"
	edit := func(name string, at int, v float32) func(map[string]safetensors.Tensor,
		map[string]string) {
		return func(x map[string]safetensors.Tensor,
			_ map[string]string) {
			x[name].Data.([]float32)[at] = v
		}
	}

	inMetadata := func(old, now string) func(map[string]safetensors.Tensor, map[string]string) {
		return func(_ map[string]safetensors.Tensor, m map[string]string) {
			before := m[modelfile.TrainingKey]
			m[modelfile.TrainingKey] = strings.Replace(before, old, now, 1)
			require.NotEqual(t, before, m[modelfile.TrainingKey])
		}
	}

	nan, inf := float32(math.NaN()), float32(math.Inf(-1))
	for name, c := range map[string]struct {
		change func(map[string]safetensors.Tensor, map[string]string)
		want   string
		model  bool // LoadModel must reject it too
		is     error
	}{
		"NaN": {edit(weight, 2, nan), "parameter " + weight + " is NaN at element 2", true,
			ErrDiverged},
		"infinity": {edit(normName, 3, inf),
			"parameter model.norm.weight is -Inf at element 3",
			true, ErrDiverged},
		"moment of NaN": {edit("optimizer."+weight+".exp_avg", 1, nan), weight +
			`": exp_avg is NaN at element 1`, false, nil},
		"negative square": {edit("optimizer."+weight+".exp_avg_sq", 0, -1), weight +
			`": exp_avg_sq is -1 at element 0`, false, nil},
		"count of steps": {func(x map[string]safetensors.Tensor, _ map[string]string) {
			x["optimizer."+weight+".step"].Data.([]int64)[0] = math.MaxInt64
		}, "step is [9223372036854775807]", false, nil},
		"epoch": {inMetadata(`"epoch":0,"next"`, `"epoch":9223372036854775807,"next"`),
			"epoch 9223372036854775807", false, nil},
		"window": {inMetadata(`"next":1`, `"next":9223372036854775807`),
			"window 9223372036854775807", false, nil},
		"step": {inMetadata(`"step":1`, `"step":9223372036854775807`),
			"at step 9223372036854775807", false, nil},
		"step of a float": {inMetadata(`"step":1`, `"step":0.5`), "the state of the run", false,
			nil},
		"a stranger": {func(x map[string]safetensors.Tensor, _ map[string]string) {
			x["model.layers.1.w"] = zeros("model.layers.1.w", 1)
		}, `such as "model.layers.1.w"`, true, nil},
		"many moments": {func(x map[string]safetensors.Tensor, _ map[string]string) {
			x["optimizer.w.x"] = zeros("optimizer.w.x", 2<<20)
		}, "the optimizer state takes", true, ErrArchitecture},
		"a large lattice": {func(x map[string]safetensors.Tensor, _ map[string]string) {
			x["lattice.0.x"] = zeros("lattice.0.x", 2<<20)
		}, `layer "0" has`, true, ErrArchitecture},
		"an endless state": {func(_ map[string]safetensors.Tensor, m map[string]string) {
			m[modelfile.TrainingKey] += strings.Repeat(" ", 1<<20)
		}, "bytes of JSON, want at most", false, nil},
		"an endless config": {func(_ map[string]safetensors.Tensor, m map[string]string) {
			m[modelfile.ConfigKey] = strings.Replace(m[modelfile.ConfigKey], `"kasmina":[0`,
				`"kasmina":[0`+strings.Repeat(",0",
					1<<19), 1)
		}, "the configuration: 1", true, nil},
	} {
		t.Run(name, func(t *testing.T) {
			path := rewritten(t, c.change)
			tr := smallTrainer(t, smallConfig())
			require.NoError(t, tr.step())
			before := stateOf(t, tr)
			err := tr.Resume(t.Context(), path, WithNewSettings(nil))
			require.ErrorContains(t, err, c.want)
			require.Equal(t, before, stateOf(t, tr))
			require.NoError(t, tr.usable())
			_, wrong := LoadModel(t.Context(), path)
			require.Equal(t, c.model, wrong != nil, "LoadModel: %v", wrong)
			for _, err := range []error{err, wrong} {
				require.True(t, err == nil || c.is == nil || errors.Is(err, c.is),
					"%v is no %v", err, c.is)
			}
		})
	}
}

func zeros(name string, n int) safetensors.Tensor {
	return safetensors.Tensor{Name: name, DType: safetensors.U8,
		Shape: []int{n}, Data: make([]uint8,
			n)}
}

// readers returns all functions that read a file at a given path.
func readers(t *testing.T) map[string]func(path string) error {
	tr := smallTrainer(t, smallConfig())
	return map[string]func(path string) error{
		"LoadModel": func(path string) error { return errorOf(LoadModel(t.Context(), path)) },
		"Resume":    func(path string) error { return tr.Resume(t.Context(), path) },
		"ReadNotes": func(path string) error { return errorOf(ReadNotes(path)) },
		"ReadBlueprint": func(path string) error {
			return errorOf(tr.Model.ReadBlueprint(path, 0, 0))
		},
		"LoadBlueprint": func(path string) error { return tr.Model.LoadBlueprint(path, 0, 0) },
	}
}

// TestUnreadableFiles passes paths to readers that have no end, such as devices, or no beginning, such as
// pipes without a writer.
func TestUnreadableFiles(t *testing.T) {
	for name, read := range readers(t) {
		for _, path := range texttest.NoFiles(t) {
			err := read(path)
			require.Error(t, err, "%s of %s", name, path)
			require.Contains(t, err.Error(), path, name)
		}
	}
}

// TestHoles passes sparse files of 40 GB to readers.
func TestHoles(t *testing.T) {
	const size = texttest.HoleSize
	_, metadata := smallCheckpoint(t)
	config, err := json.Marshal(metadata[modelfile.ConfigKey])
	require.NoError(t, err)
	one := func(name, config string) []byte {
		return appendHeader(nil,
			fmt.Sprintf(
				`{"__metadata__":{"kasmina.config":%s,"kasmina.blueprint":"LowRank","kasmina.chunk":"2"},`+
					`"%s":{"dtype":"F32","shape":[%d],`+
					`"data_offsets":[0,%d]}}`, config, name, size/4, size))
	}

	for what, content := range map[string][]byte{
		"nothing": nil, "a parameter": one(embedName, string(config)),
		"a lattice": one("lattice.0.stage",
			string(config)),
		"moments": one("optimizer.w.x", string(config)), "a large model": one(embedName,
			strings.Replace(string(config), `\"vocab\":3`, `\"vocab\":16777216`, 1)),
		"a scale": one("scale",
			string(config)),
	} {
		path := texttest.Hole(t, content)
		for name, read := range readers(t) {
			bounded.Run(t, 0, func() {
				err := read(path)
				require.Error(t, err, "%s of %s", name, what)
				require.Contains(t, err.Error(), path, name)
			})
		}
	}
}

// appendHeader appends the length of a safetensors header and the header.
func appendHeader(b []byte, header string) []byte {
	return append(binary.LittleEndian.AppendUint64(b, uint64(len(header))), header...)
}

// TestReadingStops checks that reading a large file stops when its context is canceled, and changes
// nothing.
func TestReadingStops(t *testing.T) {
	path := rewritten(t, func(map[string]safetensors.Tensor, map[string]string) {})
	enough := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(enough)
	_, err := LoadModel(ctx, path)
	require.ErrorIs(t, err, enough)
	tr := smallTrainer(t, smallConfig())
	before := stateOf(t, tr)
	require.ErrorIs(t, tr.Resume(ctx, path), enough)
	require.Equal(t, before, stateOf(t, tr))
	require.NoError(t, tr.Resume(t.Context(), path))
}

// TestNotesOfAnySize checks that notes too long to be read back are rejected before the run starts.
func TestNotesOfAnySize(t *testing.T) {
	tr := smallTrainer(t, smallConfig())
	c := tr.Config
	c.Notes = map[string]string{"text": strings.Repeat("x", modelfile.MaxNotes)}
	_, err := NewTrainer(tr.Model, tr.Loader, tr.Optimizer, c)
	require.ErrorContains(t, err,
		"TrainConfig.Notes takes 262155 bytes as JSON, want at most 262144")
	c.Notes["text"] = strings.Repeat("x", modelfile.MaxNotes-11)
	_, err = NewTrainer(tr.Model, tr.Loader, tr.Optimizer, c)
	require.NoError(t, err)
}

// withoutChecksums returns the bytes of a file with the checksums removed from its header, so that
// altered bytes get past them.
func withoutChecksums(t testing.TB, tensors []safetensors.Tensor,
	metadata map[string]string) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "m.safetensors")
	require.NoError(t, safetensors.Save(path, tensors, metadata))
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	n := 8 + binary.LittleEndian.Uint64(b)
	var header map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(b[8:n], &header))
	header["__metadata__"], err = json.Marshal(metadata)
	require.NoError(t, err)
	plain, err := json.Marshal(header)
	require.NoError(t, err)
	return append(appendHeader(nil, string(plain)), b[n:]...)
}

// FuzzCheckpoint passes arbitrary bytes, such as a checkpoint without checksums, to LoadModel,
// ReadNotes and Resume. A rejected Resume must not change the trainer.
func FuzzCheckpoint(f *testing.F) {
	tensors, metadata := trainedCheckpoint(f)
	whole := withoutChecksums(f, tensors, metadata)
	f.Add(whole)
	f.Add(whole[:len(whole)-1])
	f.Add(appendHeader(nil, "{}"))
	f.Add([]byte{})
	path, tr := filepath.Join(f.TempDir(), "m.safetensors"), smallTrainer(f, smallConfig())
	require.NoError(f, tr.step())
	f.Fuzz(func(t *testing.T, b []byte) {
		require.NoError(t, os.WriteFile(path, b, 0o666))
		size := int64(len(b))
		bounded.Run(t, size, func() { _, _ = LoadModel(t.Context(), path) })
		bounded.Run(t, size, func() { _, _ = ReadNotes(path) })
		checkRefusal(t, tr, path, size)
	})
}

// checkRefusal resumes from a file. If the file is rejected, the trainer must not have changed;
// otherwise it must be able to make a step.
func checkRefusal(t *testing.T, tr *Trainer, path string, size int64) {
	before := stateOf(t, tr)
	var err error
	bounded.Run(t, size, func() { err = tr.Resume(t.Context(), path, WithNewSettings(nil)) })
	if err != nil {
		require.True(t, before == stateOf(t, tr), "refused with %v, something has changed", err)
		return
	}

	if tr.last.Step < tr.Config.Steps {
		if err := tr.step(); err == nil {
			require.NoError(t, tr.driver.probe())
		}
	}
}

// inParts saves a checkpoint with each moment divided between two additional files. It returns the path
// of the second one.
func inParts(t testing.TB, path string, tensors []safetensors.Tensor, metadata map[string]string,
	moments []safetensors.Tensor) (second string) {
	t.Helper()
	set := modelfile.Parts{ID: "0123456789abcdef", Files: 2}
	text, err := json.Marshal(set)
	require.NoError(t, err)
	metadata[modelfile.PartsKey] = string(text)
	require.NoError(t, safetensors.Save(path, tensors, metadata))
	for rank := range 2 {
		var own []modelfile.Stretch
		for _, m := range moments {
			data := m.Data.([]float32)
			s := modelfile.Stretch{Moment: strings.TrimPrefix(m.Name, modelfile.OptimizerPrefix),
				Data: data[:len(data)/2]}
			if rank == 1 {
				s.From, s.Data = len(data)/2, data[len(data)/2:]
			}
			own = append(own, s)
		}
		require.NoError(t, set.SavePart(path, rank, own))
	}

	return path + ".0123456789abcdef-2of2"
}

// moments separates the tensors that are stored in parts from the rest of a checkpoint.
func moments(tensors []safetensors.Tensor) (moved, rest []safetensors.Tensor) {
	for _, x := range tensors {
		if _, ok := x.Data.([]float32); ok && strings.HasPrefix(x.Name, modelfile.OptimizerPrefix) {
			moved = append(moved, x)
		} else {
			rest = append(rest, x)
		}
	}
	return moved, rest
}

// FuzzParts resumes from a checkpoint of several files, one with arbitrary contents.
func FuzzParts(f *testing.F) {
	tensors, metadata := trainedCheckpoint(f)
	moved, rest := moments(tensors)
	require.NotEmpty(f, moved)
	path := filepath.Join(f.TempDir(), "m.safetensors")
	second := inParts(f, path, rest, metadata, moved)
	own, ownMetadata, err := safetensors.Load(second)
	require.NoError(f, err)
	whole := withoutChecksums(f, own, ownMetadata)
	f.Add(whole)
	f.Add(whole[:len(whole)-1])
	f.Add([]byte{})
	tr := smallTrainer(f, smallConfig())
	require.NoError(f, tr.step())
	f.Fuzz(func(t *testing.T, b []byte) {
		require.NoError(t, os.WriteFile(second, b, 0o666))
		info, err := os.Stat(path)
		require.NoError(t, err)
		checkRefusal(t, tr, path, info.Size()+int64(len(b)))
	})
}

// TestPartsClaimMoreThanTheyHold checks that parts with incomplete moments are rejected before memory
// for the whole moments is allocated.
func TestPartsClaimMoreThanTheyHold(t *testing.T) {
	c := smallConfig()
	c.Vocab = 1 << 17
	m, err := NewModel(c, tensor.Float32, 1)
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "m.safetensors")
	require.NoError(t, m.Save(path))
	tensors, metadata, err := safetensors.Load(path)
	require.NoError(t, err)
	var announced []safetensors.Tensor
	for i := range 8 {
		announced = append(announced, safetensors.Tensor{Data: make([]float32, 2),
			Name: fmt.Sprintf("optimizer.model.embed_tokens.weight.%d", i)})
	}

	inParts(t, path, tensors, metadata, announced)
	f, err := modelfile.Open(path)
	require.NoError(t, err)
	defer f.Close()
	info, err := os.Stat(path)
	require.NoError(t, err)
	bounded.Run(t, info.Size(), func() { _, err = f.Moments(t.Context(), fileShapeOf(m.layout(), tensor.Float32)) })
	require.ErrorContains(t, err, "its parts have 2 of the 524288 elements of "+
		"model.embed_tokens.weight.0")
}

// FuzzBlueprint passes arbitrary bytes, such as a blueprint without checksums, to LoadBlueprint.
func FuzzBlueprint(f *testing.F) {
	c := smallConfig()
	c.SlotWidth = 4
	tr := smallTrainer(f, c)
	for i, kind := range []blueprints.Kind{blueprints.LowRank, blueprints.Residual} {
		require.NoError(f,
			tr.Model.Germinate(0, i, state.GerminationRequest{Slot: 1 + i, Kind: kind}))
		path := filepath.Join(f.TempDir(), "blueprint")
		require.NoError(f, tr.Model.SaveBlueprint(path, 0, i))
		tensors, metadata, err := safetensors.Load(path)
		require.NoError(f, err)
		f.Add(withoutChecksums(f, tensors, metadata))
	}

	path := filepath.Join(f.TempDir(), "blueprint")
	f.Fuzz(func(t *testing.T, b []byte) {
		require.NoError(t, os.WriteFile(path, b, 0o666))
		for seed := range 2 {
			before := stateOf(t, tr)
			var err error
			bounded.Run(t, int64(len(b)), func() { err = tr.Model.LoadBlueprint(path, 0, seed) })
			if err != nil {
				require.True(t, before == stateOf(t, tr), "refused with %v, something has changed",
					err)
			}
		}
	})
}

func errorOf(_ any, err error) error { return err }

// TestBackgroundCheckpoint writes files while a growing model continues to train. Each must equal the
// file that is written between steps, byte for byte.
func TestBackgroundCheckpoint(t *testing.T) {
	randtest.Concurrent(t)
	files := func(opts ...CheckpointOption) map[int][]byte {
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: 11})
		path := filepath.Join(t.TempDir(), "m")
		files := map[int][]byte{}
		tr.On(Checkpoint(tr, path, 2, opts...), func(e Event) error {
			if e.Kind != Saved {
				return nil
			}
			if files[e.Step] != nil || e.Path != path {
				t.Errorf("step %d is saved twice, or to %s", e.Step, e.Path)
			}
			if later := tr.Step() > e.Step; later != (len(opts) > 0 && e.Step < e.Steps) {
				t.Errorf("step %d: its file is complete after step %d", e.Step, tr.Step())
			}
			var err error
			files[e.Step], err = os.ReadFile(path)
			return err
		})
		if err := tr.Run(context.Background()); err != nil {
			t.Fatal(err)
		}
		return files
	}

	want, got := files(), files(InBackground())
	for _, step := range []int{2, 4, 6, 8, 10, 11} {
		if len(want[step]) == 0 || !bytes.Equal(want[step], got[step]) {
			t.Errorf("step %d: %d bytes, want the %d that are written between steps", step,
				len(got[step]), len(want[step]))
		}
	}
}

// TestBackgroundCheckpointFails checks that a failed write stops the run with an error, even if the
// run ends before the write.
func TestBackgroundCheckpointFails(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}

	for _, steps := range []int{30, 2} {
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: steps})
		tr.On(Checkpoint(tr, filepath.Join(file, "m"), 1, InBackground()))
		if err := tr.Run(context.Background()); err == nil || !strings.Contains(err.Error(), file) {
			t.Errorf("%d steps: got %v, want an error that names %s", steps, err, file)
		}
	}
}

// folder returns the contents of all files in a directory.
func folder(t *testing.T, dir string) map[string][]byte {
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	all := map[string][]byte{}
	for _, e := range entries {
		all[e.Name()], err = os.ReadFile(filepath.Join(dir, e.Name()))
		require.NoError(t, err)
	}
	return all
}

// TestOptimizerApart checks that a run resumes bit for bit from a checkpoint with the optimizer's moments
// in a separate file, that the model can be loaded without that file, and that replacing the checkpoint
// removes it.
func TestOptimizerApart(t *testing.T) {
	all := maps.Clone(optimizers)
	all["adamw8bit"] = func() (optim.Optimizer, error) {
		return optim.NewAdamW8bit(optim.WithLR(0.01), optim.WithMin8bitSize(40))
	}
	for name, optimizer := range all {
		t.Run(name, func(t *testing.T) {
			o := trainerOptions{config: tiny(), steps: 12, optimizer: optimizer}
			straight := newTrainer(t, o)
			require.NoError(t, straight.Run(t.Context()))
			dir := t.TempDir()
			path := filepath.Join(dir, "model.safetensors")
			half := newTrainer(t, o)
			half.On(func(e Event) error {
				if e.Kind == StepEnd && e.Step == 6 {
					return half.SaveApart(path)
				}
				return nil
			})
			require.NoError(t, half.Run(t.Context()))
			parts, err := filepath.Glob(path + ".*-1of1")
			require.NoError(t, err)
			require.Len(t, parts, 1)
			f, err := safetensors.Open(path)
			require.NoError(t, err)
			for _, tensor := range f.Names() {
				dtype, _, err := f.Info(tensor)
				require.NoError(t, err)
				require.True(t, !strings.HasPrefix(tensor, "optimizer.") || dtype == safetensors.I64,
					tensor)
			}
			require.NoError(t, f.Close())
			resumed := newTrainer(t, o)
			require.NoError(t, resumed.Resume(t.Context(), path))
			require.Equal(t, 6, resumed.Step())
			require.NoError(t, resumed.Run(t.Context()))
			checkSame(t, straight, resumed)

			require.NoError(t, os.Rename(parts[0], parts[0]+".away"))
			_, err = LoadModel(t.Context(), path)
			require.NoError(t, err)
			err = newTrainer(t, o).Resume(t.Context(), path)
			require.ErrorContains(t, err, "a checkpoint of several files needs all of them")
			require.NoError(t, os.Rename(parts[0]+".away", parts[0]))
			require.NoError(t, resumed.SaveApart(path))
			first := folder(t, dir)
			require.Len(t, first, 2)
			require.NoError(t, resumed.SaveApart(path))
			require.Equal(t, first, folder(t, dir))
			require.NoError(t, resumed.Save(path))
			left, err := os.ReadDir(dir)
			require.NoError(t, err)
			require.Len(t, left, 1)
		})
	}
}
