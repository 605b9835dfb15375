package cudaops

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/cudaops/internal/choose"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/cudaops/internal/update"
	"github.com/kasmina-go/kasmina/internal/enum"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/optim"
)

type machineConfig struct {
	lower.Options
	variants choose.Config
	apart    gorgonia.Nodes // of Params
	read     run.Reader     // of frozen ones that have no value; nil for none
	share    *Machine
	stream   gpu.Stream // adopted; 0 for one of the machine's own
	grads    Precision  // asked for by WithGradientPrecision
	single   bool       // the graph is an op of another machine's
	// stands before the device's kernels, in tests; nil for none
	kernels func(run.Launcher) run.Launcher

	ranks *update.Ranks // that make updates together; nil for the only one

	// rules are those of the optimizer that SetOptimizer will be given, or nil if it is not known yet.
	rules optim.Rules
	kept  *run.Kept // of a machine before
	// its names of parameters, by those here
	inherits map[string]string

	monitor      int
	limit        int // bytes within which the machine saves time with memory; 0 for the device's
	ceilingBytes int // of the copy that measures the card; 0 for the usual
}

// configOf gathers the options.
func configOf(d *Device, g *gorgonia.ExprGraph, opts []MachineOption) (machineConfig, error) {
	c := machineConfig{kept: run.NewKept(d.ctx)}
	c.variants.Logger = slog.Default()
	for _, opt := range opts {
		if opt == nil {
			return c, errors.New("an option is nil")
		}
		if err := opt(&c); err != nil {
			return c, err
		}
	}

	logger, logged := c.variants.Logger, map[string]bool{}
	c.Warn = func(message string) { // once
		if !logged[message] {
			logged[message] = true
			logger.Warn("cudaops: " + message)
		}
	}

	c.Device, c.Timed = d.info, c.monitor > 0
	if s := c.share; s != nil {
		c.Shared, c.SharedParams = s.runner.Program, s.config.Params
	}

	stray := slices.IndexFunc(c.apart, func(n *gorgonia.Node) bool {
		return !slices.Contains(c.Params, n)
	})
	switch {
	case stray >= 0:
		return c, fmt.Errorf("WithApart: %s is no parameter: name it in WithParams too",
			graph.Describe(c.apart[stray]))
	case c.missing() != "":
		return c, fmt.Errorf("WithKept: another machine has left %s to the next", c.missing())
	case c.kept.Ctx != d.ctx:
		return c, errors.New("WithKept: what was kept is on another device")
	case c.share != nil && c.share.device != d:
		return c, errors.New("WithParamsOf: the other machine is on another device")
	case c.grads != Float32 && c.Activation != gpu.BFloat16:
		return c, fmt.Errorf("WithGradientPrecision(%v) goes with the precisions BFloat16 and "+
			"Float8, and WithPrecision has %v: leave out one of them",
			c.grads, Precision(slices.Index(storedAs, c.Activation)))
	}

	return c, run.InTurn(func() error { return c.Within(g) },
		func() error { return checkFloat8(d, &c) }, func() error { return setVariants(d, &c) })
}

// MachineOption is an option of NewMachine.
type MachineOption func(*machineConfig) error

// setting is an option that takes anything.
func setting(set func(*machineConfig)) MachineOption {
	return func(c *machineConfig) error {
		set(c)
		return nil
	}
}

// WithRanks makes the machine one of several, one for each rank of a group, that train a model by the
// sum of their gradients: see [Machine.Rank]. Each rank has the moments of its part of the parameters
// and updates this part. Matrices that an optimizer updates as a whole are not divided. The group's
// device is the machine's. Collectives are captured with the update.
//
// A step consists of the given number of rounds of all ranks, or any number if rounds is 0. If a step
// is one round of two ranks and no matrix is updated as a whole, the update reads both contributions to
// a gradient. Otherwise the contributions are added up in memory.
//
// The bits of an update do not depend on the number of ranks, provided that all ranks compute the graph
// in the same variants. They do without tuning, or with the choices of one of them ([WithChoices]). Updates
// are not tuned, since each rank updates something else.
func WithRanks(group comm.Group, rounds int) MachineOption {
	return func(c *machineConfig) error {
		switch {
		case group == nil:
			return errors.New("WithRanks: the group is nil")
		case rounds < 0:
			return fmt.Errorf("WithRanks: got %d rounds, want at least 1, or 0 for any number",
				rounds)
		}
		c.ranks = &update.Ranks{Group: group, Rounds: rounds}
		return nil
	}
}

