// Package blueprints holds the kinds of blueprint that a Kasmina seed can train beside its chunk of
// the activations and blend in. For each it has the meaning of the parameters, the start as the
// identity, the transform t(x) and its gradient.
//
// Six kinds are built in. w is the weight row of the seed's slot and a is the slot's scale. Four
// kinds use one weight for each of the C features of a chunk:
//
//	Residual       t(x) = x + a·w
//	AttentionGate  t(x) = a · x ⊙ softmax(w)
//	MLPExpansion   t(x) = a · relu(x ⊙ w)
//	ConvFilter     t(x)[i] = a · (w0·x[i] + w1·x[i−1] + w2·x[i−2]), with zeros to the left of the chunk
//
// Two have the capacity to mix features. They are a matrix [m, C] and one [C, m], in the row w in
// this order. The width W of the layer's rows decides the rank or number of hidden features, m =
// ⌊W/2C⌋:
//
//	LowRank        t(x) = x + a·U(V·x), with V [m, C] and U [C, m]
//	ChunkMLP       t(x) = x + a·W2·silu(W1·x), with W1 [m, C] and W2 [C, m]
//
// Four make a model deeper. They have no weights of their own: the size of the germination request
// says by how much the blocks become more.
//
//	Stack       all blocks in order, size times over (Gong et al., "Efficient Training of BERT by
//	            Progressively Stacking", 2019)
//	Interleave  each block size times, one after the other
//	NewBlocks   size new blocks behind the last one, which start as the identity
//	Middle      the middle blocks in order, size times over, between the first third and the last
//
// One adds to the weight of a linear layer, and two to the residual stream at its full width. The
// size of the germination request is their rank, or how many heads or hidden features they have.
// Package llm/site has them as graphs.
//
//	LoRA        W' = W + s·B·A, with A [size, in] and B [out, size] (Hu et al., "LoRA: Low-Rank
//	            Adaptation of Large Language Models", 2021)
//	Attention   x + attention(norm(x)), of size heads
//	Perceptron  x + perceptron(norm(x)), of size hidden features
//
// [Register] adds more. The package knows nothing of graphs or tensors: everything works on the
// slices of one chunk row.
package blueprints

import (
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/kasmina-go/kasmina/internal/guard"
)

// Float is the element type of a transform's arithmetic.
type Float interface{ float32 | float64 }

// Kind identifies a registered blueprint. Built-in kinds have fixed numbers. Registered ones are
// numbered in the order of registration. So a program that stores kinds should store their names,
// as lattices do, and find them by [ByName].
type Kind uint8

// The built-in kinds.
const (
	Residual Kind = iota
	AttentionGate
	MLPExpansion
	ConvFilter
	LowRank
	ChunkMLP
	Stack
	Interleave
	NewBlocks
	LoRA
	Attention
	Perceptron
	Middle
)

// Homogeneity says how a transform behaves when its input is multiplied by a factor λ > 0. The
// adaptive stability mode needs it. That mode scales a chunk of very large activations down for the
// transform and the result up again, and must get t(x).
type Homogeneity uint8

const (
	// NotHomogeneous transforms have neither property. They are never given scaled input.
	NotHomogeneous Homogeneity = iota
	// InX: t(λx; w, a) = λ·t(x; w, a).
	InX
	// InXAndScale: t(λx; w, λa) = λ·t(x; w, a).
	InXAndScale
)

// Arithmetic is the transform of a blueprint and its gradient in one element type. x, t, g and dx
// hold the C elements of one chunk row. w, p and dp hold as many as the blueprint's Size says, or C
// if it has none. None overlap. p stands for what the transform uses of the weights: w itself, or
// what Prepare makes of it.
//
// The functions run on several goroutines at once, and must keep nothing from one call to the next.
// A panic in one of them ends the run of the graph with an error.
type Arithmetic[T Float] struct {
	// Prepare writes p, computed from w once for each seed and call rather than once a row. When
	// nil, p is w.
	Prepare func(p, w []T)
	// Forward writes t(x) to t.
	Forward func(t, x, p []T, a T)
	// Backward takes g = ∂L/∂t(x). It writes ∂L/∂x to dx, adds ∂L/∂p to dp and returns ∂L/∂a.
	Backward func(dx, dp, g, x, p []T, a T) float64
	// Finish turns dp, the sum of ∂L/∂p over all rows, into ∂L/∂w, in place. It is nil when Prepare
	// is.
	Finish func(dp, p []T)
}

