package hf

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// LoadOption configures how a model is loaded.
type LoadOption func(*loading)

type loading struct {
	change   func(*llm.Config)
	progress func(done, total int64)
	lattice  []state.Option
}

// WithConfig makes Load call change to alter the configuration before it creates the model. The function
// may change only settings that don't affect the shapes of weights: Seq, Documents, and Kasmina layers
// for growth, which start as the identity.
func WithConfig(change func(*llm.Config), lattice ...state.Option) LoadOption {
	return func(l *loading) { l.change, l.lattice = change, lattice }
}

// WithProgress makes Load call f whenever bytes of the weights have been read. Several goroutines may
// call f concurrently.
func WithProgress(f func(done, total int64)) LoadOption {
	return func(l *loading) { l.progress = f }
}

// Load opens a folder and loads its model.
func Load(ctx context.Context, dir string, opts ...LoadOption) (*llm.Model, error) {
	f, err := Open(dir)
	if err != nil {
		return nil, err
	}
	m, err := f.Load(ctx, opts...)
	return m, errors.Join(err, f.Close())
}

// Load returns the model with float32 parameters. It reads the weights in parts directly into the
// model's memory, and so needs little memory beyond the model's own. If a weight is NaN or infinite,
// Load returns an error that wraps llm.ErrDiverged.
func (f *Folder) Load(ctx context.Context, opts ...LoadOption) (*llm.Model, error) {
	var l loading
	for _, opt := range opts {
		opt(&l)
	}

	c, err := l.config(f.Config)
	if err != nil {
		return nil, fmt.Errorf("hf: %s: %w", f.Dir, err)
	}

	var done atomic.Int64
	total := f.weights.bytes(f.Config)
	m, err := llm.NewModelFrom(c, tensor.Float32, func(p llm.Param) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if _, ok := f.weights.places[p.Name]; !ok {
			return nil // a parameter of a Kasmina layer: Open has checked the rest
		}
		return f.weights.read(ctx, p.Name, p.Value.Float32s(), func(bytes int) {
			if n := done.Add(int64(bytes)); l.progress != nil {
				l.progress(n, total)
			}
		})
	}, l.lattice...)
	if err != nil {
		return nil, fmt.Errorf("hf: %s: %w", f.Dir, err)
	}

	return m, nil
}

// config returns the caller's variant of c, whose weights must have the same shapes.
func (l *loading) config(c llm.Config) (llm.Config, error) {
	if l.change == nil {
		return c, nil
	}

	changed := c
	l.change(&changed)
	if err := changed.Check(); err != nil {
		return c, err
	}

	want := map[string][]int{}
	for name, shape := range changed.Parameters() {
		want[name] = shape
	}

	for name, shape := range c.Parameters() {
		if !slices.Equal(want[name], shape) {
			return c,
				fmt.Errorf("WithConfig: tensor %s has the shape %v in the weights, and %v in the "+
					"changed configuration", name, shape, want[name])
		}
	}

	return changed, nil
}

// bytes returns how many bytes the parameters of a configuration take up in the files.
func (w *weights) bytes(c llm.Config) (total int64) {
	for name := range c.Parameters() {
		if p, ok := w.places[name]; ok {
			total += int64(p.elements()) * int64(w.dtypeOf(name).Size())
		}
	}
	return total
}

// Read passes the elements of a parameter to put, in order and in parts, in the file's format, which
// is little-endian numbers of type float32, float16 or bfloat16. This lets a device hold the
// parameter without a copy on the host.
//
// Read may be called from several goroutines. If a number is NaN or infinite, it returns an error that
// wraps llm.ErrDiverged.
func (f *Folder) Read(ctx context.Context, name string,
	put func(part []byte, dtype string) error) error {
	err := f.weights.pieces(ctx, name, func(part []byte, t safetensors.DType) error {
		return put(part, dtypeNames[t])
	})
	if err != nil {
		return fmt.Errorf("hf: %s: %w", f.Dir, err)
	}

	return nil
}

// pieces passes the elements of a parameter to visit, part by part, after checking that they are
// finite.
func (w *weights) pieces(ctx context.Context, name string,
	visit func(part []byte, dtype safetensors.DType) error) error {
	p, ok := w.places[name]
	if !ok {
		return fmt.Errorf("there is no tensor %.100q", name)
	}

	f := w.in[p.name]
	dtype, _, err := f.Info(p.name)
	if err != nil {
		return err
	}

	checked := finite(p.name, dtype, 0, visit)
	if p.whole() {
		return f.Chunks(ctx, p.name, checked)
	}

	all := make([]byte, 0, f.Bytes(p.name))
	err = f.Chunks(ctx, p.name, func(part []byte) error {
		all = append(all, part...)
		return nil
	})
	if err != nil {
		return err
	}

	return checked(p.extract(all, dtype.Size()))
}

// finite returns a function that checks that a part of a tensor is finite and passes it to visit. The
// first part starts at element at.
func finite(name string, dtype safetensors.DType, at int,
	visit func(part []byte, dtype safetensors.DType) error) func([]byte) error {
	return func(part []byte) error {
		if suspect(part, dtype) {
			x := make([]float32, len(part)/dtype.Size())
			widen(x, part, dtype)
			bad := slices.IndexFunc(x, notFinite)
			return fmt.Errorf("tensor %s: %w: element %d is %v", name, llm.ErrDiverged, at+bad,
				x[bad])
		}
		at += len(part) / dtype.Size()
		return visit(part, dtype)
	}
}

