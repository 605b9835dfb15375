package cudaops

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops/internal/choose"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/cudaops/internal/update"
	"github.com/kasmina-go/kasmina/internal/enum"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/quant"
	"github.com/kasmina-go/kasmina/optim"
)

type machineConfig struct {
	lower.Options
	variants          choose.Config
	separatelyClipped gorgonia.Nodes // subset of Params
	read              run.Reader     // reads frozen parameters that have no value; may be nil
	share             *Machine
	sharesRuns        bool       // set by WithSharedRuns
	stream            gpu.Stream // given by WithStream; 0 makes the machine create one
	grads             Precision  // set by WithGradientPrecision
	single            bool       // the graph consists of one op that another machine runs
	// wraps the device's kernels in tests; may be nil
	kernels func(run.Launcher) run.Launcher

	ranks *update.Ranks // the ranks that share updates; nil for a single rank

	// rules of the optimizer that SetOptimizer will be given, or nil if not yet known
	rules optim.Rules
	kept  *run.Kept // memory of a closed machine
	// names of parameters in kept, by the names of this machine's parameters
	inherits map[string]string

	monitor      int
	limit        int // memory budget in bytes for saving time; 0 for the device's memory
	ceilingBytes int // size of the copy that measures the device's bandwidth; 0 for the default
}

// configOf applies the options and checks that they fit together.
func configOf(d *Device, g *gorgonia.ExprGraph, opts []MachineOption) (machineConfig, error) {
	c := machineConfig{kept: run.NewKept(d.ctx)}
	c.variants.Logger = slog.Default()
	for _, opt := range opts {
		if err := opt(&c); err != nil {
			return c, err
		}
	}

	logger, logged := c.variants.Logger, map[string]bool{}
	c.Warn = func(message string) { // each message only once
		if !logged[message] {
			logged[message] = true
			logger.Warn("cudaops: " + message)
		}
	}

	c.Device, c.Timed, c.PageMemory = d.info, c.monitor > 0, d.memoryOfPages
	c.Decoding = lower.Decoding{Rows: true, Grouped: true, Packed: true, Norms: true, Early: true}
	if s := c.share; s != nil {
		c.Shared, c.SharedParams = s.runner.Program, s.config.Params
	}

	stray := slices.IndexFunc(c.separatelyClipped, func(n *gorgonia.Node) bool {
		return !slices.Contains(c.Params, n)
	})
	switch {
	case stray >= 0:
		return c, fmt.Errorf("WithSeparateClipping: %s is not a parameter: name it in WithParams too",
			graph.Describe(c.separatelyClipped[stray]))
	case c.missingParam() != "":
		return c, fmt.Errorf("WithKept: another machine has passed %s on", c.missingParam())
	case c.kept.Ctx != d.ctx:
		return c, errors.New("WithKept: the kept memory is on another device")
	case c.sharesRuns && c.share == nil:
		return c, errors.New("WithSharedRuns requires WithParamsOf")
	case c.share != nil && c.share.device != d:
		return c, errors.New("WithParamsOf: the other machine is on another device")
	case c.grads != Float32 && c.Activation != gpu.BFloat16:
		return c, fmt.Errorf("WithGradientPrecision(%v) requires the precision BFloat16 or "+
			"Float8, but the precision is %v: omit one of the options",
			c.grads, Precision(slices.Index(storedAs, c.Activation)))
	}

	return c, run.InOrder(func() error { return c.Within(g) },
		func() error { return checkFloat8(d, &c) }, func() error { return setVariants(d, &c) })
}

// MachineOption is an option of NewMachine.
type MachineOption func(*machineConfig) error

// setting returns an option that cannot fail.
func setting(set func(*machineConfig)) MachineOption {
	return func(c *machineConfig) error {
		set(c)
		return nil
	}
}

// WithRanks makes the machine one of several, one for each rank of a group, that train a model on the sum
// of their gradients: see [Machine.Rank]. Each rank holds the moments of its part of the parameters and
// updates this part. Matrices that an optimizer updates as a whole are not divided. The group's device
// must be the machine's. Collectives are captured together with the update.
//
// A step consists of the given number of rounds of all ranks, or any number if rounds is 0. If a step is
// one round of two ranks and no matrix is updated as a whole, the update reads both contributions to a
// gradient. Otherwise the contributions are added up in memory.
//
// The bits of an update do not depend on the number of ranks, provided that all ranks compute the graph
// with the same variants. That is the case without tuning, and when all ranks use the choices of one rank
// ([WithChoices]). Updates are not tuned, because each rank updates a different part.
func WithRanks(group comm.Group, rounds int) MachineOption {
	return func(c *machineConfig) error {
		if rounds < 0 {
			return fmt.Errorf("WithRanks: got %d rounds, want at least 1, or 0 for any number",
				rounds)
		}
		_, uncaptured := group.(comm.Uncapturable)
		c.ranks = &update.Ranks{Group: group, Rounds: rounds, Uncaptured: uncaptured}
		return nil
	}
}