// Blueprint describes one kind. One of site Depth has a Name, a Layout and an Order alone. One of
// site Weight or Stream has a Name, a Layout and Parameters: what it computes is a graph, which
// package llm/site registers with it.
type Blueprint struct {
	Name string // unique
	Site Site
	// Order is that of a blueprint of depth; see the function [Order].
	Order func(blocks, size int) []int
	// Parameters are those of a blueprint of a weight or the stream; see the function
	// [ParametersOf]. Built-in kinds have none: theirs are those of a model's own blocks.
	Parameters func(h Host, size int) ([]Parameter, error)

	Layout string // what the weights and the scale mean, for people
	// Size returns how many of a slot's width weights the kind uses for chunks of c features. If
	// they are too few, it returns how many it needs. It may grow with width. When nil, it is c.
	Size func(c, width int) int
	// Parts names the arrays that the n weights of a chunk of c features are, in order, as files
	// hold them. Their names differ, none is "" or "scale", and they have n elements in all. When
	// nil, they are one vector, "weights".
	Parts func(c, n int) []Part
	// Identity fills w, the weights that the kind uses of one slot, and returns a scale. With these
	// the transform of a chunk of c features is the identity, or as near to it as the kind can be.
	// Weights that must not all start alike come from r.
	Identity    func(w []float64, c int, r *rand.Rand) (scale float64)
	Homogeneity Homogeneity
	F32         Arithmetic[float32]
	F64         Arithmetic[float64]
	// Graph says that what a blueprint of a chunk computes is a graph, which llm/site.Register adds:
	// then it has no arithmetic here.
	Graph bool
}

// Part is one of the arrays that a slot's weights consist of.
type Part struct {
	Name  string
	Shape []int
}

// Parts returns the arrays that the first n weights of a slot are for a kind, as [Size] gave n for
// chunks of c features. It returns an error wrapping [ErrInvalid] when c or n is out of range or
// the blueprint's Parts are not as [Blueprint] says.
func Parts(k Kind, c, n int) ([]Part, error) {
	b, err := Lookup(k)
	if err != nil {
		return nil, err
	}
	if c < 1 || n < 0 {
		return nil, fmt.Errorf(
			"%w %q: %d weights for chunks of %d features, want at least 0 for at least 1",
			ErrInvalid, b.Name, n, c)
	}
	if b.Parts == nil {
		return []Part{{"weights", []int{n}}}, nil
	}
	var parts []Part
	if err := guarded(b, "Parts", func() { parts = b.Parts(c, n) }); err != nil {
		return nil, err
	}
	if err := checkParts(parts, n); err != nil {
		return nil, fmt.Errorf("%w %q: Parts(%d, %d): %w", ErrInvalid, b.Name, c, n, err)
	}
	return parts, nil
}

// scaleName is what files call the scale, beside the parts of the weights.
const scaleName = "scale"

func checkParts(parts []Part, n int) error {
	left := n
	names := map[string]bool{"": true, scaleName: true}
	for i, p := range parts {
		if names[p.Name] {
			return fmt.Errorf(
				"the name of part %d is %q, want names that differ, and none of them \"\" or %q",
				i, p.Name, scaleName)
		}
		names[p.Name] = true
		size := 1
		for _, d := range p.Shape {
			if d < 0 || d > 0 && size > n/d {
				return fmt.Errorf("part %q has shape %v, want at most %d elements", p.Name, p.Shape,
					n)
			}
			size *= d
		}
		left -= size
	}
	if left != 0 {
		return fmt.Errorf("they have %d elements, want %d", n-left, n)
	}
	return nil
}

// Errors that callers can test for with [errors.Is].
var (
	ErrUnknownKind = errors.New("unknown blueprint kind")
	ErrInvalid     = errors.New("invalid blueprint")
	ErrSlot        = errors.New("slot out of range")
	ErrWidth       = errors.New("slots are too narrow for the blueprint")
	ErrPanic       = errors.New("panic") // in a function of a registered blueprint
)

// guarded calls a function of a blueprint. When it panics, guarded returns an error wrapping
// [ErrPanic] that says where.
func guarded(b *Blueprint, function string, f func()) error {
	where := fmt.Sprintf("%s of blueprint %q", function, b.Name)
	return guard.Call(ErrPanic, where, func() error {
		f()
		return nil
	})
}

// maxKinds is how many kinds a Kind can number.
const maxKinds = 256

var (
	registering sync.Mutex
	registry    atomic.Pointer[[]*Blueprint] // replaced as a whole, so that readers need no lock
)

func init() { registry.Store(&builtin) }

