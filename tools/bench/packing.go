package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/optim"
)

// ofPacking is the name of the group that tunes a model on short chats: packed, so that several chats share a row, and
// padded, so that each chat fills a row of its own.
const ofPacking = "packing"

// The lengths of the chats have a log-normal distribution. Their median is chatMedian tokens, and one chat in six has
// more than twice as many tokens.
const (
	chatMedian    = 120
	chatDeviation = 0.7 // of the logarithm
	shortestChat  = 16

	chatsPerRow = 64 // chats in each row of the batch
)

// newEngine creates the engine of a trainer.
type newEngine = func(*llm.Model, optim.Optimizer, llm.TrainConfig) (llm.Engine, error)

// packings measures the group on a GPU.
func (o options) packings(device *cudaops.Device) error {
	if !o.has(ofPacking) {
		return nil
	}

	s := sizes[0]
	if !slices.Contains(o.models, s.name) {
		return nil
	}
	return s.pack(o, gpu.Engine(device, o.precision, cudaops.WithTuning(o.tune)))
}

// cpuPackings measures the group on a CPU.
func cpuPackings(o options) error {
	s := size{"llama3M_cpu", llm.Config{Vocab: 256, Dim: 256, Layers: 4, Heads: 4, FF: 704, Seq: 512}, 4, false}
	return s.pack(o, llm.CPUEngine())
}

// pack measures a pass over the chats, packed and padded.
func (s size) pack(o options, engine newEngine) error {
	if o.batch > 0 {
		s.batch = o.batch
	}
	s.config = s.config.Default()
	s.config.Documents = true

	chats := s.chats()
	for _, way := range []struct {
		name  string
		chats []chatdata.Sequence
	}{{"packed", chats}, {"padded", s.padded(chats)}} {
		r, err := s.pass(way.chats, o.steps, engine)
		if err != nil {
			return fmt.Errorf("%s, %s: %w", s.name, way.name, err)
		}

		r.Bench = "packing_" + s.name + "_" + way.name
		r.TokensPS = rounded(float64(tokensOf(chats))/(r.Us/1e6), 0)
		if err := emit(r); err != nil {
			return err
		}
	}

	fmt.Fprintf(os.Stderr, "%d chats of %d tokens; padded to the longest chat of each batch: %d tokens\n", len(chats),
		tokensOf(chats), s.paddedToLongest(chats))
	return nil
}

// chats returns chats with random tokens. The model learns the second half of each.
func (s size) chats() []chatdata.Sequence {
	r := rand.New(rand.NewPCG(5, 6))
	chats := make([]chatdata.Sequence, chatsPerRow*s.batch)
	for i := range chats {
		n := int(chatMedian * math.Exp(chatDeviation*r.NormFloat64()))
		n = min(max(n, shortestChat), s.config.Seq+1)

		c := chatdata.Sequence{IDs: make([]int, n), Learn: make([]bool, n)}
		for k := range n {
			c.IDs[k], c.Learn[k] = r.IntN(s.config.Vocab), k >= n/2
		}
		chats[i] = c
	}
	return chats
}

// padded returns the chats with tokens that are not learned at their ends, so that each of them fills a row.
func (s size) padded(chats []chatdata.Sequence) []chatdata.Sequence {
	all := make([]chatdata.Sequence, len(chats))
	for i, c := range chats {
		rest := s.config.Seq + 1 - len(c.IDs)
		all[i] = chatdata.Sequence{IDs: slices.Concat(c.IDs, make([]int, rest)),
			Learn: slices.Concat(c.Learn, make([]bool, rest))}
	}
	return all
}

// tokensOf returns the number of tokens that chats take up in rows: all but the last token of each, which is only a
// target.
func tokensOf(chats []chatdata.Sequence) (n int) {
	for _, c := range chats {
		n += len(c.IDs) - 1
	}
	return n
}

// paddedToLongest returns the number of tokens with padding if the rows of each batch are as long as its longest chat.
func (s size) paddedToLongest(chats []chatdata.Sequence) (n int) {
	for batch := range slices.Chunk(chats, s.batch) {
		longest := slices.MaxFunc(batch, func(a, b chatdata.Sequence) int { return len(a.IDs) - len(b.IDs) })
		n += len(batch) * (len(longest.IDs) - 1)
	}
	return n
}

// pass returns the time of a pass over the sequences, which is the median time of a step for each batch of rows. Steps
// train adapters.
func (s size) pass(sequences []chatdata.Sequence, steps int, engine newEngine) (r result, err error) {
	model, err := s.adapted()
	if err != nil {
		return r, err
	}

	loader, err := chatdata.NewLoader(sequences, data.LoaderConfig{Batch: s.batch, Seq: s.config.Seq, Seed: 1})
	if err != nil {
		return r, err
	}

	const rate = 1e-4
	adamw, err := optim.NewAdamW(optim.WithLR(rate))
	if err != nil {
		return r, err
	}

	trainer, err := llm.NewTrainer(model, loader, adamw, llm.TrainConfig{Steps: warmUp + steps, Batch: s.batch, Clip: 1,
		Schedule: func(int) float64 { return rate }, Engine: engine})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, trainer.Close()) }()

	var times []time.Duration
	var last time.Time
	trainer.On(func(e llm.Event) error {
		if e.Kind != llm.StepEnd {
			return nil
		}
		if e.Step > warmUp {
			times = append(times, time.Since(last))
		}
		last, r.Params, r.Loss = time.Now(), e.Params, e.Loss
		return nil
	})
	if err := trainer.Run(context.Background()); err != nil {
		return r, err
	}

	step, err := median(times)
	if err != nil {
		return r, err
	}

	r.Peer = project
	r.Tokens = loader.Rows() * s.config.Seq
	r.Us = rounded(step.Seconds()*1e6*float64(loader.Rows())/float64(s.batch), 0)
	return r, nil
}

// adapted returns a model of random weights with adapters of rank tunedRank on all linear layers.
func (s size) adapted() (*llm.Model, error) {
	base, err := llm.NewModel(s.config, tensor.Float32, 1)
	if err != nil {
		return nil, err
	}

	targets, err := s.config.MatchLayers(llm.AllLinear)
	if err != nil {
		return nil, err
	}
	return llm.Adapt(base, llm.LoRA{Rank: tunedRank, Alpha: 2 * tunedRank, Targets: targets}, 1)
}
