package cudaops

import (
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
)

// tunedKernels is a kernelSet whose ops are computed in the ways that the tuner chooses.
type tunedKernels struct {
	kernelSet
	t *tuner
}

// isSmall reports whether what an op works on is in the cache when it runs, since the work before it has left it there.
func (k tunedKernels) isSmall(arguments []argument) bool {
	bytes := 0
	for _, o := range arguments {
		bytes += o.bytes
	}
	return bytes <= k.t.m.device.info.L2/2
}

// numbers is n numbers of a type.
func numbers(r role, n int, t gpu.DType) argument {
	return argument{role: r, bytes: n * t.Size(), elem: elemOfType(t)}
}

// float8Arguments is the float8 of rows, n numbers in all, and their scales.
func float8Arguments(n, rows int) []argument {
	return []argument{numbers(writes, n, gpu.Float8E4M3), numbers(writes, rows, gpu.Float32)}
}

// names are those of ways.
func names[W fmt.Stringer](ways []W) []string {
	var names []string
	for _, w := range ways {
		names = append(names, w.String())
	}
	return names
}

func plural(b bool, with string) string {
	if b {
		return " " + with
	}
	return ""
}

func (k tunedKernels) RMSNorm(s gpu.Stream, a kernels.RMSNorm) error {
	ways, err := k.RMSNormWays(a)
	if len(ways) < 2 || err != nil || a.Rows == 0 {
		return first(err, func() error { return k.kernelSet.RMSNorm(s, a) })
	}
	n := a.Rows * a.D
	j := job{op: "RMSNorm", shape: fmt.Sprintf("%dx%d %v%s%s", a.Rows, a.D, a.Type, plural(a.Residual != 0, "with residual"),
		plural(a.Y8 != 0, "and float8")), build: k.Build("norm"), ways: names(ways), plain: len(ways) - 1,
		arguments: []argument{numbers(writes, n, a.Type), numbers(writes, a.Rows, gpu.Float32), numbers(reads, n, a.Type),
			numbers(reads, a.D, gpu.Float32)}}
	if a.Residual != 0 {
		j.arguments = append(j.arguments, numbers(reads, n, a.Type), numbers(writes, n, a.Type))
	}
	if a.Y8 != 0 {
		j.arguments = append(j.arguments, float8Arguments(n, a.Rows)...)
	}
	j.warm = k.isSmall(j.arguments)
	j.run = func(way int, memory []gpu.Ptr) error {
		b := a
		b.Way, b.Y, b.Rstd, b.X, b.W = ways[way], memory[0], memory[1], memory[2], memory[3]
		if a.Residual != 0 {
			b.Residual, b.Sum = memory[4], memory[5]
		}
		if a.Y8 != 0 {
			b.Y8, b.Scale8 = memory[len(memory)-2], memory[len(memory)-1]
		}
		return k.kernelSet.RMSNorm(s, b)
	}
	way, err := k.t.choose(j)
	if err != nil {
		return err
	}
	a.Way = ways[way]
	return k.kernelSet.RMSNorm(s, a)
}

func first(err error, run func() error) error {
	if err != nil {
		return err
	}
	return run()
}

func (k tunedKernels) RMSNormBackward(s gpu.Stream, a kernels.RMSNormBackward) error {
	ways, err := k.RMSNormBackwardWays(a)
	if len(ways) < 2 || err != nil || a.Rows == 0 {
		return first(err, func() error { return k.kernelSet.RMSNormBackward(s, a) })
	}
	n := a.Rows * a.D
	j := job{op: "RMSNormBackward", shape: fmt.Sprintf("%dx%d %v%s%s", a.Rows, a.D, a.Type, plural(a.Add != 0, "with sum"),
		plural(a.DX8 != 0, "and float8")), build: k.Build("norm"), ways: names(ways), plain: len(ways) - 1,
		arguments: []argument{numbers(writes, n, a.Type), numbers(writes, a.D, a.DWType), numbers(reads, n, a.Type), numbers(reads, n, a.Type),
			numbers(reads, a.D, gpu.Float32), numbers(reads, a.Rows, gpu.Float32), {role: scratch, bytes: k.RMSNormWorkspace(a.D, a.Type)}}}
	if a.Add != 0 {
		j.arguments = append(j.arguments, numbers(reads, n, a.Type))
	}
	if a.DX8 != 0 {
		j.arguments = append(j.arguments, float8Arguments(n, a.Rows)...)
	}
	j.warm = k.isSmall(j.arguments)
	j.run = func(way int, memory []gpu.Ptr) error {
		b := a
		b.Leave = nil // a way's result counts as a whole
		b.Way, b.DX, b.DW, b.G, b.X = ways[way], memory[0], memory[1], memory[2], memory[3]
		b.W, b.Rstd, b.Workspace = memory[4], memory[5], memory[6]
		if a.Add != 0 {
			b.Add = memory[7]
		}
		if a.DX8 != 0 {
			b.DX8, b.Scale8 = memory[len(memory)-2], memory[len(memory)-1]
		}
		return k.kernelSet.RMSNormBackward(s, b)
	}
	way, err := k.t.choose(j)
	if err != nil {
		return err
	}
	a.Way = ways[way]
	return k.kernelSet.RMSNormBackward(s, a)
}

