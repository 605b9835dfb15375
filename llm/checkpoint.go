package llm

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/jsonfloat"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/arch"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/llm/internal/settings"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// ErrArchitecture is wrapped by the error of a checkpoint whose model is not the one that it is
// loaded into.
var ErrArchitecture = modelfile.ErrArchitecture

// training is the part of a run's state that is not a tensor.
type training struct {
	Step         int               `json:"step"`
	Settings     settings.Settings `json:"settings"`
	Loader       data.LoaderState  `json:"loader"`
	Loss         jsonfloat.Float   `json:"loss"`
	LearningRate float64           `json:"learning_rate"`
	GradNorm     jsonfloat.Float   `json:"grad_norm"`
	ValLoss      jsonfloat.Float   `json:"val_loss"`
	ValBPB       jsonfloat.Float   `json:"val_bpb"`
	LossScale    *LossScale        `json:"loss_scale,omitempty"` // of a Scaler
	Before       *beforeState      `json:"before,omitempty"`
	Spent        Budget            `json:"spent,omitzero"`
	Share        float64           `json:"share,omitempty"`
	// the sum of those of the present epoch's steps,
	Losses jsonfloat.Float `json:"losses,omitempty"`
	Summed int             `json:"summed,omitempty"` // and how many they are
}

// beforeState is the part of what a model was before it grew that is not a tensor.
type beforeState struct {
	Seed      int        `json:"seed"`
	Config    Config     `json:"config"`
	LossScale *LossScale `json:"loss_scale,omitempty"`
}

// Save writes the model with its lattices to the safetensors file at path, replacing it in one
// step: a process killed at any moment leaves the old file or the new one. A model with a parameter
// that is not finite is refused with ErrDiverged, and the old file stays. While a trainer runs, it
// waits for the end of the present step, and the run for the file.
func (m *Model) Save(path string) error {
	if err := m.made(); err != nil {
		return fmt.Errorf("llm: saving the model: %w", err)
	}
	defer m.take()()
	tensors, metadata, err := m.tensors()
	if err != nil {
		return err
	}
	return safetensors.Save(path, tensors, metadata)
}

// Save writes everything that Resume needs to continue bit for bit, in the way of Model.Save. It
// refuses, with ErrDiverged, also a model whose loss on the last batch is not finite: the next step
// would fail, and the file's old contents are better.
func (t *Trainer) Save(path string) error {
	if err := t.made(); err != nil {
		return fmt.Errorf("llm: saving the run: %w", err)
	}
	defer t.Model.take()()
	tensors, metadata, err := t.snapshot()
	if err == nil && t.first() {
		err = saveWhole(path, tensors, metadata)
	}
	return t.agree(err)
}

// saveWhole writes a checkpoint of one file.
func saveWhole(path string, tensors []safetensors.Tensor, metadata map[string]string) error {
	if err := safetensors.Save(path, tensors, metadata); err != nil {
		return err
	}
	_ = modelfile.Parts{}.Tidy(path) // what is left of another checkpoint harms nothing
	return nil
}

// SaveParts is Save where several ranks train: each writes its part of what the optimiser
// remembers, all at once, to a file beside the one at path. That file has all else, is written last
// and replaced in one step: a process killed at any moment leaves the old set of files or the new
// one. [Trainer.Resume] reads the set, on any number of ranks; [LoadModel] needs the file at path
// alone. All ranks see the same folder. Without other ranks it is Save.
func (t *Trainer) SaveParts(path string) error {
	if err := t.made(); err != nil {
		return fmt.Errorf("llm: saving the run: %w", err)
	}
	if t.ranks() == nil {
		return t.Save(path)
	}
	defer t.Model.take()()
	return t.agree(t.saveParts(path, t.ranks()))
}

// saveParts is SaveParts in the model's turn. What an error leaves behind, the next save removes.
func (t *Trainer) saveParts(path string, e Parallel) error {
	set, err := shared(t, "set of files", modelfile.Parts{ID: randomID(), Files: e.Ranks()})
	if err != nil {
		return err
	}
	tensors, metadata, err := t.snapshotOf(func() ([]optim.Tensor, error) {
		counts, stretches, err := t.ownState(e)
		if err != nil {
			return nil, err
		}
		return counts, set.SavePart(path, e.Rank(), stretches)
	})
	if err = t.agree(err); err != nil || !t.first() {
		return err
	}
	text, err := json.Marshal(set)
	if err != nil {
		return err
	}
	metadata[modelfile.PartsKey] = string(text)
	if err := safetensors.Save(path, tensors, metadata); err != nil {
		return err
	}
	_ = set.Tidy(path)
	return nil
}

