package site_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/site"
)

// register registers a blueprint in the stream with the given graph.
func register(t *testing.T, name string, build site.Build) blueprints.Kind {
	t.Helper()
	k, err := site.Register(blueprints.Blueprint{Name: t.Name() + name, Site: blueprints.Stream,
		Parameters: func(blueprints.Host, int) ([]blueprints.Parameter, error) { return nil, nil }}, build)
	require.NoError(t, err)
	return k
}

func matrix(g *gorgonia.ExprGraph, name string, shape ...int) *gorgonia.Node {
	return gorgonia.NewTensor(g, tensor.Float64, len(shape), gorgonia.WithShape(shape...), gorgonia.WithName(name))
}

// TestApply checks that a registered graph is added to that of x, and that graphs with other results, errors
// and panics are rejected by name.
func TestApply(t *testing.T) {
	x := matrix(gorgonia.NewGraph(), "x", 3, 4)
	double := register(t, "double", func(x *gorgonia.Node, params gorgonia.Nodes, size int) (*gorgonia.Node, error) {
		require.Equal(t, 5, size)
		return gorgonia.Add(x, params[0])
	})
	y, err := site.Apply(double, x, gorgonia.Nodes{x}, 5)
	require.NoError(t, err)
	require.Equal(t, x.Shape(), y.Shape())
	require.Same(t, x.Graph(), y.Graph())

	for want, build := range map[string]site.Build{
		"its graph is nil": func(*gorgonia.Node, gorgonia.Nodes, int) (*gorgonia.Node, error) { return nil, nil },
		"gives float64 of shape (12), want float64 of shape (3, 4)": func(x *gorgonia.Node, _ gorgonia.Nodes,
			_ int) (*gorgonia.Node, error) {
			return gorgonia.Reshape(x, tensor.Shape{12})
		},
		"boom": func(*gorgonia.Node, gorgonia.Nodes, int) (*gorgonia.Node, error) { panic("boom") },
	} {
		_, err := site.Apply(register(t, want, build), x, nil, 1)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, t.Name()+want)
	}

	_, err = site.Apply(blueprints.Stack, x, nil, 1)
	require.ErrorContains(t, err, "has no graph")
}

// TestRegister checks that a blueprint needs a graph and a site where graphs grow.
func TestRegister(t *testing.T) {
	same := func(x *gorgonia.Node, _ gorgonia.Nodes, _ int) (*gorgonia.Node, error) { return x, nil }
	_, err := site.Register(blueprints.Blueprint{Name: "no graph", Site: blueprints.Stream}, nil)
	require.ErrorIs(t, err, blueprints.ErrInvalid)
	_, err = site.Register(blueprints.Blueprint{Name: "in depth", Site: blueprints.Depth}, same)
	require.ErrorIs(t, err, blueprints.ErrInvalid)
	_, err = site.Register(blueprints.Blueprint{Name: "without parameters", Site: blueprints.Weight}, same)
	require.ErrorContains(t, err, "Parameters")
}
