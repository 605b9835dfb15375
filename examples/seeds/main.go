// Command seeds trains a small language model while a controller plants blueprints in it. The controller chooses
// chunks of the residual stream that look unhealthy according to the measurements of the Kasmina layers. The
// trainer compares the model with a twin, which trains without the new blueprints, and keeps those blueprints that
// lower the loss on held-out text.
//
//	go run ./examples/seeds                              # minutes on two cores
//	go run ./examples/seeds -data ~/notes -steps 2000
//	go run ./examples/seeds -board 127.0.0.1:6060        # shows every seed in a browser
//
// Each change of a seed is printed with its reason.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/board"
	"github.com/kasmina-go/kasmina/comm/launch"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/runlog"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// config describes a model with a Kasmina layer of 16 seeds after each of its blocks.
var config = llm.Config{Vocab: 256, Dim: 96, Layers: 2, Heads: 4, Seq: 64, Kasmina: []int{0, 1},
	Seeds: 16, SlotWidth: 512}

const (
	batch     = 8       // sequences per step
	rate      = 0.01    // peak learning rate
	epochs    = 200     // reports of the seeds, and decisions of the controller, in a run
	active    = 8       // blueprints that may be on trial at a time
	judgeText = 8 << 10 // bytes of held-out text for judging blueprints
)

func main() {
	path := flag.String("data", "", "text `file` or folder to learn from (default: the sources of Go)")
	steps := flag.Int("steps", 1000, "optimizer steps")
	seed := flag.Uint64("seed", 1, "random seed of the weights and of the data order")
	address := flag.String("board", "", "show the run in a browser at this `address`, such as 127.0.0.1:6060")
	steer := flag.Bool("board-control", false, "let anyone who has the token that -board prints steer the seeds")
	flag.Parse()

	ctx := launch.UntilInterrupt(os.Stderr)
	if err := run(ctx, *path, *steps, *seed, *address, *steer, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "seeds:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, path string, steps int, seed uint64, address string, steer bool,
	stdout io.Writer) (err error) {
	corpus, err := openText(path)
	if err != nil {
		return err
	}

	tokens, err := data.Tokenize(ctx, corpus.Train, tokenizer.Bytes{})
	if err != nil {
		return err
	}

	loader, err := data.NewLoader(tokens, data.LoaderConfig{Batch: batch, Seq: config.Seq, Seed: seed})
	if err != nil {
		return err
	}

	heldOut, err := corpus.HeldOut.Sample(judgeText)
	if err != nil {
		return err
	}

	validation, err := data.NewEvaluation(heldOut, tokenizer.Bytes{}, batch, config.Seq)
	if err != nil {
		return err
	}

	// The default thresholds are meant for much longer runs.
	thresholds := state.WithThresholds(state.DefaultThresholds().Within(epochs / 2))
	model, err := llm.NewModel(config.Default(), tensor.Float32, seed, thresholds)
	if err != nil {
		return err
	}

	stop, err := model.Kasmina.Listen(func(e state.Event) { fmt.Fprintln(stdout, e) })
	if err != nil {
		return err
	}
	defer stop()

	optimizer, err := optim.NewAdamW(
		optim.WithGroup(optim.NameContains("norm", "kasmina"), optim.Decay(0)))
	if err != nil {
		return err
	}

	schedule, err := optim.WarmupCosine(rate, rate/20, steps/10, steps)
	if err != nil {
		return err
	}

	t, err := llm.NewTrainer(model, loader, optimizer, llm.TrainConfig{Steps: steps, Batch: batch,
		Schedule: schedule, Clip: 1, Epoch: max(1, steps/epochs)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()

	// The blueprints together may have a fiftieth of the model's parameters.
	controller := control.NewHeuristic(active, model.NumParams()/50)
	controller.RampEpochs, controller.Patience = epochs/16, epochs/6
	if err := t.Grow(llm.Growth{Controller: controller, Validation: validation, Every: 2,
		Refused: func(c state.Command, err error) {
			fmt.Fprintf(stdout, "rejected: %v\n", err)
		}}); err != nil {
		return err
	}

	t.On(runlog.Progress(os.Stderr), llm.Evaluate(t, validation, steps/10))
	if address != "" {
		closeBoard, err := show(t, address, steer)
		if err != nil {
			return err
		}
		defer closeBoard()
	}

	if err := t.Run(ctx); err != nil {
		return err
	}

	kept := 0
	for _, layer := range model.Kasmina.Report() {
		for _, s := range layer.Seeds {
			if layer.Site == blueprints.Chunk && s.Stage == state.Fossilized {
				kept++
			}
		}
	}

	_, err = fmt.Fprintf(stdout, "%d blueprints were kept; the model has %.3f bits per byte on the text that "+
		"judged them\n", kept, t.Last().ValBPB)
	return err
}

// show serves the board at an address.
func show(t *llm.Trainer, address string, steer bool) (closeBoard func() error, err error) {
	var options []board.Option
	if steer {
		options = append(options, board.WithControl())
	}

	b, err := board.Attach(t, options...)
	if err != nil {
		return nil, err
	}

	url, err := b.Listen(address)
	if err != nil {
		return nil, errors.Join(err, b.Close())
	}

	fmt.Fprintf(os.Stderr, "board     %s\n", url)
	return b.Close, nil
}

// openText opens the text at path, by default the sources of Go.
func openText(path string) (*data.Corpus, error) {
	if path != "" {
		return data.Open(path)
	}
	path, err := data.GoSource()
	if err != nil {
		return nil, err
	}
	return data.Open(path, data.WithExtensions(".go"))
}
