package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/opbench"
)

// opShapes are the shapes of a small model's ops, by their names in opbench.
var opShapes = map[string][]int{
	"Add":                {1024, 1024},
	"Attention":          {4, 256, 4, 4, 64},
	"Bias":               {1024, 1024},
	"CrossEntropy":       {1024, 4096},
	"Embedding":          {1024, 4096, 256},
	"GELUMLP":            {1024, 256, 704},
	"Kasmina":            {1024, 1024, 64},
	"Linear":             {1024, 256, 704},
	"LinearAdd":          {1024, 704, 256},
	"LinearCrossEntropy": {1024, 256, 4096},
	"MatMul":             {512, 512, 512},
	"NewtonSchulz":       {256, 704},
	"RMSNorm":            {1024, 1024},
	"RoPE":               {4, 256, 4, 64},
	"SiLUMLP":            {1024, 256, 704},
	"SoftMax":            {1024, 1024},
	"Tanh":               {1024, 1024},
}

// opNames are the ops that can be timed.
func opNames() (names []string) {
	for _, o := range opbench.Ops() {
		names = append(names, o.Name)
	}
	return names
}

// cpuOps times every op alone, forward, and forward and backward together, beside Gorgonia's own.
func cpuOps(options) error {
	for _, name := range opNames() {
		shape := opShapes[name]
		figures, err := opbench.Time(name, shape, opbench.Float32,
			opbench.WithSpan(100*time.Millisecond))
		if err != nil {
			return err
		}
		seen := map[string]bool{}
		for _, f := range figures {
			// a peer's first figure is the way that it chooses itself
			if f.Err != nil || seen[f.Peer] {
				continue
			}
			seen[f.Peer] = true
			if err := emitOp(name, shape, f); err != nil {
				return err
			}
		}
	}
	return nil
}

// emitOp prints the lines of one figure.
func emitOp(name string, shape []int, f opbench.Figure) error {
	size := strings.Trim(strings.ReplaceAll(fmt.Sprint(shape), " ", "x"), "[]")
	line := func(pass string, took time.Duration, bytes, flops float64) error {
		r := measured(fmt.Sprintf("%s_%s_%s_cpu", strings.ToLower(name), pass, size), took, bytes,
			flops)
		if f.Peer != "cpu" {
			r.Peer = f.Peer
		}
		return emit(r)
	}
	if err := line("fwd", f.Forward, f.Bytes, f.FLOPs); err != nil || f.Training == 0 {
		return err
	}
	return line("fwdbwd", f.Training, 0, 0)
}