// WithParams declares inputs to be parameters. NewMachine copies their values to the device, where they
// stay. [Machine.Upload] copies values that the host has changed, and [Machine.Download] copies values
// back into the nodes. If the graph has gradients of the parameters, [Machine.Value] can return them.
func WithParams(params ...*gorgonia.Node) MachineOption {
	return func(c *machineConfig) error { return c.AddParams(params...) }
}

// WithSeparateClipping clips the gradients of the named parameters (see [WithParams]) by a separate norm.
// These gradients are not part of the norm that Update returns. Parameters added to a model therefore do
// not change how the rest of the model learns. If all parameters are named, they share the usual norm.
func WithSeparateClipping(params ...*gorgonia.Node) MachineOption {
	return func(c *machineConfig) error {
		c.separatelyClipped = append(c.separatelyClipped, params...)
		return nil
	}
}

// WithFrozen declares inputs to be parameters, as [WithParams] does, that never change: the parameters of
// a model used only for inference, or of a base model below the trained parameters.
//
// If all ops that read a frozen parameter read it in the type of activations, as matrix products do, it
// is stored in that type only, without a float32 master. In BFloat16, it then takes two bytes per
// element. [Machine.Value] returns the stored value.
//
// If read is not nil, nodes do not need a value: read passes the elements of node n to put, in order and
// in pieces of any size, as little-endian numbers of type Float32, Float16 or BFloat16. NewMachine calls
// read for several nodes concurrently and returns its error.
func WithFrozen(read func(n *gorgonia.Node, put func(part []byte, t Precision) error) error,
	params ...*gorgonia.Node) MachineOption {
	return func(c *machineConfig) error {
		c.Frozen = append(c.Frozen, params...)
		if read != nil {
			c.read = func(n *gorgonia.Node, put func([]byte, gpu.DType) error) error {
				return read(n, func(part []byte, t Precision) error {
					if t >= Float8 {
						return fmt.Errorf("got numbers of type %v, want Float32, Float16 or BFloat16", t)
					}
					return put(part, storedAs[t])
				})
			}
		}
		return c.AddParams(params...)
	}
}

// WithWeights makes each input that has the name of a matrix of type Float8 or NF4 in w read this matrix instead
// of a value of the node. The device holds them in the same form, and widens a matrix to the type of activations
// right before each product that reads it, in memory that all layers share. With the precision [Float8], products
// read matrices of type Float8 directly, and other operands are rounded to float8 instead. Products of up to 64
// rows in graphs that continue texts read the matrices directly. Matrices of other types are ignored. A machine
// with [WithParamsOf] shares the matrices of the other machine.
func WithWeights(w *cpuops.Weights) MachineOption {
	return setting(func(c *machineConfig) {
		c.Packed = func(n *gorgonia.Node) *quant.Matrix {
			m := w.Compact(n.Name())
			if m == nil || !n.Shape().Eq(tensor.Shape{m.Out, m.In}) {
				return nil
			}
			return m.Quantized()
		}
	})
}

// WithParamsOf makes inputs that have the name and shape of another machine's parameters use that
// machine's memory, without a copy. It allows one machine to evaluate a model while another one trains
// it. The other machine must be on the same device and must be closed later. Runs of the two machines
// must not overlap: call Value on one before running the other.
func WithParamsOf(other *Machine) MachineOption {
	return func(c *machineConfig) error {
		if err := usable(other); err != nil {
			return fmt.Errorf("WithParamsOf: %w", err)
		}
		c.share = other
		return nil
	}
}

// WithSharedRuns makes a machine with [WithParamsOf] compute in the memory of the other machine's runs, if that is
// large enough. It suits a machine that evaluates a model between training steps, which then takes no memory for
// values.
//
// A run of either machine overwrites the values of the other's last run. Until the other machine has run again,
// its Value and Update return an error if they need these values. Machines with Kasmina layers ignore the option.
func WithSharedRuns() MachineOption {
	return setting(func(c *machineConfig) { c.sharesRuns = true })
}

