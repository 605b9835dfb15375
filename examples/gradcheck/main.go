// Command gradcheck compares the gradients of every op of this module with central differences in
// float64. It checks the Kasmina layer in every stage with every blueprint, and prints the largest
// relative error of each check.
//
//	go run ./examples/gradcheck
//	go run ./examples/gradcheck -seed 7 -tol 1e-7
//
// It exits with status 1 if an error is not below -tol.
package main

import (
	"flag"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"os"
	"text/tabwriter"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
)

func main() {
	log.SetFlags(0)
	seed := flag.Uint64("seed", 1, "seed of the inputs")
	tol := flag.Float64("tol", 1e-6, "largest relative error that passes")
	flag.Parse()
	switch {
	case flag.NArg() > 0:
		log.Fatalf("gradcheck: %q is not an option", flag.Arg(0))
	case !(*tol > 0):
		log.Fatalf("gradcheck: -tol is %g, want a number above 0", *tol)
	}

	ok, err := run(os.Stdout, append(opChecks(), kasminaChecks(modes)...), *seed, *tol)
	if err != nil {
		log.Fatalf("gradcheck: %v", err)
	}

	if !ok {
		os.Exit(1)
	}
}

// check is a row of the table.
type check struct {
	op, config string
	run        func(r *rand.Rand) ([]autodiff.CheckReport, error)
}

// run prints a table of the checks and reports whether every error is below tol.
func run(out io.Writer, checks []check, seed uint64, tol float64) (ok bool, err error) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "op\tconfiguration\telements\tmax rel. error")
	ok = true
	var bad []string
	for i, c := range checks {
		reports, err := c.run(rand.New(rand.NewPCG(seed, uint64(i))))
		if err != nil {
			return false, fmt.Errorf("%s %s: %w", c.op, c.config, err)
		}
		elements, worst := 0, 0.0
		for _, r := range reports {
			elements += r.Checked()
			worst = max(worst, r.MaxRelError())
			if !r.OK(tol) {
				ok = false
				bad = append(bad, fmt.Sprintf("%s %s:\n%v", c.op, c.config, r))
			}
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%.1e\n", c.op, c.config, elements, worst)
	}

	if err := w.Flush(); err != nil {
		return false, err
	}

	for _, b := range bad {
		fmt.Fprintf(out, "\nnot below %g: %s", tol, b)
	}

	return ok, nil
}

// inputs creates the nodes of one check. Values are drawn from a normal distribution unless they are
// given.
type inputs struct {
	*rand.Rand
	g   *gorgonia.ExprGraph
	wrt gorgonia.Nodes
}

func (in *inputs) normal(name string, shape ...int) *gorgonia.Node {
	data := make([]float64, tensor.Shape(shape).TotalSize())
	for i := range data {
		data[i] = in.NormFloat64()
	}
	return in.values(name, data, shape...)
}

func (in *inputs) values(name string, data []float64, shape ...int) *gorgonia.Node {
	n := in.constant(name, data, shape...)
	in.wrt = append(in.wrt, n)
	return n
}

// constant returns an input without a gradient to check.
func (in *inputs) constant(name string, data any, shape ...int) *gorgonia.Node {
	v := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
	return gorgonia.NodeFromAny(in.g, v, gorgonia.WithName(name))
}

// checkOf returns a check of the node that build returns. If the node is not a scalar, the check uses the
// sum of its elements with random weights, so that every element has a different gradient.
func checkOf(op, config string, build func(in *inputs) (*gorgonia.Node, error)) check {
	return check{op, config, func(r *rand.Rand) ([]autodiff.CheckReport, error) {
		in := &inputs{Rand: r, g: gorgonia.NewGraph()}
		y, err := build(in)
		if err != nil {
			return nil, err
		}
		wrt := in.wrt
		cost, err := weigh(in, y)
		if err != nil {
			return nil, err
		}
		report, err := autodiff.CheckGradients(cost, wrt)
		return []autodiff.CheckReport{report}, err
	}}
}

func weigh(in *inputs, y *gorgonia.Node) (*gorgonia.Node, error) {
	if y.IsScalar() {
		return y, nil
	}
	weighted, err := gorgonia.HadamardProd(y, in.normal("weights of the cost", y.Shape()...))
	if err != nil {
		return nil, err
	}
	return gorgonia.Sum(weighted)
}
