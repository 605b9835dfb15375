package engine

import (
	"context"
	"errors"

	"github.com/kasmina-go/kasmina/llm/data"
)

// ErrNone is wrapped by the error of a trainer that has lost its engine.
var ErrNone = errors.New("there is no engine for the model: resume from the last checkpoint")

// None is the engine of a trainer for which none could be made any more.
type None struct{}

func (None) Name() string                          { return "none" }
func (None) Gradients(data.Batch) (float64, error) { return 0, ErrNone }
func (None) Update() (float64, error)              { return 0, ErrNone }
func (None) Drop() error                           { return nil }
func (None) Loss(data.Batch) (float64, error)      { return 0, ErrNone }
func (None) FirstNonFinite() (_, _ string, _ bool) { return "", "", false }
func (None) Pull(...string) error                  { return nil }
func (None) Push(...string) error                  { return ErrNone }
func (None) Forget(string, int, int) error         { return ErrNone }
func (None) Close() error                          { return nil }
func (None) Decoder() (func(context.Context, []int) (any, error), error) {
	return nil, ErrNone
}
