package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/hf"
)

// inferenceFlags adds the flags of machineFlags for a command that does not train. On a CPU, the precision
// is the type of the weights in memory.
func (o *common) inferenceFlags(c *cobra.Command) {
	o.deviceFlags(c, "type of the weights: f32 or bf16, on a CPU also q8_0, and on a GPU also f16, f8 or nf4 (default "+
		"f32, but on a CPU the type of the model's files if it is bf16 or q8_0)", "f32", "bf16", "q8_0", "f16", "f8", "nf4")
}

// mostLookup is the largest --lookup.
const mostLookup = 64

func (o *common) lookupFlag(c *cobra.Command) {
	c.Flags().IntVar(&o.lookup, "lookup", 0, "generate up to this many tokens at once where a text repeats parts of itself; "+
		"the text stays the same; 0 turns this off")
}

// checkLookup returns an error for an impossible --lookup.
func (o *common) checkLookup() error {
	if o.lookup < 0 || o.lookup > mostLookup {
		return fmt.Errorf("--lookup is %d, want 0 to %d", o.lookup, mostLookup)
	}
	return nil
}

// openInference opens the device to compute on for a command that does not train. It returns nil for the
// CPU.
func (o *common) openInference(stderr io.Writer) (*cudaops.Device, cudaops.Precision, error) {
	if o.precision == cpuops.Q8.String() {
		switch o.device {
		case "auto", "cpu":
			return nil, cudaops.Float32, nil
		case "cuda":
			return nil, 0, errors.New("--precision q8_0 needs --device cpu; on a GPU, use f8, which takes about as much memory")
		}
	}

	if _, packed := o.packedType(); packed {
		as := *o
		as.precision = cudaops.BFloat16.String()
		device, precision, err := as.open(stderr)
		if device == nil && (err == nil || errors.Is(err, cpuops.ErrNoBFloat16)) {
			err = fmt.Errorf("--precision %s needs a GPU; on a CPU, use f32, bf16 or q8_0", o.precision)
		}
		return device, precision, err
	}

	if o.precision != "" && new(cudaops.Precision).UnmarshalText([]byte(o.precision)) != nil {
		return nil, 0, fmt.Errorf("--precision is %q, want f32, bf16, f16 or f8, or nf4 on a GPU, or q8_0 on a CPU",
			o.precision)
	}

	device, precision, err := o.open(stderr)
	switch {
	case errors.Is(err, cpuops.ErrNoBFloat16): // weights in bfloat16 need no such instructions
		return nil, cudaops.BFloat16, nil
	case err == nil && device == nil:
		return nil, precision, cpuops.UseBFloat16(false) // only the weights are rounded
	}
	return device, precision, err
}

// packedType returns the type in which a GPU holds the linear layers, if that is not the type of activations.
func (o *common) packedType() (t cpuops.WeightType, packed bool) {
	switch o.precision {
	case "f8":
		return cpuops.Float8, true
	case "nf4":
		return cpuops.NF4, true
	}
	return cpuops.Float32, false
}

// weightType returns the type in which a CPU stores the weights of a folder in memory. By default, weights that are
// stored in bfloat16 or q8_0 in the files keep that type, so no weight changes.
func (o *common) weightType(f *hf.Folder) cpuops.WeightType {
	switch {
	case o.precision == "bf16", o.precision == "" && cpuops.FastWeights() && stores(f, "BF16"):
		return cpuops.BFloat16
	case o.precision == "q8_0", o.precision == "" && cpuops.FastWeights() && stores(f, "Q8_0"):
		return cpuops.Q8
	}
	return cpuops.Float32
}

// stores reports whether all matrices of a folder are of a type, except for a table of positions.
func stores(f *hf.Folder, name string) bool {
	matrices := 0
	for _, t := range f.Tensors() {
		if len(t.Shape) < 2 || t.Name == llm.PositionsName {
			continue
		}
		if matrices++; t.Type != name {
			return false
		}
	}
	return matrices > 0
}
