// Command finetune trains a small base model on text and then teaches it to answer whether a Go identifier is
// exported. It tunes low-rank adapters with less than a tenth of the model's parameters.
//
//	go run ./examples/finetune                          # under two minutes on two cores
//	go run ./examples/finetune -rank 4 -method dora
//
// At the end, it prints the loss and the share of correct answers about identifiers that were held out, before and
// after tuning. It also prints how tuning changed the loss on the base model's text. The adapters are saved in the
// format of PEFT. The last line of output is a JSON object.
//
// "kasmina finetune" does the same for a published model and a file of chats.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/comm/launch"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/runlog"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
)

// config describes the base model. Its tokens are the 256 bytes and a token that ends an answer.
var config = llm.Config{Vocab: 257, Dim: 128, Layers: 3, Heads: 4, Seq: 128}

const (
	batch    = 8   // sequences per step
	examples = 600 // questions with answers
	heldOut  = 60  // questions that are not learned
)

type options struct {
	data, out, method string
	budget            llm.Budget // of training the base model
	steps, rank       int        // of tuning
	seed              uint64
}

func main() {
	var o options
	flag.StringVar(&o.data, "data", "", "text `file` or folder for the base model (default: the sources of Go)")
	flag.StringVar(&o.out, "out", filepath.Join("runs", "finetune"), "`folder` for the adapters")
	flag.DurationVar(&o.budget.Time, "time", 45*time.Second, "time to train the base model")
	flag.IntVar(&o.steps, "steps", 120, "steps of tuning")
	flag.IntVar(&o.rank, "rank", 8, "rank of the adapters")
	flag.StringVar(&o.method, "method", "lora", "lora, rslora or dora")
	flag.Uint64Var(&o.seed, "seed", 1, "random seed")
	flag.Parse()

	if err := run(launch.UntilInterrupt(os.Stderr), o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "finetune:", err)
		os.Exit(1)
	}
}

// result is the last line of output.
type result struct {
	BaseLoss      float64 `json:"base_loss"` // on held-out answers, before tuning
	ValLoss       float64 `json:"val_loss"`  // the same after tuning
	BaseAccuracy  float64 `json:"base_accuracy"`
	Accuracy      float64 `json:"accuracy"`
	BaseBPB       float64 `json:"base_bpb"` // bits per byte of text, before tuning
	TunedBPB      float64 `json:"tuned_bpb"`
	TrainedParams int     `json:"trained_params"`
	Params        int     `json:"params"`
	Seconds       float64 `json:"seconds"`
}

func run(ctx context.Context, o options, stdout io.Writer) error {
	began := time.Now()
	corpus, err := openText(o.data)
	if err != nil {
		return err
	}

	base, text, err := trainBase(ctx, o, corpus)
	if err != nil {
		return err
	}

	r, err := tune(ctx, o, base, text, stdout)
	if err != nil {
		return err
	}

	r.Seconds = time.Since(began).Seconds()
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(stdout, "%s\n", line)
	return err
}

// trainBase trains the base model until the time is over. It also returns held-out text.
func trainBase(ctx context.Context, o options, corpus *data.Corpus) (m *llm.Model, text *data.Evaluation,
	err error) {
	tokens, err := data.Tokenize(ctx, corpus.Train, tokenizer.Bytes{})
	if err != nil {
		return nil, nil, err
	}

	loader, err := data.NewLoader(tokens, data.LoaderConfig{Batch: batch, Seq: config.Seq, Seed: o.seed})
	if err != nil {
		return nil, nil, err
	}

	held, err := corpus.HeldOut.Sample(32 << 10)
	if err != nil {
		return nil, nil, err
	}

	if text, err = data.NewEvaluation(held, tokenizer.Bytes{}, batch, config.Seq); err != nil {
		return nil, nil, err
	}

	c := config.Default()
	c.Documents = true // attention stays within a document, which packed examples need
	if m, err = llm.NewModel(c, tensor.Float32, o.seed); err != nil {
		return nil, nil, err
	}

	optimizer, err := optim.NewMuon(optim.WithLR(0.02), optim.WithAdamW(optim.WithLR(0.003)))
	if err != nil {
		return nil, nil, err
	}

	schedule, err := optim.Warmup(0.02, 20)
	if err != nil {
		return nil, nil, err
	}

	annealing, err := optim.CosineAnnealing(0.05)
	if err != nil {
		return nil, nil, err
	}

	t, err := llm.NewTrainer(m, loader, optimizer, llm.TrainConfig{Batch: batch, Schedule: schedule,
		Annealing: annealing, Budget: o.budget, Clip: 1})
	if err != nil {
		return nil, nil, err
	}

	t.On(runlog.Progress(os.Stderr))
	return m, text, errors.Join(t.Run(ctx), t.Close())
}