// WithOutputs keeps the values of nodes after a run, for [Machine.Value]. Nodes that no other node reads
// are always kept.
func WithOutputs(outputs ...*gorgonia.Node) MachineOption {
	return func(c *machineConfig) error { return c.AddOutputs(outputs...) }
}

// WithStream makes the machine enqueue all its work on a stream that the program created in the device's
// context. The handle is a CUstream. Work enqueued there before a run finishes before the run, and work
// enqueued after a run sees its results.
//
// The stream must not be one of the default streams, because their work cannot be captured. The machine
// does not destroy the stream, which must outlive the machine.
func WithStream(handle uintptr) MachineOption {
	return func(c *machineConfig) error {
		const perThread = 2 // CU_STREAM_PER_THREAD; 0 and 1 denote the stream that all threads share
		if handle <= perThread {
			return fmt.Errorf("WithStream: got the default stream %d, which cannot be "+
				"captured: create one with cuStreamCreate", handle)
		}
		c.stream = gpu.Stream(handle)
		return nil
	}
}

// WithOptimizer announces the optimizer that will be given to [Machine.SetOptimizer]. A machine that may
// spend memory to save time then reserves room for the moments that the optimizer's rules declare.
// Without this option it reserves room for AdamW's moments, two float32 numbers for each parameter.
func WithOptimizer(o optim.Rules) MachineOption {
	return setting(func(c *machineConfig) { c.rules = o })
}

// momentBytes returns the size in bytes of the optimizer's moments of a parameter with n elements.
func (c *machineConfig) momentBytes(param *gorgonia.Node, n int) int {
	if c.rules == nil {
		return 2 * 4 * n
	}
	return c.rules.Rule(param.Name(), param.Shape()).Kernel.Bytes(n, 4)
}

// WithMemory limits the memory that the machine spends to save time: it spends more than necessary only
// as long as it uses at most the given number of bytes, including the moments of the optimizer
// ([WithOptimizer]). The limit does not affect memory that the machine needs in any case. By default only
// the device's memory limits it: see [Machine].
func WithMemory(bytes int) MachineOption {
	return func(c *machineConfig) error {
		if bytes < 1 {
			return fmt.Errorf("WithMemory: got %d bytes, want at least 1", bytes)
		}
		c.limit = bytes
		return nil
	}
}

// WithStrict makes NewMachine return an error for nodes without a kernel, instead of computing them on
// the host.
func WithStrict() MachineOption {
	return setting(func(c *machineConfig) { c.Strict = true })
}

// Precision determines how a machine stores and computes the values of a float32 graph.
type Precision uint8

// The precisions. Parameters, sums and losses are float32 in every precision, and so are the gradients of
// parameters unless [WithGradientPrecision] says otherwise.
const (
	// Float32 stores everything as float32 and does not round the operands of products. It is meant for
	// checks.
	Float32 Precision = iota
	// BFloat16 stores activations and the operands of products as bfloat16. It is meant for training.
	BFloat16
	// Float16 stores activations and operands as float16, which has three more bits of precision and a
	// smaller range. The loss is scaled so that gradients stay within that range: see
	// [Machine.LossScale]. [Machine.Value] returns gradients without the scale.
	Float16
	// Float8 is like BFloat16, except for the products of linear layers: [op.Linear] and [op.SiLUMLP],
	// forward and for the gradient of their input. It rounds the operands of these products to float8
	// (E4M3), with one scale for each row of tokens and each row of weights.
	//
	// Gradients of weights, the output layer with its loss ([op.LinearCrossEntropy]) and all other ops
	// compute as with BFloat16. So do products with fewer than 128 rows of tokens and products with sizes
	// that are not multiples of 16.
	//
	// Float8 needs compute capability 9.0 and cuBLASLt 12.9; NewMachine returns [ErrUnsupportedPrecision]
	// without them.
	Float8
)

var precisionNames = []string{Float32: "f32", BFloat16: "bf16", Float16: "f16", Float8: "f8"}

// storedAs gives the type of stored activations for each precision.
var storedAs = []gpu.DType{Float32: gpu.Float32, BFloat16: gpu.BFloat16, Float16: gpu.Float16,
	Float8: gpu.BFloat16}

// String returns the precision's name: f32, bf16, f16 or f8.
func (p Precision) String() string {
	return enum.Name(p, "Precision", precisionNames)
}

