package cudaops_test

import (
	"context"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// This example computes batches of one row through a Kasmina layer, and grafts a seed between two batches.
// The device is nil, so the stream computes on the CPU. With a device from [cudaops.Open], it computes on
// the GPU, without a launch for each batch.
func ExampleStream() {
	// The layer has two seeds with two features each. Slot 1 holds a Residual blueprint, t(x) = x + w.
	lattice := must(state.NewLattice(2, 4, state.WithoutGates()))
	g := gorgonia.NewGraph()
	node := func(name string, data []float32, shape ...int) *gorgonia.Node {
		return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(shape...),
			tensor.WithBacking(data)), gorgonia.WithName(name))
	}
	x := node("x", make([]float32, 4), 1, 4)
	weights := node("weights", []float32{0, 0, 10, 20}, 2, 2)
	scales := node("scales", []float32{0, 1}, 2)
	y := must(op.Kasmina(x, weights, scales, lattice))

	stream := must(cudaops.NewStream(nil, y, cudaops.StreamOptions{}))
	defer stream.Close()

	ctx := context.Background()
	batch, result := []float32{1, 2, 3, 4}, make([]float32, 4)
	ok(stream.Run(ctx, batch, result))
	fmt.Println(result)

	// The next batch sees that seed 1 blends its blueprint in.
	ok(lattice.RequestGermination(1, state.GerminationRequest{Slot: 1, Kind: blueprints.Residual}))
	ok(lattice.Transition(1, state.Training))
	ok(lattice.Transition(1, state.Grafting))
	ok(lattice.SetAlpha(1, 0.5))
	ok(stream.Run(ctx, batch, result))
	fmt.Println(result)

	// Several batches may be in flight.
	batches := slices.Values([][]float32{{0, 0, 0, 0}, {1, 1, 1, 1}})
	for result, err := range stream.Process(ctx, batches) {
		ok(err)
		fmt.Println(result)
	}

	// Output:
	// [1 2 3 4]
	// [1 2 8 14]
	// [0 0 5 10]
	// [1 1 6 11]
}

func must[T any](v T, err error) T {
	ok(err)
	return v
}

func ok(err error) {
	if err != nil {
		panic(err)
	}
}