func randomID() string {
	var b [8]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// ownState is what this rank remembers: of its own parts the moments, and all counts of steps.
func (t *Trainer) ownState(e Parallel) (counts []optim.Tensor, moments []modelfile.Stretch,
	err error) {
	o, ok := t.Optimizer.(optim.Partial)
	if !ok {
		return nil, nil, fmt.Errorf("llm: %T remembers whole models alone", t.Optimizer)
	}
	parts, err := e.Own()
	if err != nil {
		return nil, nil, fmt.Errorf("llm: saving the run: %w", err)
	}
	from := map[string]int{}
	for _, p := range parts {
		from[p.Name] = p.From
	}
	for _, s := range o.StateParts(parts) {
		at, own := from[s.Name[:strings.LastIndexByte(s.Name, '.')]]
		if _, count := s.Data.([]int64); count || !own {
			counts = append(counts, s)
			continue
		}
		if !finite(s.Data) {
			return nil, nil, notFinite(s.Name)
		}
		moments = append(moments, modelfile.Stretch{Moment: s.Name, From: at, Data: s.Data})
	}
	return counts, moments, nil
}

// notFinite says what of an optimiser cannot be saved.
func notFinite(name string) error {
	return fmt.Errorf("llm: saving the optimiser: %w: %s is not finite", ErrDiverged, name)
}

// copied returns what Save writes, in memory of its own.
func (t *Trainer) copied() ([]safetensors.Tensor, map[string]string, error) {
	defer t.Model.take()()
	tensors, metadata, err := t.snapshot()
	if t.first() {
		copyTensors(tensors)
	}
	return tensors, metadata, t.agree(err)
}

// snapshot returns what Save writes, in the model's turn. The parameters' memory is the model's
// own.
func (t *Trainer) snapshot() ([]safetensors.Tensor, map[string]string, error) {
	if err := t.usable(); err != nil {
		return nil, nil, fmt.Errorf("llm: saving the run: %w", err)
	}
	if err := t.gatherState(); err != nil {
		return nil, nil, fmt.Errorf("llm: saving the run: %w", err)
	}
	return t.snapshotOf(func() ([]optim.Tensor, error) {
		state := t.Optimizer.State()
		for _, s := range state {
			if !finite(s.Data) {
				return nil, notFinite(s.Name)
			}
		}
		return state, nil
	})
}

// snapshotOf is snapshot with what is asked for of the optimiser's state.
func (t *Trainer) snapshotOf(remembered func() ([]optim.Tensor, error)) ([]safetensors.Tensor,
	map[string]string, error) {
	if err := t.usable(); err != nil {
		return nil, nil, fmt.Errorf("llm: saving the run: %w", err)
	}
	tensors, metadata, err := t.Model.tensors()
	if err != nil {
		return nil, nil, err
	}
	if err := t.probe(); err != nil {
		return nil, nil, fmt.Errorf("llm: saving the run: %w", err)
	}
	state, err := remembered()
	if err != nil {
		return nil, nil, err
	}
	for _, s := range state {
		x, err := safetensors.New(modelfile.OptimizerPrefix+s.Name, s.Shape, s.Data)
		if err != nil {
			return nil, nil, fmt.Errorf("llm: saving the optimiser: %w", err)
		}
		tensors = append(tensors, x)
	}
	before, err := t.before.tensors()
	if err != nil {
		return nil, nil, fmt.Errorf("llm: saving what the model was before it grew: %w", err)
	}
	tensors = append(tensors, before...)
	e := t.Last()
	for key, v := range map[string]any{
		modelfile.TrainingKey: training{LossScale: t.lossScale(),
			Before: t.before.state(), Step: e.Step,
			Spent: t.spent, Share: t.share, Losses: jsonfloat.Float(t.losses), Summed: t.summed,
			Settings: *t.settings(),
			Loader:   t.Loader.State(), Loss: jsonfloat.Float(e.Loss),
			LearningRate: e.LearningRate, GradNorm: jsonfloat.Float(e.GradNorm),
			ValLoss: jsonfloat.Float(e.ValLoss), ValBPB: jsonfloat.Float(e.ValBPB)},
		modelfile.NotesKey: t.Config.Notes,
	} {
		text, err := json.Marshal(v)
		if err != nil {
			return nil, nil, fmt.Errorf("llm: saving the run: %w", err)
		}
		metadata[key] = string(text)
	}
	return tensors, metadata, nil
}

// copyTensors gives parameters memory of their own, on all cores. All else in a snapshot has its
// own already.
func copyTensors(tensors []safetensors.Tensor) {
	cpu.Parallel(len(tensors), 1, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			switch x := tensors[i].Data.(type) {
			case []float32:
				tensors[i].Data = slices.Clone(x)
			case []float64:
				tensors[i].Data = slices.Clone(x)
			}
		}
	})
}

