package llm

import (
	"context"
	"errors"

	"github.com/kasmina-go/kasmina/llm/data"
)

// errNoEngine is wrapped by the error of a trainer that has lost its engine.
var errNoEngine = errors.New("there is no engine for the model: resume from the last checkpoint")

// noEngine is the engine of a trainer for which none could be made any more.
type noEngine struct{}

func (noEngine) Name() string                          { return "none" }
func (noEngine) Gradients(data.Batch) (float64, error) { return 0, errNoEngine }
func (noEngine) Update() (float64, error)              { return 0, errNoEngine }
func (noEngine) Drop() error                           { return nil }
func (noEngine) Loss(data.Batch) (float64, error)      { return 0, errNoEngine }
func (noEngine) FirstNonFinite() (_, _ string, _ bool) { return "", "", false }
func (noEngine) Pull(...string) error                  { return nil }
func (noEngine) Push(...string) error                  { return errNoEngine }
func (noEngine) Forget(string, int, int) error         { return errNoEngine }
func (noEngine) Close() error                          { return nil }
func (noEngine) Decoder() (func(context.Context, []int) (any, error), error) {
	return nil, errNoEngine
}
