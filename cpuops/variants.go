package cpuops

import (
	"fmt"
	"log/slog"
	"strings"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/variantrule"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optime"
)

// The variants that rules can choose.
const (
	gorgoniaVariant = "gorgonia" // the op's own Do, which allocates its result
	fusedVariant    = "fused"    // a product and the sum that follows it, in one pass
	separateVariant = "separate"
)

// linearAddOp is the name of the op that combines a product and a sum.
const linearAddOp = "LinearAdd"

// WithVariants forces or forbids variants of ops. A rule has the form OP=VARIANT or OP!=VARIANT, with
// names as in [Machine.Choices] and the wildcards of [path.Match]:
//
//	cpuops.WithVariants("LinearAdd=separate", "+*=gorgonia")
//
// Gorgonia's elementwise arithmetic uses vector instructions, or Gorgonia's own code in the variant
// gorgonia. A product and the sum that follows it are either fused or separate. Both choices give
// bit-identical results. Every other op has a single variant, which depends on the processor (see
// KASMINA_CPU and [UseBFloat16]).
//
// The environment variable KASMINA_VARIANTS, a comma-separated list of rules, adds to these rules and
// takes precedence.
//
// Unlike package cudaops, this package does not time variants to choose between them, because at the
// sizes used in training no other variant was even 1% faster.
func WithVariants(rules ...string) Option {
	return func(c *config) error {
		parsed, err := variantrule.Parse(rules)
		if err != nil {
			return fmt.Errorf("WithVariants: %w", err)
		}
		c.rules = append(c.rules, parsed...)
		return nil
	}
}

// variant returns the first variant of an op that the rules allow. The variants are in order of
// preference.
func (c *compiler) variant(op string, variants ...string) string {
	left, _ := c.rules.Allowed(op, variants, func(message string) {
		if !c.warned[message] {
			c.warned[message] = true
			slog.Warn("cpuops: " + message)
		}
	})
	return variants[left[0]]
}

// Choices returns the variants of the machine's ops, one entry for each op and shape, in the order of
// execution.
func (m *Machine) Choices() []optime.Choice {
	var choices []optime.Choice
	seen := map[string]bool{}
	for i := range m.program.steps {
		s := &m.program.steps[i]
		if s.idle() {
			continue
		}
		c := optime.Choice{Op: s.name(), Shape: s.shapes(), Source: optime.ByRule}
		if seen[c.Op+" "+c.Shape] {
			continue
		}
		seen[c.Op+" "+c.Shape] = true
		if c.Variants = s.variants; len(s.variants) == 0 {
			c.Variants = []string{s.soleVariant()}
		}
		c.Of, c.Variant = len(c.Variants), c.Variants[0]
		if s.variant != "" {
			c.Variant = s.variant
		}
		if _, forced := m.config.rules.Allowed(c.Op, c.Variants, func(string) {}); forced {
			c.Source = optime.Forced
		}
		choices = append(choices, c)
	}

	return choices
}

// describe returns a step's node and layer for error messages.
func (s *step) describe() string {
	if s.layer == "" {
		return graph.Describe(s.node)
	}
	return graph.Describe(s.node) + " of " + s.layer
}

// idle reports whether a step does nothing because it was merged into another one.
func (s *step) idle() bool { return s.args == nil }

// name returns the name of a step's op: for an op of Gorgonia, its description.
func (s *step) name() string {
	switch {
	case s.out == nil:
		return "Accumulate"
	case s.fused:
		return linearAddOp
	}
	return graph.OpName(s.node)
}

// shapes describes the shapes that a step reads and the type of its first operand.
func (s *step) shapes() string {
	var b strings.Builder
	for i, v := range s.in {
		if i > 0 {
			b.WriteString(", ")
		}
		if len(v.shape) == 0 {
			b.WriteString("scalar")
		}
		for k, n := range v.shape {
			if k > 0 {
				b.WriteByte('x')
			}
			fmt.Fprint(&b, n)
		}
	}

	if len(s.in) > 0 {
		fmt.Fprintf(&b, " %v", s.in[0].dt)
	}

	return b.String()
}