// WithParams names inputs that are parameters: their values are copied to the device once, by
// NewMachine, and live there. [Machine.Upload] copies a value that the host has changed,
// [Machine.Download] copies them back into their nodes. Their gradients, if the graph has them, are
// kept for [Machine.Value].
func WithParams(params ...*gorgonia.Node) MachineOption {
	return func(c *machineConfig) error { return c.AddParams(params...) }
}

// WithApart names parameters (see [WithParams]) whose gradients are clipped apart. They have a norm
// of their own, and are not in that of the others, which Update returns. So what has been added to
// a model does not change how the model learns. Where all are apart none is.
func WithApart(params ...*gorgonia.Node) MachineOption {
	return func(c *machineConfig) error {
		if slices.Contains(params, nil) {
			return errors.New("WithApart: a node is nil")
		}
		c.apart = append(c.apart, params...)
		return nil
	}
}

// WithFrozen names inputs that are parameters, as [WithParams] does, and never change. They are
// those of a model that answers, or of a base under what is trained. One that ops read as
// activations alone, as matrices are, is kept in that type, without a float32 master: two bytes
// each in BFloat16. [Machine.Value] returns what is kept. A node needs no value where read has it.
// It hands its elements to put, in order and in pieces of any size, as little-endian numbers of
// type Float32, Float16 or BFloat16. NewMachine calls read for several nodes at once, and its error
// is NewMachine's.
func WithFrozen(read func(n *gorgonia.Node, put func(part []byte, t Precision) error) error,
	params ...*gorgonia.Node) MachineOption {
	return func(c *machineConfig) error {
		c.Frozen = append(c.Frozen, params...)
		if read != nil {
			c.read = func(n *gorgonia.Node, put func([]byte, gpu.DType) error) error {
				return read(n, func(part []byte, t Precision) error {
					if t >= Float8 {
						return fmt.Errorf("numbers of type %v, want Float32, Float16 or BFloat16", t)
					}
					return put(part, storedAs[t])
				})
			}
		}
		return c.AddParams(params...)
	}
}

// WithParamsOf makes inputs that have the name and shape of another machine's parameters use its
// memory, without a copy. That is for a graph that evaluates a model, beside the one that trains
// it. The other machine must be on the same device and be closed later. Runs of the two must not
// overlap: have a value of one before running the other.
func WithParamsOf(other *Machine) MachineOption {
	return func(c *machineConfig) error {
		if err := usable(other); err != nil {
			return fmt.Errorf("WithParamsOf: %w", err)
		}
		c.share = other
		return nil
	}
}

// WithOutputs names nodes whose values shall outlive a run, for [Machine.Value]. Those that no
// other node needs do so anyway.
func WithOutputs(outputs ...*gorgonia.Node) MachineOption {
	return func(c *machineConfig) error { return c.AddOutputs(outputs...) }
}

// WithStream makes a machine put all its work on a stream that the program made elsewhere, in the
// device's context: handle is a CUstream. What was put there before a run is done before it, and
// what is put there after it sees its results. It must not be one of the default streams, whose
// work cannot be captured. The machine does not destroy it; it must outlive the machine.
func WithStream(handle uintptr) MachineOption {
	return func(c *machineConfig) error {
		const perThread = 2 // CU_STREAM_PER_THREAD; 0 and 1 are the stream that all threads share
		if handle <= perThread {
			return fmt.Errorf("WithStream: got %d, a default stream, whose work cannot be "+
				"captured; make one with cuStreamCreate", handle)
		}
		c.stream = gpu.Stream(handle)
		return nil
	}
}

// WithOptimizer tells the machine which optimizer it will be given by [Machine.SetOptimizer]. A machine
// that may spend memory to save time then leaves room for the moments that the optimizer's rules declare.
// Without this option it leaves room for AdamW's, two float32 numbers for each parameter.
func WithOptimizer(o optim.Rules) MachineOption {
	return setting(func(c *machineConfig) { c.rules = o })
}

// momentBytes returns the memory that the optimizer's moments of a parameter of n elements take.
func (c *machineConfig) momentBytes(param *gorgonia.Node, n int) int {
	if c.rules == nil {
		return 2 * 4 * n
	}
	return c.rules.Rule(param.Name(), param.Shape()).Kernel.Bytes(n, 4)
}