// Register adds a blueprint and returns its kind. It returns an error wrapping [ErrInvalid] when
// the name is empty or taken, a function is missing, or 256 kinds are registered already. A GPU has
// no kernel for it: while a seed works with it, package cudaops computes that seed's layer on the
// host.
func Register(b Blueprint) (Kind, error) {
	if err := check(&b); err != nil {
		return 0, err
	}
	registering.Lock()
	defer registering.Unlock()
	kinds := *registry.Load()
	if k, ok := ByName(b.Name); ok {
		return 0, fmt.Errorf("blueprints.Register: %w: the name %q is taken by kind %d",
			ErrInvalid, b.Name, k)
	}
	if len(kinds) == maxKinds {
		return 0, fmt.Errorf(
			"blueprints.Register: %w: %d kinds are registered, which is all there can be",
			ErrInvalid, maxKinds)
	}
	grown := append(append([]*Blueprint(nil), kinds...), &b)
	registry.Store(&grown)
	return Kind(len(kinds)), nil
}

func check(b *Blueprint) error {
	var missing string
	switch {
	case b.Name == "":
		missing = "Name"
	case int(b.Site) >= len(siteNames):
		return fmt.Errorf("blueprints.Register: %w %q: Site is %v", ErrInvalid, b.Name, b.Site)
	case (b.Site == Weight || b.Site == Stream) && b.Parameters == nil:
		missing = "Parameters"
	case b.Site == Weight || b.Site == Stream:
		return nil
	case b.Site == Depth && b.Order == nil:
		missing = "Order"
	case b.Site == Depth:
		return nil
	case b.Identity == nil:
		missing = "Identity"
	case b.Graph && (b.F32.Forward != nil || b.F64.Forward != nil || b.Homogeneity != 0):
		return fmt.Errorf("blueprints.Register: %w %q: it has a graph, and F32, F64 or "+
			"Homogeneity beside it: want one of these alone", ErrInvalid, b.Name)
	case b.Graph:
		return nil
	case b.F32.Forward == nil || b.F32.Backward == nil:
		missing = "Forward or Backward of F32"
	case b.F64.Forward == nil || b.F64.Backward == nil:
		missing = "Forward or Backward of F64"
	case (b.F32.Prepare == nil) != (b.F32.Finish == nil):
		missing = "one of Prepare and Finish of F32"
	case (b.F64.Prepare == nil) != (b.F64.Finish == nil):
		missing = "one of Prepare and Finish of F64"
	case b.Homogeneity > InXAndScale:
		return fmt.Errorf("blueprints.Register: %w %q: Homogeneity is %d, want at most %d",
			ErrInvalid, b.Name, b.Homogeneity, InXAndScale)
	default:
		return nil
	}
	return fmt.Errorf("blueprints.Register: %w %q: %s is missing", ErrInvalid, b.Name, missing)
}

// Lookup returns the blueprint of a kind, which the caller must not change, or an error wrapping
// [ErrUnknownKind].
func Lookup(k Kind) (*Blueprint, error) {
	kinds := *registry.Load()
	if int(k) >= len(kinds) {
		return nil, fmt.Errorf("%w %d: kinds 0 to %d are registered",
			ErrUnknownKind, k, len(kinds)-1)
	}
	return kinds[k], nil
}

// ByName returns the kind with the given name.
func ByName(name string) (Kind, bool) {
	for i, b := range *registry.Load() {
		if b.Name == name {
			return Kind(i), true
		}
	}
	return 0, false
}

// Kinds returns how many kinds are registered: the kinds are 0 to Kinds()−1.
func Kinds() int { return len(*registry.Load()) }

// IsGraph reports whether what a kind of a chunk computes is a graph.
func IsGraph(k Kind) bool {
	if int(k) < len(builtin) {
		return false
	}
	b, err := Lookup(k)
	return err == nil && b.Graph
}

// KindsAt returns the kinds that grow at a site.
func KindsAt(site Site) (kinds []Kind) {
	for k, b := range *registry.Load() {
		if b.Site == site {
			kinds = append(kinds, Kind(k))
		}
	}
	return kinds
}

