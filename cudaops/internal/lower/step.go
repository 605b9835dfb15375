package lower

import (
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/decode"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// A graph that decodes one token consists of many short calls, and each call has to wait until all
// multiprocessors have finished the previous one. Consecutive calls that fit in a single kernel, usually
// the entire graph, are therefore joined; see [decode.Step].

// joinSteps joins consecutive calls that a decode.Step supports, provided that they include attention to
// cached keys.
func (c *compiler) joinSteps() {
	calls := c.Calls
	c.Calls = nil
	for len(calls) > 0 {
		n := 0
		for n < len(calls) && decode.Supports(launchOf(calls[n]), c.o.Device) {
			n++
		}
		if joint := c.joined(calls[:n], calls); joint != nil {
			c.Calls = append(c.Calls, joint)
		} else {
			n = max(n, 1)
			c.Calls = append(c.Calls, calls[:n]...)
		}
		calls = calls[n:]
	}
}

// launchOf returns a copy of a call's launch with placeholder addresses for its operands.
func launchOf(c *program.Call) any { return c.Bind((*program.Array).StandIn) }

// joined returns a single call that replaces the given calls, or nil if they should remain separate. all
// consists of these calls and the calls after them.
func (c *compiler) joined(calls, all []*program.Call) *program.Call {
	attends := false
	for _, call := range calls {
		switch call.Params.(type) {
		case *decode.Attention, *decode.Paged:
			attends = true
		}
	}
	if !attends || c.needsHidden(calls, all) {
		return nil
	}

	// Check must recognize calls that use the same memory, so give each buffer a different address.
	numbers := map[*program.Buffer]int{}
	place := func(a *program.Array) gpu.Ptr {
		if numbers[a.Buffer] == 0 {
			numbers[a.Buffer] = 1 + len(numbers)
		}
		return gpu.Ptr(numbers[a.Buffer])<<40 + gpu.Ptr(a.At)
	}

	step := new(decode.Step)
	table := c.NewResident(gpu.Uint8, decode.TableBytes(len(calls)))
	arrived := c.NewConstant(make([]float32, decode.Counters))
	joint := program.Join(calls, step, func(launches []any) any {
		s := *step
		s.Launches = launches
		return s
	}, program.Reads(&step.Table, table), program.Updates(&step.Arrived, arrived))
	if joint.Bind(place).(decode.Step).Check(c.o.Device) != nil || !c.prefers(joint, step, calls) {
		c.drop(table, arrived)
		return nil
	}

	table.Buffer.Table = func() ([]byte, error) {
		return joint.Bind((*program.Array).Ptr).(decode.Step).Encode(c.o.Device)
	}
	joint.Op, joint.Node, joint.Layer = "DecodeStep", "the decoding of a token", ""
	return joint
}

// prefers reports whether the chooser prefers the joint call to separate ones, and sets its variant. The
// calls cannot be timed without realistic contents of the cache, so separate calls are used unless a rule
// selects a joint one.
func (c *compiler) prefers(joint *program.Call, step *decode.Step, calls []*program.Call) bool {
	const notWorthTiming = 1
	one := []*program.Call{joint}
	i, choice, err := c.o.Choose(program.Group{Op: "DecodeStep", Shape: fmt.Sprintf("%d calls", len(calls)),
		FLOPs: notWorthTiming, Alternatives: []program.Alternative{{Name: "separate", Calls: calls},
			{Name: "lanes", Calls: one}, {Name: "bulk", Calls: one}}})
	c.fail(err)
	step.Lanes = i == 1
	joint.Choice = choice
	return err == nil && i > 0
}

// needsHidden reports whether anything other than the given calls reads a result that a decode.Step does
// not write: the statistics of a norm, or its weights plus 1. all consists of the given calls and the
// calls after them.
func (c *compiler) needsHidden(calls, all []*program.Call) bool {
	hidden := map[*program.Buffer]bool{}
	for _, call := range calls {
		var field *gpu.Ptr
		switch l := call.Params.(type) {
		case *norm.RMSNorm:
			field = &l.Rstd
		case *norm.LayerNorm:
			field = &l.Stats
		case *elementwise.Unary:
			if l.Op == elementwise.AddScalar && l.Type == gpu.Float32 {
				field = &l.Y
			}
		}
		if field == nil {
			continue
		}
		if arg := call.Operand(field); arg != nil {
			hidden[arg.Buffer] = true
		}
	}

	for n := range c.lasting {
		if a := c.Values[n]; a != nil && hidden[a.Buffer] {
			return true
		}
	}

	return slices.ContainsFunc(all[len(calls):], func(call *program.Call) bool {
		return slices.ContainsFunc(call.Args, func(a program.Arg) bool { return hidden[a.Buffer] })
	})
}

// drop removes the buffers of unused arrays.
func (c *compiler) drop(arrays ...*program.Array) {
	c.Buffers = slices.DeleteFunc(c.Buffers, func(b *program.Buffer) bool {
		return slices.ContainsFunc(arrays, func(a *program.Array) bool { return a.Buffer == b })
	})
}
