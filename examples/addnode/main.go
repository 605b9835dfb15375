// Command addnode puts a Kasmina node into a small Gorgonia graph, runs it and prints output and
// gradients.
//
//	go run ./examples/addnode
//
// Two seeds share four features. Seed 0 is dormant, so its half of x passes through unchanged. Seed 1 grafts a
// Residual blueprint, t(x) = x + a·w, with α = 0.5. Its half becomes x + 0.5·a·w, and its weights and scale receive
// gradients.
package main

import (
	"fmt"
	"log"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

func main() {
	lattice := must(state.NewLattice(2, 4, state.WithoutGates()))
	check(lattice.RequestGermination(1, state.GerminationRequest{Slot: 1,
		Kind: blueprints.Residual}))
	check(lattice.Transition(1, state.Training))
	check(lattice.Transition(1, state.Grafting))
	check(lattice.SetAlpha(1, 0.5))

	g := gorgonia.NewGraph()
	x := input(g, "x", []float64{1, 2, 3, 4, 5, 6, 7, 8}, 2, 4)
	// Each row holds the weights of a slot. Slot 0 is unused.
	weights := input(g, "weights", []float64{0, 0, 10, 20}, 2, 2)
	scales := input(g, "scales", []float64{0, 1}, 2)
	y := must(op.Kasmina(x, weights, scales, lattice))
	cost := must(gorgonia.Sum(must(gorgonia.Square(y))))
	grads := must(gorgonia.Grad(cost, x, weights, scales))

	machine := gorgonia.NewTapeMachine(g)
	defer machine.Close()
	check(machine.RunAll())

	fmt.Printf("x\n%v\ny\n%v\n", x.Value(), y.Value())
	fmt.Printf("cost %v\n\ngradient of x\n%v\nof weights\n%v\nof scales %v\n",
		cost.Value(), grads[0].Value(), grads[1].Value(), grads[2].Value())
}

func input(g *gorgonia.ExprGraph, name string, data []float64, shape ...int) *gorgonia.Node {
	return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data)),
		gorgonia.WithName(name))
}

func must[T any](v T, err error) T {
	check(err)
	return v
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
