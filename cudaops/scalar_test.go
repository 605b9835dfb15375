package cudaops

import (
	"errors"
	"hash"
	"strings"
	"testing"

	"github.com/chewxy/hm"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
)

// passOn is the identity of scalars, without a kernel, whose result is a tensor of no dimensions where others have a number.
type passOn struct{}

func (passOn) Arity() int    { return 1 }
func (passOn) Type() hm.Type { return hm.NewFnType(tensor.Float32, tensor.Float32) }
func (passOn) InferShape(...gorgonia.DimSizer) (tensor.Shape, error) {
	return tensor.ScalarShape(), nil
}
func (passOn) ReturnsPtr() bool      { return false }
func (passOn) CallsExtern() bool     { return false }
func (passOn) OverwritesInput() int  { return -1 }
func (passOn) WriteHash(h hash.Hash) { h.Write([]byte("passOn")) }
func (passOn) Hashcode() uint32      { return 0x9a550 }
func (passOn) String() string        { return "passOn" }
func (passOn) DiffWRT(int) []bool    { return []bool{true} }
func (passOn) SymDiff(_ gorgonia.Nodes, _, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	n, err := gorgonia.ApplyOp(passOn{}, grad)
	return gorgonia.Nodes{n}, err
}

func (passOn) Do(in ...gorgonia.Value) (gorgonia.Value, error) {
	x, ok := in[0].Data().(float32)
	if !ok {
		return nil, errors.New("want a scalar")
	}
	return tensor.New(tensor.FromScalar(x)), nil
}

// TestScaledScalar wants the loss scale to leave and come back where an op on the host answers with such a tensor.
func TestScaledScalar(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	var grads [2]gorgonia.Value
	for i, opts := range [][]MachineOption{{fakeOption}, {fakeOption, scaledGradients}} {
		g := gorgonia.NewGraph()
		w := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(2, 2), tensor.WithBacking([]float32{1, 2, 3, 4})), gorgonia.WithName("w"))
		s := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Square(w))))
		cost := gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.ApplyOp(passOn{}, s))))
		if _, err := gorgonia.Grad(cost, w); err != nil {
			t.Fatal(err)
		}
		m, err := NewMachine(device, g, append(opts, WithParams(w))...)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		if grads[i], err = m.Value(w.Deriv()); err != nil {
			t.Fatal(err)
		}
	}
	if d := distance(t, grads[1], grads[0]); !(d < 1e-6) {
		t.Errorf("the gradient is %v scaled and %v plain", grads[1], grads[0])
	}
}

// TestFoldedGradient wants no value of the output layer's gradient where the table's has been added into its memory.
func TestFoldedGradient(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	_, b := newBatch(t, llm.ForTraining, 2)
	var head *gorgonia.Node
	for _, n := range b.G.AllNodes() {
		if p, ok := n.Op().(*opbase.PartOp); ok && p.Offset > 0 && isOp[*op.LinearCrossEntropyGradOp](opbase.Children(n)[0]) {
			head = n
		}
	}
	if head == nil {
		t.Fatal("the graph has no gradient of the output layer")
	}
	m, err := NewMachine(device, b.G, fakeOption, WithParams(b.Params...), WithOutputs(b.Loss))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	if v, err := m.Value(head); err == nil || !strings.Contains(err.Error(), "WithOutputs") {
		t.Errorf("got %v, %v, want an error that names WithOutputs", v != nil, err)
	}
}
