package cudaops

import (
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/optim"
)

// TestArguments gives every function what it must refuse, by an error that says what it is.
func TestArguments(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	build := func(name string) (*gorgonia.ExprGraph, *gorgonia.Node, *gorgonia.Node) {
		g := gorgonia.NewGraph()
		w := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(2, 2), tensor.WithBacking([]float32{1, 2, 3, 4})), gorgonia.WithName(name))
		return g, w, gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Square(w))))
	}
	g, w, _ := build("w")
	_, foreign, foreignSum := build("w")
	owner, err := NewMachine(device, g, fakeOption, WithParams(w), WithLogger(nil))
	if err != nil {
		t.Fatal(err)
	}
	if owner.config.logger != slog.Default() {
		t.Error("WithLogger(nil) does not stand for the default")
	}
	other, _, _ := build("v")
	for want, err := range map[string]error{
		"WithOutputs: node":                   make1(device, g, fakeOption, WithOutputs(foreignSum)),
		"WithParams: input w":                 make1(device, g, fakeOption, WithParams(foreign)),
		"an option is nil":                    make1(device, g, fakeOption, nil),
		"WithParamsOf: no input has name":     make1(device, other, fakeOption, WithParamsOf(owner)),
		"a node is nil":                       owner.Upload(nil),
		"no parameter has a gradient":         owner.SetOptimizer(wrapped{new(optim.AdamW)}, 1),
		"the optimiser is a nil *optim.AdamW": owner.SetOptimizer((*optim.AdamW)(nil), 1),
		"cudaops.Open: an option is nil":      open1(nil),
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
	same, _, _ := build("w")
	borrower, err := NewMachine(device, same, fakeOption, WithParamsOf(owner))
	if err != nil {
		t.Fatal(err)
	}
	memory, err := device.ctx.Alloc(256)
	if err != nil {
		t.Fatal(err)
	}
	if err := owner.Bind(w, uintptr(memory), 16); err == nil || !strings.Contains(err.Error(), "another machine") {
		t.Errorf("binding a parameter that another machine uses: error %v", err)
	}
	if err := borrower.Close(); err != nil {
		t.Fatal(err)
	}
	if err := owner.Bind(w, uintptr(memory), 16); err != nil {
		t.Errorf("binding a parameter that another machine has used: %v", err)
	}
	if borrower, err = NewMachine(device, same, fakeOption, WithParamsOf(owner)); err != nil {
		t.Fatal(err)
	}
	if err := owner.Close(); err != nil {
		t.Fatal(err)
	}
	if err := borrower.RunAll(); err == nil || !strings.Contains(err.Error(), "WithParamsOf") {
		t.Errorf("the parameters' owner is closed: error %v", err)
	}
	if err := errors.Join(borrower.Close(), device.ctx.Free(memory)); err != nil {
		t.Fatal(err)
	}
}

// TestUploadRefused wants an upload of which a value cannot be sent to send none of the others.
func TestUploadRefused(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	l := newLifetime(t, newAdamW)
	if err := l.open(device, fakeOption); err != nil {
		t.Fatal(err)
	}
	defer l.machine.Close()
	p := l.batch.Params[0]
	before, err := l.machine.Value(p)
	if err != nil {
		t.Fatal(err)
	}
	clear(l.model.Params[0].Value.Float32s())
	l.batch.ids[2] = 19
	if err := l.machine.Upload(p, l.batch.IDs); err == nil || !strings.Contains(err.Error(), "cudaops.Machine.Upload: Embedding: ids[2] is 19") {
		t.Errorf("an id beyond the vocabulary: %v", err)
	}
	after, err := l.machine.Value(p)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(flat(t, after), flat(t, before)) {
		t.Error("the parameter ahead of it was sent")
	}
}

// wrapped is an optimiser that is no pointer.
type wrapped struct{ *optim.AdamW }

func make1(d *Device, g *gorgonia.ExprGraph, opts ...MachineOption) error {
	_, err := NewMachine(d, g, opts...)
	return err
}

func open1(opt DeviceOption) error {
	_, err := Open(opt)
	return err
}