// soleVariant returns the variant of a step that has a single variant: the instruction set, and "bf16" if
// products round their operands, or the type of compact weights.
func (s *step) soleVariant() string {
	if baseOf(s.node) == nil && s.out != nil {
		return gorgoniaVariant
	}
	variant := cpu.Level().String()
	if m, n, k := s.product(); s.in[0].dt == tensor.Float32 && gemm.Rounds(m, n, k) {
		variant += " bf16"
	}
	for _, v := range s.in {
		if w, ok := v.flat.(*gemm.Compact); ok {
			return variant + " " + w.Type.String()
		}
	}
	return variant
}

// product returns the size of a step's forward products, m×k by k×n, or zeros if it has none.
func (s *step) product() (m, n, k int) {
	shape := func(i int) tensor.Shape { return s.in[i].shape }
	if s.out == nil {
		return 0, 0, 0
	}

	switch s.node.Op().(type) {
	case *op.LinearOp, *op.LinearGradOp, *op.AdaptedLinearOp:
		return shape(0)[0], shape(1)[0], shape(0)[1]
	case *op.AdaptedLinearGradOp:
		return shape(0)[0], shape(3)[0], shape(0)[1]
	case *op.LinearInputGradOp:
		return shape(0)[0], shape(1)[1], shape(0)[1]
	case *op.SiLUMLPOp, *op.SiLUMLPGradOp:
		return shape(0)[0], shape(1)[0], shape(0)[1]
	case *op.LinearCrossEntropyOp, *op.LinearCrossEntropyGradOp:
		return shape(0)[0], shape(1)[0], shape(0)[1]
	}

	return 0, 0, 0
}

// flops returns the number of multiplications and additions in a step's matrix products and attention.
func (s *step) flops() float64 {
	if s.out == nil {
		return 0
	}

	m, n, k := s.product()
	one := 2 * float64(m) * float64(n) * float64(k)
	if s.fused {
		x, w := s.in[1].shape, s.in[2].shape
		return 2 * float64(x[0]) * float64(x[1]) * float64(w[0])
	}

	switch o := s.node.Op().(type) {
	case *op.LinearOp, *op.LinearCrossEntropyOp:
		for _, p := range s.also {
			one += 2 * float64(m) * float64(p.w.Out) * float64(k)
		}
		return one
	case *op.LinearInputGradOp, *op.AdaptedLinearOp, *op.AdaptedLinearGradOp:
		return one // without the adapters
	case *op.LinearGradOp:
		return 2 * one
	case *op.SiLUMLPOp, *op.LinearCrossEntropyGradOp: // which recomputes the logits
		return 3 * one
	case *op.SiLUMLPGradOp:
		return 6 * one
	case *op.AttentionOp:
		return attentionFLOPs(o, 2)
	case *op.AttentionGradOp:
		return attentionFLOPs(o.Forward, 5)
	}

	return 0
}

// attentionFLOPs returns the number of operations of the given number of matrix products in an attention.
// A causal mask halves it.
func attentionFLOPs(o *op.AttentionOp, products int) float64 {
	c := o.Config
	rows := o.InputShape(0)[0]
	n := 2 * float64(products) * float64(rows) * float64(c.Heads) *
		float64(c.Seq) * float64(c.HeadDim)
	if c.Causal {
		n /= 2
	}
	return n
}

// bytes returns the number of bytes that a step reads or writes, each counted once.
func (s *step) bytes() (n int) {
	for _, v := range s.in {
		n += elementSize(v.dt) * opbase.Size(v.shape)
	}
	if s.out != nil {
		n += elementSize(s.out.dt) * opbase.Size(s.out.shape)
	}
	return n
}
