package runtest

import (
	"errors"
	"path/filepath"
	"strings"

	"github.com/kasmina-go/kasmina/llm"
)

// Parts describes the parts that a run uses in addition to the trainer's own.
type Parts struct {
	EMA        float64     `json:"ema,omitempty"`      // decay of an average of the weights; 0 for none
	Patience   int         `json:"patience,omitempty"` // of early stopping; 0 for none
	Best       bool        `json:"best,omitempty"`     // keep the best checkpoint
	Retention  *Retention  `json:"retention,omitempty"`
	RankGrowth *RankGrowth `json:"rank_growth,omitempty"`
}

// Retention corresponds to llm.RetentionConfig. Its text is the validation text.
type Retention struct {
	Budget float64 `json:"budget"`
	Every  int     `json:"every,omitempty"`
}

// RankGrowth corresponds to llm.RankGrowthConfig.
type RankGrowth struct {
	Old        bool `json:"old,omitempty"` // the validation text is the old text
	Parameters int  `json:"parameters,omitempty"`
	Times      int  `json:"times"`
	Batches    int  `json:"batches"`
}

// evaluates reports whether the parts depend on evaluations.
func (p Parts) evaluates() bool { return p.Patience > 0 || p.Best }

// evaluateEvery is the number of steps between the evaluations that parts depend on.
const evaluateEvery = 2

// unjudged reports whether parts have not received the evaluation that was due after a step.
func (r *rig) unjudged(step, last int) bool {
	return r.Parts.evaluates() && step > 0 && (step%evaluateEvery == 0 || step == last) && r.judgedAt != step
}

// use adds the parts of the case to the trainer.
func (r *rig) use() error {
	parts := []llm.Part{hooks{r.in}}
	var err error
	add := func(p llm.Part, failed error) {
		parts, err = append(parts, p), errors.Join(err, failed)
	}

	if r.texts.pairs != nil {
		add(llm.NewReferences(r.texts.pairs...), nil)
	}

	if g := r.Parts.RankGrowth; g != nil {
		c := llm.RankGrowthConfig{Parameters: g.Parameters, Times: g.Times, Batches: g.Batches}
		if g.Old {
			if c.Old, err = r.evaluation(r.Train.Batch); err != nil {
				return err
			}
		}
		add(llm.NewRankGrowth(c))
	}

	if p := r.Parts.Retention; p != nil {
		add(llm.NewRetention(llm.RetentionConfig{Text: r.texts.heldOut, Budget: p.Budget, Every: p.Every}))
	}

	if d := r.Parts.EMA; d > 0 {
		r.ema, err = llm.NewEMA(d)
		add(r.ema, nil)
	}

	// The best checkpoint contains the evaluations that early stopping has counted.
	if n := r.Parts.Patience; n > 0 {
		add(llm.NewEarlyStopping(r.tr, n, 0))
	}

	if r.Parts.Best {
		r.best = filepath.Join(r.shared(), "best", "run")
		add(llm.NewBestCheckpoint(r.tr, r.best))
	}

	if err != nil {
		return err
	}
	return r.tr.Use(parts...)
}

// hooks is a part without state whose hooks can fail.
type hooks struct{ in *injector }

func (hooks) Name() string { return "hooks" }

func (h hooks) StartRun(llm.Turn) error    { return h.in.call("part StartRun") }
func (h hooks) PrepareStep(llm.Turn) error { return h.in.call("part PrepareStep") }
func (h hooks) FinishStep(llm.Turn) error  { return h.in.call("part FinishStep") }

func (h hooks) Save(*llm.CheckpointWriter) error { return h.in.call("part Save") }

func (h hooks) Load(*llm.CheckpointReader) (install func(), err error) {
	return nil, h.in.call("part Load")
}

// stoppedEarly reports whether a run has ended only because the loss no longer improved.
func (r *rig) stoppedEarly(err error) bool {
	return r.Parts.Patience > 0 && errors.Is(err, llm.ErrStopped) && strings.Contains(err.Error(), "has not improved") &&
		!strings.Contains(err.Error(), "\n") // errors.Join would add other errors
}

// measuresFirst reports whether the parts of a case must measure the model before a trainer can save.
func (c Case) measuresFirst() bool { return c.Text.Pairs != nil || c.Parts.Retention != nil }

// unmeasured reports whether a trainer cannot save, because its first run has not measured the model yet.
func unmeasured(err error) bool {
	return strings.Contains(err.Error(), "not been measured yet") || strings.Contains(err.Error(), "not been computed yet")
}
