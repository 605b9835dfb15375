package op_test

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// faultyIn is the function in which the blueprint "Faulty" panics.
var faultyIn string

func fault(function string) {
	if faultyIn == function {
		panic("boom in " + function)
	}
}

func faultyRule[T blueprints.Float]() blueprints.Arithmetic[T] {
	return blueprints.Arithmetic[T]{
		Prepare:  func(p, w []T) { fault("Prepare"); copy(p, w) },
		Forward:  func(t, x, p []T, a T) { fault("Forward"); copy(t, x) },
		Backward: func(dx, dp, g, x, p []T, a T) float64 { fault("Backward"); copy(dx, g); return 0 },
		Finish:   func(dp, p []T) { fault("Finish") },
	}
}

var _, errFaulty = blueprints.Register(blueprints.Blueprint{Name: "Faulty", Identity: func([]float64, int, *rand.Rand) float64 { return 1 },
	F32: faultyRule[float32](), F64: faultyRule[float64]()})

// A panic in a blueprint's function is an error of the run that names function, kind and seed, on whatever goroutine it
// happens. The layer and its lattice can be used afterwards.
func TestKasminaPanickingBlueprint(t *testing.T) {
	if errFaulty != nil {
		t.Fatal(errFaulty)
	}
	defer func() { faultyIn = "" }()
	r := random(t)
	for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		settings := []seedSetting{{"Dormant", "Residual", 1, 0}, {"Grafting", "ConvFilter", 1, 0.5}, {"Grafting", "Faulty", 2, 0.5}, {"Training", "Residual", 1, 0}}
		l := newLattice(t, 4*16, settings)
		k := newKasminaLayer(t, r, dt, 5000, 3, l) // enough rows for every core
		faultyIn = ""
		k.forward()
		for _, function := range []string{"Prepare", "Forward", "Backward", "Finish"} {
			faultyIn = function
			_, err := k.tryForward(k.forwardOp)
			if function == "Backward" || function == "Finish" {
				if err != nil {
					t.Fatal(err)
				}
				_, err = k.tryBackward()
			}
			if !errors.Is(err, op.ErrBlueprint) {
				t.Fatalf("%v: a panic in %s gives the error %v", dt, function, err)
			}
			for _, want := range []string{"seed 2", "Faulty", "boom in " + function, "op_test.fault"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v: the error does not hold %q: %v", dt, want, err)
				}
			}
		}
		faultyIn = ""
		again := newKasminaLayer(t, r, dt, 5000, 3, newLattice(t, 4*16, settings))
		again.x, again.g, again.weights, again.scale = k.x, k.g, k.weights, k.scale
		if !sameBits(k.forward(), again.forward()) || !sameBits(k.backward().weights, again.backward().weights) {
			t.Errorf("%v: after panics the layer computes something else", dt)
		}
		if err := l.Verify(); err != nil {
			t.Error(err)
		}
	}
}

// Gorgonia's machine runs ops on a goroutine of its own, from which no caller could recover.
func TestKasminaPanickingBlueprintInAGraph(t *testing.T) {
	defer func() { faultyIn = "" }()
	faultyIn = "Forward"
	l := newLattice(t, 4, []seedSetting{{"Fossilized", "Faulty", 1, 1}}, state.WithoutGates())
	g := gorgonia.NewGraph()
	input := func(name string, shape ...int) *gorgonia.Node {
		return gorgonia.NewTensor(g, tensor.Float64, len(shape), gorgonia.WithName(name), gorgonia.WithShape(shape...), gorgonia.WithInit(gorgonia.Zeroes()))
	}
	must(t)(op.Kasmina(input("x", 300, 4), input("weights", 2, 4), input("scales", 2), l))
	if err := tryRun(g); err == nil || !strings.Contains(err.Error(), "boom in Forward") {
		t.Errorf("the run's error is %v", err)
	}
}