// WithMemory has the machine spend memory to save time only as far as it takes no more than so many
// bytes of the device with it, counting the moments of the optimizer ([WithOptimizer]). What it cannot do without it takes in
// any case. The default is what leaves the device some memory: see [Machine].
func WithMemory(bytes int) MachineOption {
	return func(c *machineConfig) error {
		if bytes < 1 {
			return fmt.Errorf("WithMemory: got %d bytes, want at least 1", bytes)
		}
		c.limit = bytes
		return nil
	}
}

// WithStrict makes a node that has no kernel an error of NewMachine instead of a detour through the
// host.
func WithStrict() MachineOption {
	return setting(func(c *machineConfig) { c.Strict = true })
}

// Precision is how a machine stores and computes what a graph says in float32.
type Precision uint8

// The precisions. Parameters, sums and losses are float32 in all of them, and so are gradients of
// parameters unless [WithGradientPrecision] says otherwise.
const (
	// Float32 stores everything as float32 and rounds no operand of a product: for checking.
	Float32 Precision = iota
	// BFloat16 stores activations and the operands of products as bfloat16: for training.
	BFloat16
	// Float16 stores them as float16, which has three more bits and a smaller range, and scales the
	// loss, so that gradients stay in that range: [Machine.LossScale]. Gradients that
	// [Machine.Value] returns are without the scale.
	Float16
	// Float8 is BFloat16 but for products of linear layers: [op.Linear] and [op.SiLUMLP], forward
	// and for the gradient of their input. It rounds their operands to float8 (E4M3), each row of
	// tokens and of weights with a scale of its own. Gradients of weights, the output layer with
	// its loss ([op.LinearCrossEntropy]) and all other ops are as with BFloat16. So are products
	// with fewer than 128 rows of tokens or other sizes that are no multiples of 16. It needs
	// compute capability 9.0 and cuBLASLt 12.9: else NewMachine returns [ErrUnsupportedPrecision].
	Float8
)

var precisionNames = []string{Float32: "f32", BFloat16: "bf16", Float16: "f16", Float8: "f8"}

// storedAs is how activations are stored.
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

// UnmarshalText takes a precision's name, so that flag.TextVar can have one as a value.
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

// WithGradientPrecision sets how gradients of weights are kept for [Machine.Update]. The default,
// Float32, keeps them as they were added up. BFloat16 rounds each sum once, when the product that
// forms it is done. Gradients take half the memory, and a step of a large model, which writes and
// reads them, takes less time. What the optimiser adds to its moments then has three digits in
// place of seven. It goes with the precisions BFloat16 and Float8. It is for gradients that one
// product of an [op.Linear] or an [op.SiLUMLP] forms and nothing but the update reads. Others stay
// float32: those of other ops, such as the output layer, of weights that serve several, and of
// nodes that [WithOutputs] names. So do all in a machine made [WithAccumulation], which adds them
// up. [Machine.Value] returns float32 in any case.
func WithGradientPrecision(p Precision) MachineOption {
	return func(c *machineConfig) error {
		if p != Float32 && p != BFloat16 {
			return fmt.Errorf("WithGradientPrecision: got %v, want Float32 or BFloat16", p)
		}
		c.grads, c.Gradient = p, storedAs[p]
		return nil
	}
}

// WithAccumulation makes the gradients of parameters add up from run to run until [Machine.Update],
// which applies them, or drops them where they are not finite. Without it Update applies those of
// the last run. After an error of a run drop what is gathered: [Machine.DropGradients].
func WithAccumulation() MachineOption {
	return setting(func(c *machineConfig) { c.Accumulate = true })
}

// WithLogger sets where warnings go. The default, which nil stands for, is slog.Default().
func WithLogger(l *slog.Logger) MachineOption {
	return setting(func(c *machineConfig) { c.variants.Logger = cmp.Or(l, slog.Default()) })
}

// float8Blas is the first cuBLASLt that has a factor for each row, and float8Capability the first
// GPU. The sides of a product that is tried are float8Side.
const float8Blas, float8Capability, float8Side = 120900, 90, 128

// checkFloat8 returns an error where the card or its library has no products of float8 with a
// factor for each row.
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

	return fmt.Errorf("WithPrecision(Float8): %w: it takes products of float8 with a factor for "+
		"each row, which a GPU of compute capability %d.%d and cuBLASLt 12.9 or later have; this "+
		"is %s, of %d.%d, with cuBLASLt %d.%d: use BFloat16", ErrUnsupportedPrecision,
		float8Capability/10, float8Capability%10, info.Name, info.Major, info.Minor,
		blas.Version()/10000, blas.Version()/100%100)
}
