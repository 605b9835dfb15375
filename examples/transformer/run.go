package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/kasmina-go/kasmina/board"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/parallel"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// runIn is run as one of a team, or alone, on a GPU or without.
func runIn(ctx context.Context, team *parallel.Team, device *cudaops.Device, o options,
	stdout, stderr io.Writer) error {
	if err := writable(o.out); err != nil {
		return fmt.Errorf("-out: %w", err)
	}
	texts, err := openData(o, stderr)
	if err != nil {
		return err
	}
	if err := o.chooseEngine(team, device, stderr); err != nil {
		return err
	}
	if err := team.InTurn(func() error { return texts.tokenize(ctx, o, stderr) }); err != nil {
		return err
	}
	defer texts.close()
	t, err := trainerOf(o, &texts)
	if err != nil {
		return err
	}
	defer t.Close()
	release, err := claimFolder(team, o.out, stderr)
	if err != nil {
		return err
	}
	defer release()
	if o.resume.set { // after the claim, or another run might go on from here meanwhile
		if err := resume(ctx, t, o, stderr); err != nil {
			return err
		}
	}
	if !team.First() {
		return follow(ctx, t, o)
	}
	return lead(ctx, t, o, &texts, device == nil, stdout, stderr)
}

// chooseEngine sets what computes the steps, and the log's words for it.
func (o *options) chooseEngine(team *parallel.Team, device *cudaops.Device,
	stderr io.Writer) error {
	o.on = map[string]string{"device": "the CPU", "precision": cmp.Or(o.precision, "f32")}
	if device == nil {
		return o.chooseCPU(team, stderr)
	}
	o.on = map[string]string{"device": device.String(), "precision": o.onGPU().String()}
	opts := []cudaops.MachineOption{cudaops.WithGradientPrecision(o.gradients),
		cudaops.WithTuning(o.tune)}
	if team != nil {
		o.train.Engine = gpu.Parallel(device, o.onGPU(), team, opts...)
		return nil
	}
	if o.monitor > 0 {
		opts = append(opts, cudaops.WithMonitor(o.monitor))
	}
	o.train.Engine = gpu.Engine(device, o.onGPU(), opts...)
	return nil
}

func (o *options) chooseCPU(team *parallel.Team, stderr io.Writer) error {
	if o.profile != "" {
		return errors.New("-profile is for a GPU: the steps of a CPU are not traced")
	}
	if err := o.onCPU(stderr); err != nil {
		return err
	}
	if team != nil {
		o.train.Engine = team.Engine
	} else if o.monitor > 0 {
		o.train.Engine = llm.CPUEngine(cpuops.WithMonitor(o.monitor))
	}
	return nil
}

// trainerOf makes the trainer, and with -judge what judges its growth.
func trainerOf(o options, texts *dataset) (*llm.Trainer, error) {
	t, err := newTrainer(o, texts.tokens)
	if err != nil {
		return nil, withHint(err)
	}
	if o.judge {
		heldOut, err := texts.judging(o)
		if err == nil {
			err = judged(t, heldOut)
		}
		if err != nil {
			return nil, errors.Join(err, t.Close())
		}
	}
	return t, nil
}

// claimFolder makes the folder of a run, and keeps other runs from it until release.
func claimFolder(team *parallel.Team, dir string, stderr io.Writer) (release func() error,
	err error) {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, err
	}
	release, err = claim(team, dir)
	if errors.Is(err, errors.ErrUnsupported) {
		fmt.Fprintf(stderr, "folder    no other run may write to %s meanwhile: %v\n", dir, err)
		return func() error { return nil }, nil
	}
	if err != nil {
		return nil, fmt.Errorf("-out: %w", err)
	}
	return release, nil
}

// resume goes on from the checkpoint that -resume names.
func resume(ctx context.Context, t *llm.Trainer, o options, stderr io.Writer) error {
	var settings []string
	how := []llm.ResumeOption{llm.WithNewSettings(func(d []string) { settings = d })}
	if keep, _ := o.keep(); keep != nil { // checked with the other options
		how = append(how, llm.WithNewData(*keep))
	}
	if err := t.Resume(ctx, o.resume.path, how...); err != nil {
		return resumeHint(err)
	}
	fmt.Fprintf(stderr, "resuming  %s at step %d\n%s", o.resume.path, t.Step(), o.explain(settings))
	return nil
}

// follow runs what a rank behind the first does: it trains, and saves when all do.
func follow(ctx context.Context, t *llm.Trainer, o options) error {
	if o.kasmina && !o.judge {
		t.On(grow(t.Model, t.Config.Epoch))
	}
	t.On(llm.Checkpoint(t, filepath.Join(o.out, checkpointName), o.saveEvery, llm.InBackground()))
	return t.Run(ctx)
}

// lead runs what the first rank, or the only one, does: it also tells, scores and writes.
func lead(ctx context.Context, t *llm.Trainer, o options, texts *dataset, onCPU bool,
	stdout, stderr io.Writer) error {
	baselines, err := score(ctx, texts.train, texts.heldOut, stderr)
	if err != nil {
		return err
	}
	if err := addCallbacks(t, o, *texts, stderr); err != nil {
		return err
	}
	if o.board != "" {
		shown, err := show(t, o, stderr)
		if err != nil {
			return err
		}
		defer shown.Close()
	}
	if err := setAside(o, stderr); err != nil {
		return err
	}
	// with which the checkpoint can be used without the data
	if bpe, ok := texts.tokenizer.(*tokenizer.BPE); ok {
		if err := bpe.Save(filepath.Join(o.out, tokenizerName)); err != nil {
			return err
		}
	}
	if onCPU {
		if o.preset != "small" && o.train.Batch > 1 {
			fmt.Fprintf(stderr, "memory    should it not suffice, -batch 1 -accumulate %d makes "+
				"steps of as many tokens with less\n", o.train.Batch*o.train.Accumulate)
		}
		t.On(tellPace(stderr))
	}
	saved := -1 // the step of this run's last checkpoint: an interrupted run may fail to save
	t.On(func(e llm.Event) error {
		if e.Kind == llm.Saved {
			saved = e.Step
		}
		return nil
	})
	if err := t.Run(ctx); errors.Is(err, context.Canceled) && saved == t.Step() {
		return fmt.Errorf("%w at step %d; %s goes on from there", err,
			t.Step(), o.resumption(o.out))
	} else if err != nil {
		return o.afterFailure(withHint(err))
	}
	return report(o, t.Last(), baselines, stdout)
}

// show puts the run on a board, at the address that -board names.
func show(t *llm.Trainer, o options, stderr io.Writer) (*board.Board, error) {
	opts := []board.Option{board.WithFolder(o.out)}
	if o.boardControl {
		opts = append(opts, board.WithControl())
	}
	b, err := board.Attach(t, opts...)
	if err != nil {
		return nil, err
	}
	url, err := b.Listen(o.board)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("-board: %w", err), b.Close())
	}
	fmt.Fprintf(stderr, "board     %s\n", url)
	if o.kasmina && !o.judge {
		fmt.Fprintln(stderr, "          seeds grow by a timetable; with -judge a controller judges "+
			"each, and rolls back what does not help")
	}
	return b, nil
}
