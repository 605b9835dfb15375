package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/opbench"
)

// cpuOps times every op, forward, and forward and backward together, next to Gorgonia's own ops.
func cpuOps(options) error {
	for _, o := range opbench.Ops() {
		name, shape := o.Name, o.Usual
		figures, err := opbench.Time(name, shape, opbench.Float32,
			opbench.WithSpan(100*time.Millisecond))
		if err != nil {
			return err
		}
		seen := map[string]bool{}
		for _, f := range figures {
			// The first figure of a peer is its own choice.
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

// emitOp prints the results of one figure.
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
