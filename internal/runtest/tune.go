package runtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
)

// Tuning describes which parameters of a plain model learn. If it is zero, all do.
type Tuning struct {
	Adapter  llm.LoRA `json:"adapter,omitzero"`
	Seeds    string   `json:"seeds,omitempty"` // kind of the chunk seeds that llm.TuneSeeds adds
	Rank     int      `json:"rank,omitempty"`  // of these seeds
	Tuned    []string `json:"tuned,omitempty"` // patterns; unless there are seeds
	OmitBase bool     `json:"omit_base,omitempty"`
	Base     string   `json:"base,omitempty"` // type of the matrices that do not learn, for llm.LoadFrozen
}

// isZero reports whether all parameters learn.
func (t Tuning) isZero() bool { return t.Adapter.IsZero() && t.Seeds == "" && len(t.Tuned) == 0 }

// omits reports whether checkpoints lack the parameters that do not learn.
func (t Tuning) omits() bool { return t.OmitBase || t.Base != "" }

// patterns returns the value of TrainConfig.Tuned.
func (t Tuning) patterns() []string {
	if t.Seeds != "" {
		return llm.SeedPatterns()
	}
	return t.Tuned
}

// paramReader reads the parameters of a float32 model.
type paramReader struct{ *llm.Model }

// Read implements llm.WeightReader.
func (r paramReader) Read(_ context.Context, name string, put func([]byte, string) error) error {
	return put(memory(r.Param(name).Data()), "float32")
}

// tune prepares a plain model for tuning.
func (c Case) tune(m *llm.Model) (*llm.Model, error) {
	t := c.Tuning
	if t.Base != "" {
		var typ cpuops.WeightType
		err := typ.UnmarshalText([]byte(t.Base))
		if err == nil {
			m, err = llm.LoadFrozen(context.Background(), typ, m.Config, paramReader{m}, t.Tuned...)
		}
		if err != nil {
			return nil, err
		}
	}

	if t.Seeds != "" {
		kind, ok := blueprints.ByName(t.Seeds)
		if !ok {
			return nil, fmt.Errorf("runtest: no kind %q", t.Seeds)
		}
		return llm.TuneSeeds(m, kind, t.Rank)
	}

	if t.Adapter.IsZero() {
		return m, nil
	}
	return llm.Adapt(m, t.Adapter, c.Seed)
}

// texts holds the data of a run.
type texts struct {
	loader  llm.Loader
	heldOut *data.Evaluation
	pairs   []llm.ReferencedPairs // pairs whose references the run computes
}

// newTexts returns the data of the case.
func (c Case) newTexts(in *injector) (t texts, err error) {
	config := data.LoaderConfig{Batch: c.Train.Batch, Seq: c.Model.Seq, Seed: c.Seed + 3}
	if c.Text.Pairs != nil {
		size := c.Model.Seq/2 + 1 // a row has room for two answers of this size
		learn, errLearn := chatdata.NewPairs(c.conversations(c.Text.Tokens, size), c.Train.Batch, c.Model.Seq)
		judge, errJudge := chatdata.NewPairs(c.conversations(3*c.Model.Seq, size), 1, c.Model.Seq)
		if err := errors.Join(errLearn, errJudge); err != nil {
			return t, err
		}
		t.loader, t.pairs = learn.Loader(config.Seed), []llm.ReferencedPairs{learn, judge}
		t.heldOut, err = judge.Evaluation()
		return t, err
	}

	if t.heldOut, err = c.evaluation(1); err != nil {
		return t, err
	}

	if c.Text.Packed {
		t.loader, err = chatdata.NewLoader(c.conversations(c.Text.Tokens, c.Model.Seq+1), config)
	} else {
		t.loader, err = data.NewLoader(c.tokens(in), config)
	}
	return t, err
}

// conversations divides a number of tokens into an even number of sequences of at most the given size. The
// model learns the end of each sequence.
func (c Case) conversations(tokens, size int) (all []chatdata.Sequence) {
	r := rand.New(rand.NewPCG(c.Seed, 4))
	ids := c.ids()
	for at := 0; len(all)%2 != 0 || at < tokens; {
		n := 2 + r.IntN(size-1)
		s := chatdata.Sequence{Line: len(all) + 1, Learn: make([]bool, n)}
		for i := range n {
			s.IDs = append(s.IDs, ids[(at+i)%len(ids)])
		}
		for i := 1 + r.IntN(n-1); i < n; i++ {
			s.Learn[i] = true
		}
		all, at = append(all, s), at+n
	}
	return all
}
