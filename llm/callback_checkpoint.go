package llm

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/kasmina-go/kasmina/internal/folderlock"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
)

// A CheckpointOption configures Checkpoint.
type CheckpointOption func(*checkpointer)

// InBackground writes checkpoints while the run continues, except after its last step. A copy of the
// checkpoint's data occupies memory until the file is complete. The Saved event carries the number of
// the saved step, and arrives after a later step.
func InBackground() CheckpointOption { return func(c *checkpointer) { c.background = true } }

// InParts lets several ranks write a checkpoint together, one file each; see [Trainer.SaveParts]. The
// run waits for the files, regardless of InBackground.
func InParts() CheckpointOption { return func(c *checkpointer) { c.parts = true } }

// OptimizerApart writes the optimizer's moments to a separate file; see [Trainer.SaveApart].
func OptimizerApart() CheckpointOption {
	return func(c *checkpointer) { c.write = saveApart }
}

// Checkpoint saves everything needed to resume the run to the file at path. It saves after every multiple
// of the given number of steps (0 for never), after the last step, and when the run is interrupted.
//
// After a callback or a step fails, it tries to save the last completed step, unless the error is
// ErrDiverged, in which case the previous checkpoint is better.
//
// The file is replaced atomically, so that a complete checkpoint always exists. Missing directories
// are created. An unwritable path fails the run before its first step, as does a directory that
// another program has claimed. Checkpoint claims the directory for the duration of the run, like
// [ClaimFolder].
func Checkpoint(t *Trainer, path string, every int, opts ...CheckpointOption) Callback {
	c := &checkpointer{t: t, path: path, every: every, write: saveWhole}
	t.addSaver()
	t.team.addMeeting(func(e Event) bool {
		return e.Step != c.tried && (due(e, c.every) || c.wanted(e))
	})
	for _, opt := range opts {
		opt(c)
	}

	return c.event
}

// A checkpointer writes one file at a time.
type checkpointer struct {
	t          *Trainer
	path       string
	every      int
	asked      int // save requests received by the time of the last save
	write      func(path string, tensors []safetensors.Tensor, metadata map[string]string) error
	background bool
	parts      bool
	release    func() error // releases the claim on the directory
	tried      int          // last step saved, or attempted, in this run; at first the run's initial step
	complete   int          // step of the last successful save in this run; 0 before the first
	step       int          // step being written
	written    chan error   // receives the result of the write; nil when nothing is being written
}

func (c *checkpointer) event(e Event) error {
	switch {
	case e.Kind == RunStart:
		c.tried = e.Step
		return c.begin()
	case e.Kind == RunEnd:
		return errors.Join(c.wait(), c.end())
	case e.Kind == Failed:
		err := c.finish()
		if errors.Is(err, ErrDiverged) { // a callback failed on the step that was just saved
			return err
		}
		return errors.Join(err, c.rescue(e))
	case !due(e, c.every) && e.Kind != Interrupted && !c.wanted(e):
		return c.poll()
	}

	c.asked = c.t.steering.saves()
	inParts := c.parts && c.t.parallel()
	if c.background && !inParts && e.Kind == StepEnd && !e.Last {
		return c.saveInBackground(e.Step)
	}

	return c.save(e.Step)
}

// wanted reports whether a save was requested; see [Trainer.SaveSoon].
func (c *checkpointer) wanted(e Event) bool {
	return e.Kind == StepEnd && c.t.steering.saves() > c.asked
}

// rescue saves the last step of a failed run, unless this was already attempted or the model is
// unsound.
func (c *checkpointer) rescue(e Event) error {
	sound := c.t.inTurn(func() error { return nil })
	if e.Step == c.tried || errors.Is(e.Err, ErrDiverged) || sound != nil {
		return nil
	}
	return c.save(e.Step)
}

// save writes the trainer's state.
func (c *checkpointer) save(step int) error {
	if err := c.t.meet(); err != nil {
		return err
	}

	c.tried = step
	write := func(path string) error { return c.t.saveBy(path, c.write) }
	if c.parts && c.t.parallel() {
		write = c.t.SaveParts
	}

	// Write this file even if an earlier one could not be written, unless a callback rejects the
	// earlier file and wants it to remain the last.
	earlier := c.written != nil
	failed := c.wait()
	if earlier && failed == nil {
		if err := c.saved(c.step); err != nil {
			return err
		}
	}

	written := write(c.path)
	if written == nil {
		c.complete = step
	}
	if err := errors.Join(failed, written); err != nil {
		return err
	}

	return c.saved(step)
}

