// Package modeltest passes the weights of a model in memory to functions that usually read them from
// files.
package modeltest

import (
	"context"
	"fmt"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
)

// Weights reads the parameters of a float32 model. It implements [llm.WeightReader] and gpu.Weights.
type Weights struct{ Model *llm.Model }

// Read passes the named parameter to put.
func (w Weights) Read(_ context.Context, name string, put func(part []byte, dtype string) error) error {
	p := w.Model.Param(name)
	if p == nil {
		return fmt.Errorf("modeltest: the model has no parameter %q", name)
	}
	return put(safetensors.Memory(p.Float32s()), "float32")
}
