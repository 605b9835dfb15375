package cudaops

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"unsafe"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/state"
)

// encode writes the n elements of a value to raw, stored as e.
func encode(raw []byte, e elem, v gorgonia.Value, n int) error {
	flat, err := opbase.Flat(v)
	if err != nil {
		return err
	}
	switch x := flat.(type) {
	case []float32:
		if len(x) == n && e != int64s {
			encodeFloats(raw, e, x)
			return nil
		}
	case []int:
		if len(x) == n && e == int64s {
			dst := gpu.View[int64](raw)[:n]
			if strconv.IntSize == 64 { // the GPU may be waiting
				copy(dst, unsafe.Slice((*int64)(unsafe.Pointer(unsafe.SliceData(x))), n))
				return nil
			}
			for i, v := range x {
				dst[i] = int64(v)
			}
			return nil
		}
	}
	return fmt.Errorf("the value is a %v of shape %v, want %d elements to store as %v", v.Dtype(), v.Shape(), n, e)
}

func encodeFloats(raw []byte, e elem, x []float32) {
	switch e {
	case float32s:
		copy(gpu.View[float32](raw), x)
	case float16s:
		dst := gpu.View[uint16](raw)
		for i, v := range x {
			dst[i] = uint16(state.NewFloat16(float64(v)))
		}
	case bfloat16s:
		dst := gpu.View[uint16](raw)
		for i, v := range x {
			dst[i] = bfloat16(v)
		}
	case float8s:
		for i, v := range x {
			raw[i] = gpu.E4M3(v)
		}
	}
}

// bfloat16 rounds to nearest, ties to even, and keeps NaN.
func bfloat16(v float32) uint16 {
	b := math.Float32bits(v)
	if v != v {
		return uint16(b>>16) | 0x40
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// decode returns elements stored as e as a value of type dt.
func decode(raw []byte, e elem, dt tensor.Dtype, shape tensor.Shape) (gorgonia.Value, error) {
	n := size(shape)
	switch {
	case dt == tensor.Float32 && e != int64s:
		x := make([]float32, n)
		decodeFloats(x, e, raw)
		if len(shape) == 0 {
			return gorgonia.NewF32(x[0]), nil
		}
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x)), nil
	case dt == tensor.Int && e == int64s:
		x := make([]int, n)
		for i, v := range gpu.View[int64](raw)[:n] {
			x[i] = int(v)
		}
		if len(shape) == 0 {
			return gorgonia.NewI(x[0]), nil
		}
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x)), nil
	}
	return nil, fmt.Errorf("cannot make a %v of what is stored as %v", dt, e)
}

func decodeFloats(x []float32, e elem, raw []byte) {
	switch e {
	case float32s:
		copy(x, gpu.View[float32](raw))
	case float16s:
		for i, b := range gpu.View[uint16](raw)[:len(x)] {
			x[i] = float32(state.Float16(b).Float64())
		}
	case bfloat16s:
		for i, b := range gpu.View[uint16](raw)[:len(x)] {
			x[i] = math.Float32frombits(uint32(b) << 16)
		}
	case float8s:
		for i, b := range raw[:len(x)] {
			x[i] = gpu.FromE4M3(b)
		}
	}
}

// onHost computes a node with its op's own Do, between two copies. It sees gradients without the loss scale.
func (c *compiler) onHost(n *gorgonia.Node, in []*array) (*array, error) {
	return c.hosted(n, in, fmt.Sprintf("there is no kernel for %T", n.Op()))
}

// onHostByRule computes a node on the host although there is a kernel.
func (c *compiler) onHostByRule(n *gorgonia.Node, in []*array) (*array, error) {
	return c.hosted(n, in, "a rule wants it there")
}

// hosted is onHost for another reason.
func (c *compiler) hosted(n *gorgonia.Node, in []*array, why string) (*array, error) {
	if c.m.config.strict {
		return nil, fmt.Errorf("%s, and WithStrict forbids computing it on the host", why)
	}
	out := c.newArray(elemOf(n.Dtype()), n.Shape()...)
	nodes := opbase.Children(n)
	m := c.m
	m.warn(fmt.Sprintf("%v: %s: it is computed on the host, which waits for the device and copies %d values there and back",
		n.Op(), why, len(nodes)))
	c.do(n, func() error {
		values := make([]gorgonia.Value, len(in))
		for i, a := range in {
			v, err := m.hostOperand(n, i, a)
			if err != nil {
				return err
			}
			values[i] = v
		}
		v, err := n.Op().Do(values...)
		if err != nil {
			return err
		}
		if scale := m.carriedBy(n); scale != 1 {
			if v, err = divided(v, 1/scale); err != nil {
				return err
			}
		}
		raw := make([]byte, out.len()*out.elem.size())
		if err := encode(raw, out.elem, v, out.len()); err != nil {
			return err
		}
		return m.device.ctx.CopyToDevice(out.ptr(), raw, m.stream)
	}, append(slices.Clone(in), out)...)
	c.tasks[len(c.tasks)-1].host = true
	return out, nil
}

// hostOperand is what the host is given of input i of a node, which is a: without the loss scale.
func (m *Machine) hostOperand(n *gorgonia.Node, i int, a *array) (gorgonia.Value, error) {
	v, err := m.fetch(a, opbase.Children(n)[i].Dtype())
	if err == nil && m.program.scaling.carries(n, i) {
		v, err = divided(v, m.carried)
	}
	return v, err
}

// carriedBy is the scale that the value of a node carries, 1 where it carries none.
func (m *Machine) carriedBy(n *gorgonia.Node) float32 {
	if s := m.program.scaling; s != nil && s.carried[n] {
		return m.carried
	}
	return 1
}

// elemOf is how values of a Gorgonia type are stored.
func elemOf(dt tensor.Dtype) elem {
	if dt == tensor.Int {
		return int64s
	}
	return float32s
}