// begin creates the checkpoint's missing directories, checks that the file can be written, and claims
// its directory.
func (c *checkpointer) begin() error {
	c.complete = 0

	if !c.t.writesNow() {
		if c.parts && c.t.parallel() {
			// This rank writes its own part, perhaps to another disk.
			if err := modelfile.Writable(c.path); err != nil {
				return fmt.Errorf("llm: Checkpoint: the part of this rank: %w", err)
			}
		}
		return nil
	}

	info, err := os.Stat(c.path)
	if err == nil && !info.Mode().IsRegular() && !info.IsDir() {
		return fmt.Errorf("llm: Checkpoint: %s is not a regular file", c.path)
	}

	if err := modelfile.Replaceable(c.path); err != nil {
		return fmt.Errorf("llm: Checkpoint: %w", err)
	}

	if err := modelfile.Writable(c.path); err != nil {
		return fmt.Errorf("llm: Checkpoint: %w", err)
	}

	release, err := ClaimFolder(filepath.Dir(c.path))
	if err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return fmt.Errorf("llm: Checkpoint: %w", err)
	}

	c.release = release
	return nil
}

// end releases the claim on the directory.
func (c *checkpointer) end() error {
	release := c.release
	c.release = nil
	if release == nil {
		return nil
	}
	return release()
}

// saveInBackground starts writing the trainer's state in the background, after any write in progress.
func (c *checkpointer) saveInBackground(step int) error {
	if err := c.t.agreeNow(c.finish()); err != nil {
		return err
	}

	c.tried = step
	defer c.t.busyNow("copying a checkpoint")()
	tensors, metadata, err := c.t.copied()
	if err != nil {
		return err
	}

	c.step, c.written = step, make(chan error, 1)
	if !c.t.writesNow() {
		c.written <- nil
		return nil
	}

	go func(written chan<- error) {
		written <- c.write(c.path, tensors, metadata)
	}(c.written)

	return nil
}

// wait waits for the write in progress.
func (c *checkpointer) wait() error {
	if c.written == nil {
		return nil
	}
	defer c.t.busyNow("waiting for its checkpoint to be written")()
	err := <-c.written
	c.written = nil
	return err
}

// finish waits for the write in progress and emits Saved.
func (c *checkpointer) finish() error {
	if c.written == nil {
		return nil
	}
	if err := c.wait(); err != nil {
		return err
	}
	return c.saved(c.step)
}

// poll emits Saved if the write in the background has finished.
func (c *checkpointer) poll() error {
	if len(c.written) == 0 {
		return nil
	}
	return c.finish()
}

func (c *checkpointer) saved(step int) error {
	return c.t.emit(Saved, func(e *Event) { e.Path, e.Step = c.path, step })
}

// ErrFolderInUse reports that another program has claimed an output directory.
var ErrFolderInUse = folderlock.ErrInUse

// ClaimFolder reserves an existing output directory for this program until release is called or the
// program exits. In every other program, ClaimFolder then returns ErrFolderInUse, which keeps two
// programs from writing the files of the same run.
//
// Within the program, any number of goroutines may claim the directory, which stays reserved until
// all have released it. A run with a [Checkpoint] claims its directory by itself, but a program that
// reads or writes there before the run should claim it first.
//
// ClaimFolder works on Linux, macOS, the BSDs and Windows. If the system or the file system does not
// support locks, it returns errors.ErrUnsupported, and a Checkpoint continues without the claim.
func ClaimFolder(dir string) (release func() error, err error) {
	release, err = folderlock.Claim(dir)
	if err != nil {
		return nil, fmt.Errorf("llm: ClaimFolder: %s: %w; choose another folder, or wait for "+
			"the other program to finish", dir, err)
	}
	return release, nil
}

// saveWhole writes a checkpoint as a single file.
func saveWhole(path string, tensors []safetensors.Tensor, metadata map[string]string) error {
	if err := safetensors.Save(path, tensors, metadata); err != nil {
		return err
	}
	_ = modelfile.Parts{}.Tidy(path) // leftover parts of an earlier checkpoint are harmless
	return nil
}

// saveApart writes a checkpoint as two files.
func saveApart(path string, tensors []safetensors.Tensor, metadata map[string]string) error {
	sizes := map[string]int{} // number of elements of each tensor, by name
	for _, x := range tensors {
		sizes[x.Name] = opbase.Size(x.Shape)
	}

	var rest []safetensors.Tensor
	var moments []modelfile.Stretch
	for _, x := range tensors {
		own, prefixed := strings.CutPrefix(x.Name, modelfile.OptimizerPrefix)
		n, ok := sizes[own[:max(0, strings.LastIndexByte(own, '.'))]]
		if !prefixed || !ok || x.DType == safetensors.I64 { // an I64 tensor counts steps
			rest = append(rest, x)
			continue
		}

		m := modelfile.Stretch{Moment: own, Data: x.Data}
		if size := sizes[x.Name]; size != n {
			m.Of = size
		}
		moments = append(moments, m)
	}

	set := modelfile.SetOf(metadata[modelfile.TrainingKey], moments)
	text, err := json.Marshal(set)
	if err != nil {
		return err
	}

	metadata[modelfile.PartsKey] = string(text)
	if err := set.SavePart(path, 0, moments); err != nil {
		return err
	}

	if err := safetensors.Save(path, rest, metadata); err != nil {
		return err
	}

	_ = set.Tidy(path)
	return nil
}
