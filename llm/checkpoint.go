package llm

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/jsonfloat"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/llm/internal/settings"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// training holds the parts of a run's state that are not tensors.
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

	Preferences    op.PreferenceFigures `json:"preferences,omitzero"`
	ValPreferences op.PreferenceFigures `json:"val_preferences,omitzero"`

	Spent Budget  `json:"spent,omitzero"`
	Share float64 `json:"share,omitempty"`
	// sum of the losses of the current epoch's steps
	Losses jsonfloat.Float `json:"losses,omitempty"`
	Summed int             `json:"summed,omitempty"` // number of steps in Losses
}

// Save writes everything Resume needs to continue bit for bit to the file at path, like Model.Save.
// It returns ErrDiverged if the model's loss on the last batch is not finite, because the next step
// would fail and the old file is better.
func (t *Trainer) Save(path string) error { return t.saveBy(path, saveWhole) }

// saveBy writes a checkpoint with the given function. If several ranks train, rank 0 writes it.
func (t *Trainer) saveBy(path string,
	write func(string, []safetensors.Tensor, map[string]string) error) error {
	defer take(t.Model)()
	defer t.team.busy("writing a checkpoint")()
	if err := t.team.agree(nil); err != nil { // before anything else that requires all ranks
		return fmt.Errorf("llm: saving the run: %w", err)
	}

	tensors, metadata, err := t.snapshot()
	if err == nil && t.team.writes() {
		err = write(path, tensors, metadata)
	}
	return t.team.agree(err)
}

// SaveApart is Save with the optimizer's moments in a separate file next to the one at path. The file
// at path contains everything else and names the separate file. It is written last and replaced
// atomically, so the pair of files is consistent even if the process is killed. [Trainer.Resume]
// reads both files, [LoadModel] only the one at path. Equal states produce identical files.
func (t *Trainer) SaveApart(path string) error { return t.saveBy(path, saveApart) }

// SaveParts is Save for several ranks. All ranks write their parts of the optimizer state at the same
// time, to separate files next to the one at path. The file at path contains everything else, is
// written last and is replaced atomically, so the set of files is consistent even if a process is
// killed. [Trainer.Resume] reads the set on any number of ranks; [LoadModel] needs only the file at
// path. All ranks must share the same directory. For a single process, SaveParts is equivalent to
// Save.
func (t *Trainer) SaveParts(path string) error {
	if !t.parallel() {
		return t.Save(path)
	}
	defer take(t.Model)()
	defer t.team.busy("writing its part of a checkpoint")()
	return t.team.agree(t.saveTogether(path, t.team.ranks()))
}

// saveTogether is SaveParts with the model locked. Files left over after an error are removed by the next
// save.
func (t *Trainer) saveTogether(path string, e Parallel) error {
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

	if err = t.team.agree(err); err != nil || !t.team.writes() {
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

// ownState returns this rank's part of the optimizer state, which consists of the moments of the
// parts it updates and all step counts.
func (t *Trainer) ownState(e Parallel) (counts []optim.Tensor, moments []modelfile.Stretch,
	err error) {
	o, ok := t.Optimizer.(optim.Partial)
	if !ok {
		return nil, nil, fmt.Errorf("llm: %T cannot save a part of its state", t.Optimizer)
	}

	parts, err := e.Own()
	if err != nil {
		return nil, nil, fmt.Errorf("llm: saving the run: %w", err)
	}

	sizes := make(map[string]int, len(t.Model.Params))
	for _, p := range t.Model.Params {
		sizes[p.Name] = t.Model.sizeOf(p)
	}

	counts, own := o.StateParts(parts)
	for _, s := range own {
		if !isFinite(s.Data) {
			return nil, nil, notFinite(s.Name)
		}

		m := modelfile.Stretch{Moment: s.Name, From: s.From, Data: s.Data}
		if s.Of != sizes[s.Name[:strings.LastIndexByte(s.Name, '.')]] {
			m.Of = s.Of
		}
		moments = append(moments, m)
	}

	return counts, moments, nil
}

// notFinite returns the error for optimizer state that is not finite.
func notFinite(name string) error {
	return fmt.Errorf("llm: saving the optimizer: %w: %s is not finite", ErrDiverged, name)
}

// copied returns a copy of the data that Save writes.
func (t *Trainer) copied() ([]safetensors.Tensor, map[string]string, error) {
	defer take(t.Model)()
	tensors, metadata, err := t.snapshot()
	if t.team.writes() {
		copyTensors(tensors)
	}
	return tensors, metadata, t.team.agree(err)
}

// snapshot returns the data that Save writes. The model must be locked. The tensors share the parameters'
// memory.
func (t *Trainer) snapshot() ([]safetensors.Tensor, map[string]string, error) {
	if err := t.usable(); err != nil {
		return nil, nil, fmt.Errorf("llm: saving the run: %w", err)
	}

	if err := t.driver.gatherState(); err != nil {
		return nil, nil, fmt.Errorf("llm: saving the run: %w", err)
	}

	return t.snapshotOf(func() ([]optim.Tensor, error) {
		state := t.Optimizer.State()
		for _, s := range state {
			if !isFinite(s.Data) {
				return nil, notFinite(s.Name)
			}
		}
		return state, nil
	})
}

// snapshotOf is like snapshot, but takes the optimizer state from the given function.
func (t *Trainer) snapshotOf(moments func() ([]optim.Tensor, error)) ([]safetensors.Tensor,
	map[string]string, error) {
	if err := t.usable(); err != nil {
		return nil, nil, fmt.Errorf("llm: saving the run: %w", err)
	}
	return t.saveParts(&savedRun{moments: moments, metadata: map[string]string{}})
}

// copyTensors replaces the data of tensors with copies, on all cores.
func copyTensors(tensors []safetensors.Tensor) {
	cpu.Parallel(len(tensors), 1, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			switch x := tensors[i].Data.(type) {
			case []float32:
				tensors[i].Data = slices.Clone(x)
			case []float64:
				tensors[i].Data = slices.Clone(x)
			case []int64:
				tensors[i].Data = slices.Clone(x)
			case []uint8:
				tensors[i].Data = slices.Clone(x)
			}
		}
	})
}

// ReadNotes returns the TrainConfig.Notes of the run that wrote the checkpoint at path. It reads only the
// file's header.
func ReadNotes(path string) (map[string]string, error) {
	f, err := modelfile.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()

	if _, ok := f.Metadata[modelfile.NotesKey]; !ok {
		return nil, f.Errorf("it has no notes of a run, as written by Trainer.Save: a model alone " +
			"cannot be resumed")
	}

	var notes map[string]string
	if err := f.Decode(modelfile.NotesKey, "the notes", modelfile.MaxNotes, &notes); err != nil {
		return nil, err
	}

	return notes, nil
}