// String returns the kind's name.
func (k Kind) String() string {
	if b, err := Lookup(k); err == nil {
		return b.Name
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// For returns b's arithmetic in the element type T, nil if b is nil.
func For[T Float](b *Blueprint) *Arithmetic[T] {
	if b == nil {
		return nil
	}
	var a any = &b.F64
	if _, single := any(T(0)).(float32); single {
		a = &b.F32
	}
	return a.(*Arithmetic[T])
}

// Size returns how many weights a kind uses of rows of the given width, for chunks of c features:
// the first ones. When the rows are too narrow, it returns an error wrapping [ErrWidth] that says
// how many it needs. For c below 1 the error wraps [ErrInvalid], for an unknown kind
// [ErrUnknownKind].
func Size(k Kind, c, width int) (int, error) {
	b, err := Lookup(k)
	if err != nil {
		return 0, err
	}
	if b.Site != Chunk {
		return 0, fmt.Errorf("%w %q: it grows in %v, not on a chunk", ErrInvalid, b.Name, b.Site)
	}
	if c < 1 {
		return 0, fmt.Errorf("%w %q: chunks of %d features, want at least 1", ErrInvalid, b.Name, c)
	}
	n := c
	if b.Size != nil {
		if err := guarded(b, "Size", func() { n = b.Size(c, max(0, width)) }); err != nil {
			return 0, err
		}
	}
	if n < 0 {
		return 0, fmt.Errorf("%w %q: Size(%d, %d) is %d", ErrInvalid, b.Name, c, width, n)
	}
	if n > width {
		return 0, fmt.Errorf(
			"%w: %s needs %d weights a slot for chunks of %d features, and there are %d",
			ErrWidth, b.Name, n, c, width)
	}
	return n, nil
}

// Identity makes a slot the identity start of a kind for chunks of c features. weights is [slots,
// W] row by row and scales is [slots]; both are the parameters of a Kasmina layer. Slot 0 means
// "none", so slot must be in 1 … slots−1. Kinds that start from random weights draw them by seed:
// the same one gives the same weights. Weights that the kind does not use become 0. On an error
// nothing has changed. The error wraps [ErrWidth] when W is too small for the kind. It wraps
// [ErrInvalid] when what Identity gives is not finite, or Parts are not as [Blueprint] says.
func Identity[T Float](k Kind, slot, c int, seed uint64, weights, scales []T) error {
	slots := len(scales)
	if slots == 0 || len(weights) == 0 || len(weights)%slots != 0 || c < 1 {
		return fmt.Errorf("blueprints.Identity: weights has %d elements and scales %d, for "+
			"chunks of %d features, want weights [slots, W] and scales [slots]", len(weights),
			slots, c)
	}
	if slot < 1 || slot >= slots {
		return fmt.Errorf("blueprints.Identity: %w: slot is %d, want 1 to %d (slot 0 means none)",
			ErrSlot, slot, slots-1)
	}
	width := len(weights) / slots
	w, scale, err := start[T](k, c, width, seed)
	if err != nil {
		return fmt.Errorf("blueprints.Identity: %w", err)
	}
	scales[slot] = scale
	copy(weights[slot*width:], w)
	return nil
}

// start returns the identity start of a slot of the given width.
func start[T Float](k Kind, c, width int, seed uint64) (weights []T, scale T, err error) {
	n, err := Size(k, c, width)
	if err != nil {
		return nil, 0, err
	}
	if _, err := Parts(k, c, n); err != nil { // which nobody could save
		return nil, 0, err
	}
	b, err := Lookup(k)
	if err != nil {
		return nil, 0, err
	}
	w := make([]float64, width)
	var a float64
	err = guarded(b, "Identity", func() { a = b.Identity(w[:n:n], c, b.random(k, seed)) })
	if err != nil {
		return nil, 0, err
	}
	weights = make([]T, width)
	for i, v := range append(w, a) {
		if t := float64(T(v)); t-t != 0 {
			return nil, 0, fmt.Errorf("%w %q: parameter %d of Identity is %v, want a finite number",
				ErrInvalid, b.Name, i, v)
		}
	}
	for i, v := range w {
		weights[i] = T(v)
	}
	return weights, T(a), nil
}

// random returns what Identity draws from: the same numbers in every program, whatever number it
// has for a registered kind.
func (b *Blueprint) random(k Kind, seed uint64) *rand.Rand {
	stream := uint64(k)
	if int(k) >= len(builtin) {
		h := fnv.New64a()
		h.Write([]byte(b.Name))
		stream = h.Sum64()
	}
	return rand.New(rand.NewPCG(seed, stream))
}

// Apply computes y = t(x) for one chunk row, with the weights w and the scale a of a slot. x and y
// have one length, which is not 0; w may have more elements than the kind uses. What y holds after
// an error means nothing.
func Apply[T Float](k Kind, y, x, w []T, a T) error {
	b, err := Lookup(k)
	if err != nil {
		return fmt.Errorf("blueprints.Apply: %w", err)
	}
	if len(y) != len(x) || len(x) == 0 {
		return fmt.Errorf(
			"blueprints.Apply: x has %d elements and y %d, want one length of at least 1",
			len(x), len(y))
	}
	n, err := Size(k, len(x), len(w))
	if err != nil {
		return fmt.Errorf("blueprints.Apply: %w", err)
	}
	w = w[:n]
	f, p := For[T](b), w
	err = guarded(b, "its arithmetic", func() {
		if f.Prepare != nil {
			p = make([]T, len(w))
			f.Prepare(p, w)
		}
		f.Forward(y, x, p, a)
	})
	if err != nil {
		return fmt.Errorf("blueprints.Apply: %w", err)
	}
	return nil
}
