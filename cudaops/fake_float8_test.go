package cudaops

import (
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
)

// float8Products is the products of [Float8] without the storage of BFloat16, which fakeKernels do not know.
func float8Products(c *machineConfig) error {
	c.float8 = true
	return nil
}

// quantizedRow puts a row in float8 and returns its scale.
func quantizedRow(y []byte, x []float32) float32 {
	largest := float32(0)
	for _, v := range x {
		largest = max(largest, float32(math.Abs(float64(v))))
	}
	scale := largest / gpu.Float8Max
	if scale == 0 {
		scale = 1
	}
	inverse := 1 / scale
	for i, v := range x {
		y[i] = gpu.E4M3(v * inverse)
	}
	return scale
}

// float8At puts rows in float8, if that is asked for.
func float8At(l *fake.Launch, y, scale gpu.Ptr, x [][]float32) {
	if y == 0 {
		return
	}
	d := len(x[0])
	values, scales := fake.Slice[byte](l, y, len(x)*d), floatsAt(l, scale, len(x))
	for i, row := range x {
		scales[i] = quantizedRow(values[i*d:][:d], row)
	}
}

func (k *fakeKernels) Quantize(s gpu.Stream, a quantize.Rows) error {
	return k.launch(s, func(l *fake.Launch) { float8At(l, a.Y, a.Scale, rowsAt(l, a.X, a.Rows, a.D, a.XStride)) })
}

func (k *fakeKernels) QuantizeColumnsWorkspace(rows, d int) int { return 4 * d }

func (k *fakeKernels) QuantizeColumns(s gpu.Stream, a quantize.Columns) error {
	return k.launch(s, func(l *fake.Launch) {
		copy(floatsAt(l, a.Workspace, a.D), make([]float32, a.D))
		float8At(l, a.Y, a.Scale, columnsAt(l, a.X, a.Rows, a.D))
	})
}

func (k *fakeKernels) NewQuantizeTable(weights []quantize.Weight) (*quantize.Table, error) {
	t, err := quantize.NewTable(kernel.New(k.ctx), weights)
	if err == nil {
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.weights == nil {
			k.weights = map[*quantize.Table][]quantize.Weight{}
		}
		k.weights[t] = weights
	}
	return t, err
}

func (k *fakeKernels) QuantizeWeights(s gpu.Stream, t *quantize.Table) error {
	return k.launch(s, func(l *fake.Launch) {
		for _, w := range k.weights[t] {
			float8At(l, w.Y, w.Scale, rowsAt(l, w.X, w.Rows, w.D, 0))
			float8At(l, w.Turned, w.TurnedScale, columnsAt(l, w.X, w.Rows, w.D))
		}
	})
}

// columnsAt returns the columns of a matrix.
func columnsAt(l *fake.Launch, p gpu.Ptr, rows, d int) [][]float32 {
	turned := make([][]float32, d)
	for i, v := range floatsAt(l, p, rows*d) {
		turned[i%d] = append(turned[i%d], v)
	}
	return turned
}

// sideBySide returns the rows of two matrices side by side.
func sideBySide(a, b [][]float32) (rows [][]float32) {
	for i := range a {
		rows = append(rows, slices.Concat(a[i], b[i]))
	}
	return rows
}

// operandAt returns a matrix: of float32, or where there are factors of its rows of float8.
func operandAt(l *fake.Launch, p, scale gpu.Ptr, rows, d int) []float32 {
	if scale == 0 {
		return floatsAt(l, p, rows*d)
	}
	values, factors := make([]float32, rows*d), floatsAt(l, scale, rows)
	for i, b := range fake.Slice[byte](l, p, rows*d) {
		values[i] = gpu.FromE4M3(b) * factors[i/d]
	}
	return values
}