// ReadNotes returns the TrainConfig.Notes of the run that wrote the checkpoint at path. It reads
// the file's header alone.
func ReadNotes(path string) (map[string]string, error) {
	f, err := modelfile.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if _, ok := f.Metadata[modelfile.NotesKey]; !ok {
		return nil, f.Errorf("it has no notes of a run, which Trainer.Save writes: a model alone " +
			"cannot go on")
	}
	var notes map[string]string
	if err := f.Decode(modelfile.NotesKey, "the notes", modelfile.MaxNotes, &notes); err != nil {
		return nil, err
	}
	return notes, nil
}

// finite reports whether no number in a slice of them is NaN or infinite.
func finite(data any) bool {
	at, _ := modelfile.FirstNonFinite(data)
	return at < 0
}

// tensors returns the model's parameters and lattices, sharing their memory, and its configuration.
func (m *Model) tensors() ([]safetensors.Tensor, map[string]string, error) {
	if err := m.pull(); err != nil {
		return nil, nil, fmt.Errorf("llm: saving the model: %w", err)
	}
	if t := m.trainer; t != nil && t.spoiled != nil {
		return nil, nil, fmt.Errorf("llm: saving the model: its trainer's last update failed: %w",
			t.spoiled)
	}
	config, err := json.Marshal(m.Config)
	if err != nil {
		return nil, nil, fmt.Errorf("llm: saving the configuration: %w", err)
	}
	var tensors []safetensors.Tensor
	add := func(name string, shape []int, data any) error {
		t, err := safetensors.New(name, shape, data)
		if err != nil {
			return fmt.Errorf("llm: saving the model: %w", err)
		}
		tensors = append(tensors, t)
		return nil
	}
	for _, p := range m.Params {
		if !finite(p.Value.Data()) {
			return nil, nil, fmt.Errorf("llm: saving the model: %w: parameter %s is not finite",
				ErrDiverged, p.Name)
		}
		if err := add(p.Name, p.Value.Shape(), p.Value.Data()); err != nil {
			return nil, nil, err
		}
	}
	for _, a := range m.Kasmina.Arrays() {
		if err := add(modelfile.LatticePrefix+a.Name, a.Shape, a.Data); err != nil {
			return nil, nil, err
		}
	}
	return tensors, map[string]string{"format": "pt", modelfile.ConfigKey: string(config)}, nil
}

// fileShape is what a file of a model with parameters of a type holds.
func fileShape(c Config, dt tensor.Dtype) modelfile.Shape {
	s := modelfile.Shape{Dtype: dt, Params: c.Parameters()}
	for _, block := range c.Origin().Kasmina {
		s.Lattices = append(s.Lattices, modelfile.Lattice{Name: strconv.Itoa(block), Seeds: c.Seeds,
			SlotWidth: c.KasminaWidth()})
	}
	if c.Depth > 0 {
		s.Lattices = append(s.Lattices, modelfile.Lattice{Name: depthLayer, Seeds: c.Depth})
	}
	return s
}

// configOf returns the configuration in a file.
func configOf(f *modelfile.File) (Config, error) {
	var c Config
	text, ok := f.Metadata[modelfile.ConfigKey]
	if !ok {
		return c, f.Errorf("%w: it has no %q in its metadata, as this package's model files do",
			ErrArchitecture, modelfile.ConfigKey)
	}
	if len(text) <= modelfile.MaxConfig {
		// To grow step by step would take several times as much.
		c.Kasmina = make([]int, 0, strings.Count(text, ","))
	}
	if err := f.Decode(modelfile.ConfigKey, "the configuration",
		modelfile.MaxConfig, &c); err != nil {
		return c, err
	}
	if c.Kasmina = slices.Clip(c.Kasmina); len(c.Kasmina) == 0 {
		c.Kasmina = nil
	}
	if err := c.Check(); err != nil {
		return c, f.Errorf("%w", err)
	}
	return c, nil
}