// attentionUnits are where the variants' kernels are.
var attentionUnits = []string{"attention", "attention_mma", "attention_hopper", "attention_hopper_backward",
	"attention_hopper_fused", "attention_hopper_fused64"}

// attentionOp is the name of attention's forward pass among the choices.
const attentionOp = "Attention"

// attentionJob is what both passes have in common. The matrices' rows are as far apart as those of the call.
func (k tunedKernels) attentionJob(op string, a kernels.AttentionShape, variants []kernels.AttentionVariant, t gpu.DType,
	matrices []kernels.Rows, roles []role) job {
	j := job{op: op, build: k.Build(attentionUnits...), ways: names(variants), computes: true,
		plain: slices.Index(variants, kernels.AttentionPlain),
		shape: fmt.Sprintf("%dx%d, %d of %d heads of %d, %v", a.Batch, a.Seq, a.Heads, a.KVHeads, a.HeadDim, t)}
	j.shape += plural(a.Causal, "causal") + plural(a.Cos != 0, "turned") + plural(a.Documents != 0, "documents") +
		plural(a.Scale != 0, fmt.Sprintf("scale %g", a.Scale))
	for i, m := range matrices {
		j.shape += fmt.Sprintf(" %d", m.Stride)
		j.arguments = append(j.arguments, numbers(roles[i], a.Batch*a.Seq*m.Stride, t))
	}
	return j
}

func (k tunedKernels) Attention(s gpu.Stream, a kernels.AttentionShape, y kernels.Rows, lse gpu.Ptr, q, key, value kernels.Rows,
	t gpu.DType) error {
	variants := slices.DeleteFunc(k.AttentionVariants(a, t, y, q, key, value), func(v kernels.AttentionVariant) bool {
		return v == kernels.AttentionHopperFused // whose forward pass is AttentionHopper's
	})
	if len(variants) < 2 || a.Variant != kernels.AttentionAuto || a.Batch*a.Seq == 0 {
		return k.kernelSet.Attention(s, a, y, lse, q, key, value, t)
	}
	j := k.attentionJob(attentionOp, a, variants, t, []kernels.Rows{y, q, key, value}, []role{writes, reads, reads, reads})
	j.arguments = append(j.arguments, numbers(writes, a.Batch*a.Heads*a.Seq, gpu.Float32))
	at := func(p gpu.Ptr, r kernels.Rows) kernels.Rows { return kernels.Rows{Ptr: p, Stride: r.Stride} }
	j.run = func(way int, m []gpu.Ptr) error {
		b := a
		b.Variant, b.Documents = variants[way], 0 // of which the tuner has no table
		return k.kernelSet.Attention(s, b, at(m[0], y), m[4], at(m[1], q), at(m[2], key), at(m[3], value), t)
	}
	way, err := k.t.choose(j)
	if err != nil {
		return err
	}
	a.Variant = variants[way]
	return k.kernelSet.Attention(s, a, y, lse, q, key, value, t)
}

func (k tunedKernels) AttentionBackward(s gpu.Stream, a kernels.AttentionShape, dq, dk, dv kernels.Rows, stats gpu.Ptr,
	g, q, key, value, y kernels.Rows, lse gpu.Ptr, t gpu.DType) error {
	rows := []kernels.Rows{dq, dk, dv, g, q, key, value, y}
	variants := k.AttentionVariants(a, t, rows...)
	if len(variants) < 2 || a.Variant != kernels.AttentionAuto || a.Batch*a.Seq == 0 {
		return k.kernelSet.AttentionBackward(s, a, dq, dk, dv, stats, g, q, key, value, y, lse, t)
	}
	j := k.attentionJob("AttentionBackward", a, variants, t, rows, []role{writes, writes, writes, reads, reads, reads, reads, reads})
	j.arguments = append(j.arguments, numbers(reads, a.Batch*a.Heads*a.Seq, gpu.Float32),
		argument{role: scratch, bytes: k.AttentionStatsBytes(a, t)})
	j.run = func(way int, m []gpu.Ptr) error {
		b := a
		b.Variant, b.Documents = variants[way], 0
		r := slices.Clone(rows)
		for i := range r {
			r[i].Ptr = m[i]
		}
		return k.kernelSet.AttentionBackward(s, b, r[0], r[1], r[2], m[9], r[3], r[4], r[5], r[6], r[7], m[8], t)
	}
	way, err := k.t.choose(j)
	if err != nil {
		return err
	}
	a.Variant = variants[way]
	return k.kernelSet.AttentionBackward(s, a, dq, dk, dv, stats, g, q, key, value, y, lse, t)
}
