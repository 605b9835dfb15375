// Package passtest supports tests of single compiler passes. It lowers a small graph, places it on a fake
// GPU, and records the launches.
package passtest

import (
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/choose"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/cudaops/internal/place"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
)

// Rig is a program on a fake GPU of compute capability 9.0, where kernels do nothing.
type Rig struct {
	Ctx     *fake.Context
	Driver  *fake.Driver
	Program *program.Program
	Runner  *run.Runner
	Chooser *choose.Chooser

	// Launches records the launches with their addresses.
	Launches []any
	// Warnings records the warnings.
	Warnings []string
}

// Lower lowers a graph without running it. Variants are chosen by rule, and the activation type is
// float32 unless o specifies another.
func Lower(t testing.TB, g *gorgonia.ExprGraph, o lower.Options) *program.Program {
	t.Helper()
	return New(t, g, o).Program
}

// New lowers a graph and returns a rig for its program.
func New(t testing.TB, g *gorgonia.ExprGraph, o lower.Options) *Rig {
	t.Helper()
	d := fake.New(fake.Config{Images: kerneltest.Kernels})
	ctx, err := d.Retain(0)
	require.NoError(t, err)
	r := &Rig{Ctx: ctx.(*fake.Context), Driver: d}
	set := kernel.New(ctx)
	x := &run.Executor{Ctx: ctx, Kernels: &recorder{set, r}, Memory: &run.Memory{Ctx: ctx}}
	x.Stream, err = ctx.NewStream(false)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, run.Joined(x.Memory.Close(), set.Close())) })

	r.Chooser = choose.New(x, choose.Config{Mode: choose.Off, Device: ctx.Device(),
		Logger: slog.New(slog.DiscardHandler), Warn: r.warn})
	o.Device, o.Chooser, o.Warn = ctx.Device(), r.Chooser, r.warn
	if o.OnHost == nil {
		o.OnHost = func(string) bool { return false }
	}

	p, lasting, err := lower.Lower(g, o)
	require.NoError(t, err)
	require.NoError(t, r.Chooser.Program(p))
	r.Program = p

	var kept []*program.Array
	for _, n := range lasting {
		kept = append(kept, p.Values[n])
	}

	place.Arena(p, kept)
	require.NoError(t, x.Memory.Place(p, "a test"))
	r.Runner = &run.Runner{Executor: x, Program: p}
	r.Runner.Scale.Current.Scale = 1
	r.Runner.Inputs, err = run.NewInputs(x, p, nil)
	require.NoError(t, err)
	x.Host = r.Runner.ComputeOnHost
	return r
}

func (r *Rig) warn(message string) { r.Warnings = append(r.Warnings, message) }

// recorder is a kernel set that records launches.
type recorder struct {
	*kernel.Set
	rig *Rig
}

// Launch records a launch, and enqueues a kernel that does nothing.
func (k *recorder) Launch(s gpu.Stream, params any) error {
	k.rig.Launches = append(k.rig.Launches, params)
	return k.Set.Launch(s, params)
}

// Types returns the types of launches in the form package.Type.
func Types(launches []any) (types []string) {
	for _, l := range launches {
		types = append(types, fmt.Sprintf("%T", l))
	}
	return types
}

// Calls describes each call of a program as a string with the op, the type of the launch, and the
// operands in order. The prefix w: marks operands that are written, and u: operands that are read and
// written. Inputs appear by name, and other operands by type and shape. Scratch memory is omitted.
func Calls(p *program.Program) (calls []string) {
	names := map[*program.Buffer]string{}
	for n, a := range p.Values {
		if a.Buffer != nil && n.Op() == nil && n.Name() != "" {
			names[a.Buffer] = n.Name()
		}
	}

	for _, c := range p.Calls {
		launch := strings.TrimPrefix(reflect.TypeOf(c.Params).String(), "*")
		text := []string{c.Op, launch}
		for _, a := range c.Args {
			role := map[program.Role]string{program.Write: "w:", program.Update: "u:"}[a.Role]
			if a.Role == program.Scratch {
				continue
			}
			name := names[a.Buffer]
			if name == "" {
				name = a.Type.String() + strings.ReplaceAll(fmt.Sprint(a.Shape), " ", ",")
			}
			text = append(text, role+name)
		}
		calls = append(calls, strings.Join(text, " "))
	}

	return calls
}

// Node returns a graph input filled with small numbers.
func Node(g *gorgonia.ExprGraph, name string, shape ...int) *gorgonia.Node {
	x := make([]float32, tensor.Shape(shape).TotalSize())
	for i := range x {
		x[i] = float32(i%7)/7 - 0.4
	}
	return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x)),
		gorgonia.WithName(name))
}

// Ints returns an integer input.
func Ints(g *gorgonia.ExprGraph, name string, x ...int) *gorgonia.Node {
	return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(len(x)), tensor.WithBacking(x)),
		gorgonia.WithName(name))
}
