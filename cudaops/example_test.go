package cudaops_test

import (
	"errors"
	"fmt"
	"log"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// newVM returns a machine on the GPU if there is one, and one on the CPU otherwise.
func newVM(g *gorgonia.ExprGraph) (vm gorgonia.VM, closeDevice func() error, err error) {
	device, err := cudaops.Open()
	if errors.Is(err, cudaops.ErrNoDevice) {
		vm, err = cpuops.NewMachine(g)
		return vm, func() error { return nil }, err
	} else if err != nil {
		return nil, nil, err
	}
	if vm, err = cudaops.NewMachine(device, g); err != nil {
		return nil, nil, errors.Join(err, device.Close())
	}
	return vm, device.Close, nil
}

// One program for computers with and without a GPU.
func Example() {
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName("x"), gorgonia.WithShape(512, 256),
		gorgonia.WithInit(gorgonia.Gaussian(0, 1)))
	w := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithName("w"), gorgonia.WithShape(256),
		gorgonia.WithInit(gorgonia.Ones()))
	y, err := op.RMSNorm(x, w, 1e-5)
	if err != nil {
		log.Fatal(err)
	}
	cost := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(y))))

	vm, closeDevice, err := newVM(g)
	if err != nil {
		log.Fatal(err)
	}
	defer closeDevice()
	defer vm.Close()
	if err := vm.RunAll(); err != nil {
		log.Fatal(err)
	}
	value := cost.Value() // of a machine on the CPU; one on a GPU copies it when asked for
	if m, ok := vm.(*cudaops.Machine); ok {
		if value, err = m.Value(cost); err != nil {
			log.Fatal(err)
		}
	}
	fmt.Println(value)
}

// Training with weights, gradients and optimiser on the GPU. A step sends up its batch, and brings
// down the loss when asked to, which the machine keeps since it is named as an output.
func ExampleMachine_SetOptimizer() {
	device, err := cudaops.Open()
	if err != nil {
		log.Fatal(err)
	}
	defer device.Close()

	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName("x"), gorgonia.WithShape(64, 128),
		gorgonia.WithInit(gorgonia.Gaussian(0, 1)))
	w := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName("w"), gorgonia.WithShape(32, 128),
		gorgonia.WithInit(gorgonia.GlorotN(1)))
	y, err := op.Linear(x, w)
	if err != nil {
		log.Fatal(err)
	}
	loss := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(y))))
	if _, err := gorgonia.Grad(loss, w); err != nil {
		log.Fatal(err)
	}
	machine, err := cudaops.NewMachine(device, g, cudaops.WithParams(w), cudaops.WithOutputs(loss),
		cudaops.WithPrecision(cudaops.BFloat16))
	if err != nil {
		log.Fatal(err)
	}
	defer machine.Close()
	optimizer, err := optim.NewAdamW(optim.WithLR(1e-3))
	if err != nil {
		log.Fatal(err)
	}
	// gradients of a norm above 1 are scaled down
	if err := machine.SetOptimizer(optimizer, 1); err != nil {
		log.Fatal(err)
	}
	for range 100 {
		if err := machine.RunAll(); err != nil { // after gorgonia.Let(x, batch)
			log.Fatal(err)
		}
		if _, err := machine.Update(); err != nil {
			log.Fatal(err)
		}
	}
	value, err := machine.Value(loss)
	if err != nil {
		log.Fatal(err)
	}
	if err := machine.Download(); err != nil { // the weights, into their nodes
		log.Fatal(err)
	}
	fmt.Println(value, w.Value())
}