// tune teaches the task to a model with adapters and measures the effect.
func tune(ctx context.Context, o options, base *llm.Model, text *data.Evaluation,
	stdout io.Writer) (r result, err error) {
	encoder := &chatdata.Encoder{Tokenizer: vocabulary{}, End: []int{endOfAnswer}, MaxTokens: config.Seq + 1}
	var learn, held []chatdata.Sequence
	questions := newQuestions(o.seed)
	for i, q := range questions {
		x := chatdata.Example{Format: chatdata.PromptCompletion, Prompt: chatdata.Content{Text: q.text},
			Completion: chatdata.Content{Text: q.answer}}
		sequences, err := encoder.Encode(x)
		if err != nil {
			return r, err
		}
		if i < heldOut {
			held = append(held, sequences...)
		} else {
			learn = append(learn, sequences...)
		}
	}

	loader, err := chatdata.NewLoader(learn, data.LoaderConfig{Batch: batch, Seq: config.Seq, Seed: o.seed})
	if err != nil {
		return r, err
	}

	answers, err := encoder.Evaluation(held, batch, config.Seq)
	if err != nil {
		return r, err
	}

	targets, err := base.Config.MatchLayers(llm.AllLinear)
	if err != nil {
		return r, err
	}

	m, err := llm.Adapt(base, llm.LoRA{Rank: o.rank, Alpha: 16, Targets: targets,
		RankStabilized: o.method == "rslora", Magnitude: o.method == "dora"}, o.seed)
	if err != nil {
		return r, err
	}

	const rate = 0.002
	optimizer, err := optim.NewAdamW(optim.WithLR(rate), optim.WithWeightDecay(0))
	if err != nil {
		return r, err
	}

	t, err := llm.NewTrainer(m, loader, optimizer, llm.TrainConfig{Steps: o.steps, Batch: batch, Clip: 1,
		Schedule: func(step int) float64 { return rate * float64(o.steps-step) / float64(o.steps) }})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()

	r.TrainedParams, r.Params = t.Last().Params, t.Last().AllParams
	if r.BaseLoss, r.BaseBPB, r.BaseAccuracy, err = measure(ctx, t, answers, text, questions[:heldOut]); err != nil {
		return r, err
	}

	t.On(runlog.Progress(os.Stderr))
	if err := t.Run(ctx); err != nil {
		return r, err
	}

	if r.ValLoss, r.TunedBPB, r.Accuracy, err = measure(ctx, t, answers, text, questions[:heldOut]); err != nil {
		return r, err
	}

	fmt.Fprintf(stdout, "%d of %d parameters learned\n", r.TrainedParams, r.Params)
	fmt.Fprintf(stdout, "correct answers  %3.0f%% before, %3.0f%% after tuning\n", 100*r.BaseAccuracy, 100*r.Accuracy)
	fmt.Fprintf(stdout, "loss on answers  %.3f before, %.3f after tuning\n", r.BaseLoss, r.ValLoss)
	fmt.Fprintf(stdout, "other text       %.3f bits per byte before, %.3f after tuning\n", r.BaseBPB, r.TunedBPB)

	return r, save(ctx, o.out, m)
}

// measure returns the loss on held-out answers, the bits per byte of other text, and the share of correct answers.
func measure(ctx context.Context, t *llm.Trainer, answers, text *data.Evaluation, questions []question) (loss,
	bitsPerByte, accuracy float64, err error) {
	if loss, _, err = t.Evaluate(answers); err != nil {
		return 0, 0, 0, err
	}
	if _, bitsPerByte, err = t.Evaluate(text); err != nil {
		return 0, 0, 0, err
	}

	g, err := llm.NewGenerator(t.Model)
	if err != nil {
		return 0, 0, 0, err
	}
	defer func() { err = errors.Join(err, g.Close()) }()

	greedy, err := sampler.New(sampler.Config{Vocab: config.Vocab})
	if err != nil {
		return 0, 0, 0, err
	}

	right := 0
	for _, q := range questions {
		var ids []int
		for id, err := range g.Generate(ctx, vocabulary{}.Encode([]byte(q.text)), len(q.answer)+1, greedy) {
			if err != nil {
				return 0, 0, 0, err
			}
			ids = append(ids, id)
		}
		if answer, err := (vocabulary{}).DecodeWhole(ids); err == nil && string(answer) == q.answer+endText {
			right++
		}
	}

	return loss, bitsPerByte, float64(right) / float64(len(questions)), nil
}

// save writes the adapters and replaces the adapters of an earlier run.
func save(ctx context.Context, out string, m *llm.Model) error {
	dir := filepath.Join(out, "adapter")
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	return hf.SaveAdapter(ctx, dir, "", m)
}

// A question about an identifier, with the right answer: whether it is exported.
type question struct{ text, answer string }

// newQuestions returns questions in random order, each about another identifier.
func newQuestions(seed uint64) (all []question) {
	r := rand.New(rand.NewPCG(seed, 2))
	syllables := strings.Fields("read write buf er node tree key map len cap max min scan next open close flag val " +
		"list item name path line file test data size step rate")
	seen := map[string]bool{}
	for len(all) < examples {
		name := ""
		for range 2 + r.IntN(2) {
			s := syllables[r.IntN(len(syllables))]
			name += strings.ToUpper(s[:1]) + s[1:]
		}
		q := question{answer: "yes"}
		if r.IntN(2) == 0 {
			name, q.answer = strings.ToLower(name[:1])+name[1:], "no"
		}
		if !seen[name] {
			seen[name] = true
			q.text = "Is " + name + " exported? "
			all = append(all, q)
		}
	}
	return all
}

const (
	endOfAnswer = 256
	endText     = "<end>"
)

// vocabulary has a token for each byte and an end-of-answer token.
type vocabulary struct{}

func (vocabulary) Encode(text []byte) []int       { return tokenizer.Bytes{}.Encode(text) }
func (vocabulary) Affixes() (before, after []int) { return nil, nil }
func (vocabulary) IsSpecial(id int) bool          { return id == endOfAnswer }

func (v vocabulary) Token(id int) (string, bool) {
	text, err := v.DecodeWhole([]int{id})
	return string(text), err == nil
}

func (vocabulary) DecodeWhole(ids []int) (text []byte, err error) {
	for _, id := range ids {
		if id == endOfAnswer {
			text = append(text, endText...)
			continue
		}
		b, err := tokenizer.Bytes{}.Decode([]int{id})
		if err != nil {
			return nil, err
		}
		text = append(text, b...)
	}
	return text, nil
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
