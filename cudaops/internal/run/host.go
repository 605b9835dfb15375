package run

import (
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// Fetch waits for the device and returns a copy of an array as a value. Floats are divided by scale,
// which must be a power of two so that the division is exact.
func (r *Runner) Fetch(a *program.Array, scale float32) (gorgonia.Value, error) {
	if a.Type == gpu.Int64 {
		x := make([]int, a.Len())
		err := r.copyToHost(gpu.Bytes(x), a.Ptr())
		return opbase.ValueOf(x, a.Shape), err
	}

	x := make([]float32, a.Len())
	err := r.FetchFloats(a, x)
	for i := 0; i < len(x) && scale != 1; i++ {
		x[i] /= scale
	}

	return opbase.ValueOf(x, a.Shape), err
}

// FetchFloats copies the elements of an array to dst, which must have room for them, and converts them to
// float32.
func (r *Runner) FetchFloats(a *program.Array, dst []float32) error {
	if a.Type == gpu.Float32 {
		return r.copyToHost(gpu.Bytes(dst)[:a.Extent()], a.Ptr())
	}

	// Several goroutines convert elements while others are being copied.
	size, n := a.Type.Size(), a.Len()
	each := min(pieceBytes/size, max(leastConverted, (n+transferWorkers-1)/transferWorkers))
	return r.transfer((n+each-1)/each, func(i int, pinned []byte) error {
		to := dst[i*each : min(n, (i+1)*each)]
		part := pinned[:len(to)*size]
		err := Joined(r.Ctx.CopyToHost(part, a.Ptr().Offset(i*each*size), r.Stream), r.Ctx.SyncStream(r.Stream))
		if err == nil {
			gpu.Decode(to, a.Type, part)
		}
		return err
	})
}

// leastConverted is the minimum number of elements per goroutine. Converting fewer takes less time than starting a
// goroutine.
const leastConverted = 1 << 15

// FetchBytes copies an array to dst exactly as it is stored in device memory.
func (r *Runner) FetchBytes(a *program.Array, dst []byte) error {
	return r.copyToHost(dst[:a.Extent()], a.Ptr())
}

// HostOperand returns the value of array a, input i of node n, for a computation on the host. The loss
// scale is divided out.
func (r *Runner) HostOperand(n *gorgonia.Node, i int, a *program.Array) (gorgonia.Value, error) {
	scale := float32(1)
	if r.Program.Scaling.Carries(n, i) {
		scale = r.Scale.Carried
	}
	return r.Fetch(a, scale)
}

// Carried returns the loss scale that the value of a node carries, or 1 if it carries none.
func (r *Runner) Carried(n *gorgonia.Node) float32 {
	if r.Program.Scaling.Carried[n] {
		return r.Scale.Carried
	}
	return 1
}

// ComputeOnHost computes a node with its op's Do method, copying the operands from the device and the
// result back to it.
func (r *Runner) ComputeOnHost(p program.HostOp) error {
	values := make([]gorgonia.Value, len(p.In))
	for i, a := range p.In {
		v, err := r.HostOperand(p.Node, i, a)
		if err != nil {
			return err
		}
		values[i] = v
	}

	v, err := p.Node.Op().Do(values...)
	if err != nil {
		return err
	}

	from, stored, err := hostElements(v, p.Out)
	if err != nil {
		return err
	}

	if scale := r.Carried(p.Node); scale != 1 { // only floats carry a scale
		scaled := slices.Clone(gpu.View[float32](from))
		for i := range scaled {
			scaled[i] *= scale
		}
		from = gpu.Bytes(scaled)
	}

	raw := make([]byte, p.Out.Extent())
	convert(raw, p.Out.Type, from, stored)
	return r.Ctx.CopyToDevice(p.Out.Ptr(), raw, r.Stream)
}