// MarshalText returns the precision's name.
func (p Precision) MarshalText() ([]byte, error) {
	if int(p) >= len(precisionNames) {
		return nil,
			fmt.Errorf("cudaops.Precision: %d has no name, want Float32, BFloat16, Float16 or "+
				"Float8", uint8(p))
	}
	return []byte(precisionNames[p]), nil
}

// UnmarshalText parses a precision's name, so that a Precision can be used with flag.TextVar.
func (p *Precision) UnmarshalText(text []byte) error {
	i := slices.Index(precisionNames, string(text))
	if i < 0 {
		return fmt.Errorf("cudaops.Precision: got %q, want f32, bf16, f16 or f8", text)
	}
	*p = Precision(i)
	return nil
}

// WithPrecision sets the precision. The default is Float32.
func WithPrecision(p Precision) MachineOption {
	return func(c *machineConfig) error {
		if int(p) >= len(storedAs) {
			return fmt.Errorf("WithPrecision: got %d, want Float32, BFloat16, Float16 or Float8", p)
		}
		c.Activation, c.Scaled, c.Float8 = storedAs[p], p == Float16, p == Float8
		return nil
	}
}

// WithGradientPrecision sets the type of the gradients of weights that are stored for [Machine.Update].
// The default is Float32.
//
// BFloat16 rounds each gradient once, when the product that computes it is complete. Gradients then take
// half the memory, and a step of a large model takes less time because it writes and reads fewer bytes.
// In exchange, the gradients that the optimizer adds to its moments have three significant digits instead
// of seven. It can be combined with the precisions BFloat16 and Float8.
//
// BFloat16 applies to gradients that are computed by one product of an [op.Linear] or an [op.SiLUMLP] and
// read only by the update. The remaining gradients stay float32: gradients of other ops such as the
// output layer, gradients of weights used several times, and nodes named in [WithOutputs]. With
// [WithAccumulation], which adds gradients up, every gradient stays float32. [Machine.Value] always
// returns float32.
func WithGradientPrecision(p Precision) MachineOption {
	return func(c *machineConfig) error {
		if p != Float32 && p != BFloat16 {
			return fmt.Errorf("WithGradientPrecision: got %v, want Float32 or BFloat16", p)
		}
		c.grads, c.Gradient = p, storedAs[p]
		return nil
	}
}

// WithAccumulation adds up the gradients of parameters over several runs until [Machine.Update], which
// applies the sums, or drops them if they are not finite. Without this option, Update applies the
// gradients of the last run. After a run that failed, call [Machine.DropGradients].
func WithAccumulation() MachineOption {
	return setting(func(c *machineConfig) { c.Accumulate = true })
}

// WithLogger sets the logger for warnings. The default, also for nil, is slog.Default().
func WithLogger(l *slog.Logger) MachineOption {
	return setting(func(c *machineConfig) { c.variants.Logger = cmp.Or(l, slog.Default()) })
}

// float8Blas is the first version of cuBLASLt that supports one scale per row, and float8Capability the
// first compute capability. To check the support, products with sides of float8Side are planned.
const float8Blas, float8Capability, float8Side = 120900, 90, 128

// checkFloat8 returns an error if the precision is Float8 but the GPU or its cuBLASLt does not support
// float8 products with one scale per row.
func checkFloat8(d *Device, c *machineConfig) error {
	if !c.Float8 {
		return nil
	}

	blas, err := d.ctx.Blas()
	if err != nil {
		return err
	}

	info := d.info
	if info.Capability() >= float8Capability && blas.Version() >= float8Blas {
		const t = gpu.Float8E4M3
		_, err := blas.Plan(gpu.MatmulSpec{M: float8Side, N: float8Side, K: float8Side,
			TransB: true, A: t, B: t, D: c.Activation}, run.WorkspaceBytes, 1)
		if !errors.Is(err, gpu.BlasNotSupported) && !errors.Is(err, gpu.BlasInvalidValue) {
			return err
		}
	}

	return fmt.Errorf("WithPrecision(Float8): %w: it requires float8 products with one scale "+
		"per row, which need compute capability %d.%d and cuBLASLt 12.9 or later; this is %s with "+
		"compute capability %d.%d and cuBLASLt %d.%d: use BFloat16", ErrUnsupportedPrecision,
		float8Capability/10, float8Capability%10, info.Name, info.Major, info.Minor,
		blas.Version()/10000, blas.Version()/100%100)
}