// partBytes is the number of bytes of a tensor that one goroutine reads, so that large tensors are
// divided among goroutines.
const partBytes = 32 << 20

// read converts a tensor's elements to float32.
func (w *weights) read(ctx context.Context, name string, to []float32, done func(bytes int)) error {
	into := func(to []float32) func([]byte, safetensors.DType) error {
		return func(part []byte, dtype safetensors.DType) error {
			if n := len(part) / dtype.Size(); n > len(to) {
				return fmt.Errorf("tensor %s: it has %d elements more than wanted", name, n-len(to))
			}
			to = to[widen(to, part, dtype):]
			done(len(part))
			return nil
		}
	}

	p := w.places[name]
	f := w.in[p.name]
	dtype, _, err := f.Info(p.name)
	if err != nil {
		return err
	}

	if n := p.elements(); n != len(to) {
		return fmt.Errorf("tensor %s: it has %d elements, want %d", p.name, n, len(to))
	}

	size := int64(len(to) * dtype.Size())
	if !p.whole() || f.HasDigest() || size <= partBytes {
		return w.pieces(ctx, name, into(to))
	}

	var work sync.WaitGroup
	errs := make([]error, (size+partBytes-1)/partBytes)
	for i := range errs {
		from := int64(i) * partBytes
		work.Go(func() {
			at := int(from) / dtype.Size()
			errs[i] = f.Part(ctx, p.name, from, min(from+partBytes, size),
				finite(p.name, dtype, at, into(to[at:])))
		})
	}

	work.Wait()
	return errors.Join(errs...)
}

func notFinite(x float32) bool { return math.Float32bits(x)&0x7f800000 == 0x7f800000 }

// suspect reports whether any element is NaN or infinite. The exponent of such an element is all ones, so
// adding one to it carries into the sign bit.
func suspect(part []byte, dtype safetensors.DType) bool {
	exponents, ones, signs := uint64(0x7f8000007f800000), uint64(0x0080000000800000),
		uint64(0x8000000080000000)
	switch dtype {
	case safetensors.F16:
		exponents, ones, signs = 0x7c007c007c007c00, 0x0400040004000400, 0x8000800080008000
	case safetensors.BF16:
		exponents, ones, signs = 0x7f807f807f807f80, 0x0080008000800080, 0x8000800080008000
	}

	bad := uint64(0)
	for ; len(part) >= 8; part = part[8:] {
		bad |= binary.LittleEndian.Uint64(part)&exponents + ones
	}

	if len(part) > 0 {
		var rest [8]byte
		copy(rest[:], part)
		bad |= binary.LittleEndian.Uint64(rest[:])&exponents + ones
	}

	return bad&signs != 0
}

// widen converts elements of from until either slice is exhausted, and returns the number of converted
// elements.
func widen(to []float32, from []byte, dtype safetensors.DType) (n int) {
	if dtype == safetensors.F32 {
		n = len(from) / 4
		for i := range to[:n] {
			to[i] = math.Float32frombits(binary.LittleEndian.Uint32(from[4*i:]))
		}
		return n
	}

	n = len(from) / 2
	to = to[:n]
	if dtype == safetensors.F16 {
		for i := range to {
			to[i] = widenHalf(binary.LittleEndian.Uint16(from[2*i:]))
		}
		return n
	}

	for ; len(from) >= 8 && len(to) >= 4; from, to = from[8:], to[4:] {
		v := binary.LittleEndian.Uint64(from)
		to[0] = math.Float32frombits(uint32(v) << 16)
		to[1] = math.Float32frombits(uint32(v) & 0xffff0000)
		to[2] = math.Float32frombits(uint32(v>>32) << 16)
		to[3] = math.Float32frombits(uint32(v>>32) & 0xffff0000)
	}

	for i := range to {
		to[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(from[2*i:])) << 16)
	}

	return n
}

// widenHalf is [half.Float16.Float64] with a fast path for normal numbers, which avoids computing a
// power.
func widenHalf(h uint16) float32 {
	if exp := h >> 10 & 0x1f; exp != 0 && exp != 0x1f {
		return math.Float32frombits(uint32(h&0x8000)<<16 | (uint32(h&0x7fff)<<13 + 112<<23))
	}
	return float32(half.Float16(h).Float64())
}

// narrow appends elements in the given type. It is the inverse of widen.
func narrow(to []byte, from []float32, dtype safetensors.DType) []byte {
	for _, x := range from {
		switch dtype {
		case safetensors.F32:
			to = binary.LittleEndian.AppendUint32(to, math.Float32bits(x))
		case safetensors.BF16:
			to = binary.LittleEndian.AppendUint16(to, uint16(half.NewBFloat16(x)))
		default:
			to = binary.LittleEndian.AppendUint16(to, uint16(half.NewFloat16(float64(x))))
		}
	}

	return to
}

// bytesOf returns a tensor's elements as the file stores them.
func bytesOf(t safetensors.Tensor) []byte {
	switch x := t.Data.(type) {
	case []float32:
		return narrow(nil, x, safetensors.F32)
	case []uint16:
		b := make([]byte, 0, 2*len(x))
		for _, v := range x {
			b = binary.LittleEndian.AppendUint16(b, v)
		}
		return b
	}

	return nil
}
