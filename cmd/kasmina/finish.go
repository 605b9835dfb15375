package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/hf/gguf"
)

// savePretrained is hf.SavePretrained. A test replaces it to simulate a slow disk.
var savePretrained = hf.SavePretrained

// checkSave returns an error if the trained model could not be written at the end of the run.
func (o *trainOptions) checkSave(from origin) error {
	c := o.finalConfig(from.shape())
	if err := hf.CheckSave(c, from.saving()...); err != nil {
		return fmt.Errorf("the trained model could not be saved: %w", err)
	}

	if o.gguf == "" {
		return nil
	}

	kind, err := gguf.ParseType(o.gguf)
	if err == nil {
		err = gguf.Check(from.(published).Folder, c, kind)
	}
	if err == nil {
		err = atomicfile.Writable(o.in(ggufName))
	}
	if err != nil {
		return fmt.Errorf("--gguf: the trained model could not be saved: %w", err)
	}

	return nil
}

// finalConfig returns the configuration of the model at the end of the run.
func (o *trainOptions) finalConfig(c llm.Config) llm.Config {
	if o.grow == 0 {
		return c
	}

	var blocks []llm.Block
	for i := range c.Layers * o.grow {
		if n := len(c.Blocks); n > 0 {
			blocks = append(blocks, c.Blocks[i%c.Layers%n])
		}
	}

	c.Layers, c.Blocks = c.Layers*o.grow, blocks
	return c
}

// save writes the trained model and moves it to its place.
func (o *trainOptions) save(c *cobra.Command, m *llm.Model, from origin) error {
	d := o.dir()
	if o.keepBest && exists(d.in(bestName)) {
		best, err := llm.LoadModel(c.Context(), d.in(bestName))
		if err != nil {
			return fmt.Errorf("--keep-best: %w", err)
		}
		m = best
	}

	at, erase := bar(c.ErrOrStderr(), "writing", true)
	defer erase()
	if o.gguf != "" {
		if err := o.saveGGUF(c, m, from, at); err != nil {
			return err
		}
	}

	how := append(from.saving(), hf.WithSaveProgress(at), hf.WithShardSize(modelShard))
	if err := savePretrained(c.Context(), d.in(stagingName), m, how...); err != nil {
		return err
	}

	run, err := d.nextManifest(c)
	if err != nil {
		return err
	}
	if err := d.publish(run); err != nil {
		return err
	}

	erase()
	if !o.quiet {
		o.report(c.ErrOrStderr())
	}

	return nil
}

// saveGGUF writes the model for llama.cpp next to the staging folder. It replaces the file of a killed
// process.
func (o *trainOptions) saveGGUF(c *cobra.Command, m *llm.Model, from origin,
	at func(done, of int64)) error {
	kind, err := gguf.ParseType(o.gguf)
	if err != nil {
		return fmt.Errorf("--gguf: %w", err)
	}

	path := o.in(ggufName)
	if err := os.Remove(path); err != nil && exists(path) {
		return fmt.Errorf("--gguf: %w", err)
	}

	f := from.(published).Folder
	if err := gguf.Save(c.Context(), path, f, m, kind, at); err != nil {
		return err
	}

	if o.quiet {
		return nil
	}

	return differencesOf(c.ErrOrStderr(), f)
}

// report prints the saved files and commands to try next.
func (o *trainOptions) report(w io.Writer) {
	d := quoted(o.dir().out)
	fmt.Fprintf(w, "saved     the model in %s, its checkpoint and its log in %s\n", o.dir().out, o.in(""))
	if best, err := o.readBest(); err == nil && o.keepBest {
		fmt.Fprintf(w, "best      the model after step %d, with a held-out loss of %.4f\n", best.Step, best.ValLoss)
	}
	fmt.Fprintf(w, "next      kasmina generate -m %s -p TEXT\n", d)
	fmt.Fprintf(w, "          kasmina eval -m %s -d FILE   # a text that the model has not seen\n", d)
	fmt.Fprintf(w, "          kasmina report %s\n", d)
}

// A best is the evaluation with the lowest held-out loss so far.
type best struct {
	Step    int     `json:"step"`
	ValLoss float64 `json:"val_loss"`
}

const bestFigures = "best.json"

func (o *trainOptions) readBest() (b best, err error) {
	text, err := os.ReadFile(o.in(bestFigures))
	if err == nil {
		err = json.Unmarshal(text, &b)
	}
	return b, err
}

// saveBest returns a callback that saves the model whenever an evaluation has a lower loss than all
// previous evaluations, including the ones before the run was resumed.
func (o *trainOptions) saveBest(t *llm.Trainer) llm.Callback {
	lowest := math.Inf(1)
	return func(e llm.Event) error {
		switch {
		case e.Kind == llm.RunStart:
			for _, name := range []string{bestName, bestFigures} {
				if err := atomicfile.Writable(o.in(name)); err != nil {
					return fmt.Errorf("--keep-best: %w", err)
				}
			}
			if e.Step == 0 {
				return nil
			}
			if b, err := o.readBest(); err == nil && b.Step <= e.Step && exists(o.in(bestName)) {
				lowest = b.ValLoss
			}
		case e.Kind == llm.EvalEnd && e.ValLoss < lowest:
			lowest = e.ValLoss
			if err := t.Model.Save(o.in(bestName)); err != nil {
				return fmt.Errorf("--keep-best: %w", err)
			}
			text, err := json.Marshal(best{e.Step, e.ValLoss})
			if err != nil {
				return err
			}
			return atomicfile.Write(o.in(bestFigures), func(f *os.File) error {
				_, err := f.Write(append(text, '\n'))
				return err
			})
		}
		return nil
	}
}

// remedy adds advice to the error of a full disk.
func (o *trainOptions) remedy(err error) error {
	if !errors.Is(err, syscall.ENOSPC) {
		return err
	}
	from := "the start, since there is no checkpoint yet"
	if exists(o.in(checkpointName)) {
		from = "the last checkpoint"
	}
	return fmt.Errorf("%w: free some space and give the same command again to continue from %s", err, from)
}
