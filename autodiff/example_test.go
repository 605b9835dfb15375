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
	x := gorgonia.NewVector(g, tensor.Float64, gorgonia.WithName("x"), gorgonia.WithValue(tensor.New(tensor.WithBacking([]float64{0.5, 2}))))
	good := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Tanh(x))))
	bad := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.InverseSqrt(x)))) // Gorgonia's gradient of it is wrong

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
	x := gorgonia.NewVector(g, tensor.Float64, gorgonia.WithName("x"), gorgonia.WithValue(tensor.New(tensor.WithBacking([]float64{15, 20}))))
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
