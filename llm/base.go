package llm

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"iter"

	"github.com/kasmina-go/kasmina/internal/parallel"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
)

// omitsBase reports whether checkpoints of the run contain only the parameters that learn.
func (t *Trainer) omitsBase() bool {
	if !t.Config.OmitBase && t.Model.Base == nil || len(t.Config.Tuned) == 0 && !t.Config.adapted {
		return false
	}
	for _, p := range t.Model.Params {
		if !t.Config.Learns(p.Name) {
			return true
		}
	}
	return false
}

// omitsNothing is the result of omitted for files with all parameters.
func omitsNothing(string) bool { return false }

// omitted returns a function that reports which parameters are missing from a checkpoint.
func (t *Trainer) omitted(f *modelfile.File) func(param string) bool {
	if f.Metadata[modelfile.BaseKey] == "" {
		return omitsNothing
	}
	return func(param string) bool { return !t.Config.Learns(param) }
}

// fileShape returns the tensors that a checkpoint of the run must contain.
func (t *Trainer) fileShape(f *modelfile.File, l layout) modelfile.Shape {
	s, omits := fileShapeOf(l, t.Model.Dtype()), t.omitted(f)
	all := s.Params
	var some iter.Seq2[string, []int] = func(yield func(string, []int) bool) {
		for name, shape := range all {
			if !omits(name) && !yield(name, shape) {
				return
			}
		}
	}
	s.Params = some
	return s
}

// checkBase returns an error if a checkpoint without frozen parameters belongs to a model other than the
// trainer's.
func (t *Trainer) checkBase(f *modelfile.File) error {
	want := f.Metadata[modelfile.BaseKey]
	if want == "" {
		return nil
	}
	if have := t.baseDigest(); have != want {
		return f.Errorf("%w: the run tuned a model with other weights (its digest is %.12s, and this model's is "+
			"%.12s), or it tuned other parameters: resume with the model of the run", ErrArchitecture, want, have)
	}
	return nil
}

// baseDigest returns a digest of the parameters that do not learn. They never change, so it is computed once.
func (t *Trainer) baseDigest() string {
	if t.base != "" {
		return t.base
	}

	var frozen []Param
	for _, p := range t.Model.Params {
		if !t.Config.Learns(p.Name) {
			frozen = append(frozen, p)
		}
	}

	sums := make([][]byte, len(frozen))
	parallel.Each(len(frozen), func(i int) { sums[i] = t.Model.digestOf(frozen[i]) })
	h := sha256.New()
	for _, sum := range sums {
		h.Write(sum)
	}
	t.base = hex.EncodeToString(h.Sum(nil))
	return t.base
}

// digestOf returns a digest of the name, the type, the shape and the numbers of a parameter.
func (m *Model) digestOf(p Param) []byte {
	h := sha256.New()
	if m.Base.Has(p.Name) {
		m.hashMatrix(h, p.Name)
		return h.Sum(nil)
	}

	fmt.Fprintln(h, p.Name, p.Value.Dtype(), p.Value.Shape())
	switch x := p.Value.Data().(type) {
	case []float32:
		hashNumbers(h, x)
	case []float64:
		hashNumbers(h, x)
	}
	return h.Sum(nil)
}

// hashNumbers hashes numbers in little-endian order.
func hashNumbers[T float32 | float64](h hash.Hash, x []T) {
	const chunk = 1 << 14
	buffer := make([]byte, 0, 8*chunk)
	for len(x) > 0 {
		n := min(chunk, len(x))
		buffer, _ = binary.Append(buffer[:0], binary.LittleEndian, x[:n]) // numbers have a fixed size
		h.Write(buffer)
		x = x[n:]
	}
}
