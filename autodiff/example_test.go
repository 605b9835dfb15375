package autodiff_test

import (
	"fmt"
	"log"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
)

func ExampleCheckGradients() {
	g := gorgonia.NewGraph()
	x := gorgonia.NewVector(g, tensor.Float64, gorgonia.WithName("x"),
		gorgonia.WithValue(tensor.New(tensor.WithBacking([]float64{0.5, 2}))))
	good := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Tanh(x))))

	// Gorgonia's gradient of this op is wrong.
	bad := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.InverseSqrt(x))))
	for _, cost := range []*gorgonia.Node{good, bad} {
		report, err := autodiff.CheckGradients(cost, gorgonia.Nodes{x})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(report.OK(1e-6))
	}
	// Output:
	// true
	// false
}

func ExampleClipGlobalNorm() {
	g := gorgonia.NewGraph()
	x := gorgonia.NewVector(g, tensor.Float64, gorgonia.WithName("x"),
		gorgonia.WithValue(tensor.New(tensor.WithBacking([]float64{15, 20}))))
	cost := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Square(x))))
	if _, err := gorgonia.Grad(cost, x); err != nil {
		log.Fatal(err)
	}

	vm := gorgonia.NewTapeMachine(g, gorgonia.BindDualValues(x))
	defer vm.Close()
	if err := vm.RunAll(); err != nil {
		log.Fatal(err)
	}

	norm, err := autodiff.ClipGlobalNorm(gorgonia.NodesToValueGrads(gorgonia.Nodes{x}), 1)
	if err != nil {
		log.Fatal(err)
	}

	grad, err := x.Grad()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%.0f %.2f\n", norm, grad.Data())
	// Output: 50 [0.60 0.80]
}

// This example recomputes the inner results of two blocks for the gradient instead of keeping them.
func ExampleRecompute() {
	g := gorgonia.NewGraph()
	value := func(x ...float64) gorgonia.NodeConsOpt {
		return gorgonia.WithValue(tensor.New(tensor.WithShape(2, 2), tensor.WithBacking(x)))
	}
	x := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithName("x"), value(1, 2, 3, 4))
	w := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithName("w"), value(0.5, 0, 0, 0.5))
	block := func(in gorgonia.Nodes) (*gorgonia.Node, error) {
		h, err := gorgonia.Mul(in[0], in[1])
		if err != nil {
			return nil, err
		}
		return gorgonia.Tanh(h)
	}

	h := x
	for range 2 {
		var err error
		if h, err = autodiff.Recompute(gorgonia.Nodes{h, w}, block); err != nil {
			log.Fatal(err)
		}
	}

	report, err := autodiff.CheckGradients(gorgonia.Must(gorgonia.Sum(h)), gorgonia.Nodes{x, w})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(report.OK(1e-6))
	// Output: true
}