// LoadModel reads a model from a file that Model.Save or Trainer.Save wrote, its lattices included:
// what they were made with (gates, telemetry, history) is in the file too. A damaged file is an
// error that says where, and so is one with a parameter that is not finite (ErrDiverged) or with
// tensors that such a model does not have (ErrArchitecture). Whatever the file says, memory is
// taken for what it holds. When the context ends, so does the reading.
func LoadModel(ctx context.Context, path string) (*Model, error) {
	if ctx == nil {
		return nil, fmt.Errorf("llm: LoadModel: %w", errNoContext)
	}
	f, err := modelfile.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	c, err := configOf(f)
	if err != nil {
		return nil, err
	}
	dt := tensor.Float32
	if d, _, err := f.Info(arch.EmbedName); err == nil && d == safetensors.F64 {
		dt = tensor.Float64
	}
	// Before memory for a model is taken, the file must hold one: a configuration can ask for any
	// amount.
	if err := f.Fits(fileShape(c, dt)); err != nil {
		return nil, err
	}
	m, err := newModel(c, dt, nil)
	if err != nil {
		return nil, f.Errorf("%w", err)
	}
	for _, p := range m.Params {
		if err := f.Parameter(ctx, p.Name, p.Value.Data()); err != nil {
			return nil, err
		}
	}
	install, err := m.latticesOf(ctx, f)
	if err != nil {
		return nil, err
	}
	for _, prefix := range []string{modelfile.OptimizerPrefix, modelfile.BeforePrefix} {
		for name := range f.With(prefix) {
			if err := f.Verify(ctx, name); err != nil {
				return nil, f.Errorf("%w", err)
			}
		}
	}
	install()
	return m, nil
}

// latticesOf checks those of a file that fits m, and returns what makes them m's.
func (m *Model) latticesOf(ctx context.Context, f *modelfile.File) (install func(), err error) {
	var arrays []state.Array
	for name := range f.With(modelfile.LatticePrefix) {
		x, err := f.Tensor(ctx, name)
		if err != nil {
			return nil, f.Errorf("%w", err)
		}
		arrays = append(arrays, state.Array{Name: strings.TrimPrefix(name, modelfile.LatticePrefix),
			Shape: x.Shape,
			Data:  x.Data})
	}
	if install, err = m.loadLattices(arrays); err != nil {
		return nil, f.Errorf("%w", err)
	}
	return install, nil
}

// paramsOf reads the parameters of a configuration, under a prefix.
func (m *Model) paramsOf(ctx context.Context, f *modelfile.File, c Config,
	prefix string) ([]Param, error) {
	var params []Param
	for p := range c.Specs() {
		value := newParam(m.Dtype(), p.Shape, nil)
		if err := f.Parameter(ctx, prefix+p.Name, value.Data()); err != nil {
			return nil, err
		}
		params = append(params, Param{Name: p.Name, Value: value})
	}
	return params, nil
}

// contentsOf reads the parameters and lattices of a file of a configuration, and returns what makes
// them m's. Where the blocks are those that m has, its parameters stay where they are.
func (m *Model) contentsOf(ctx context.Context, f *modelfile.File,
	c Config) (read []Param, load func(),
	err error) {
	install, err := m.latticesOf(ctx, f)
	if err != nil {
		return nil, nil, err
	}
	if read, err = m.paramsOf(ctx, f, c, ""); err != nil {
		return nil, nil, err
	}
	return read, func() {
		if m.Config.SameBlocks(c) {
			for i, p := range m.Params {
				copyNumbers(p.Value, read[i].Value)
			}
		} else {
			c.KasminaOptions = m.Config.KasminaOptions
			m.become(c, read)
		}
		install()
	}, nil
}

func copyNumbers(to, from *tensor.Dense) {
	switch x := from.Data().(type) {
	case []float32:
		copy(to.Float32s(), x)
	case []float64:
		copy(to.Float64s(), x)
	}
}
