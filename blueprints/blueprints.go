// Package blueprints defines the kinds of blueprint that a seed can grow and the registry for a
// program's own kinds. For each kind it defines the meaning of the parameters, the initial values
// that make it the identity, and, for kinds that work on chunks, the transform t(x) and its gradient.
//
// # Chunks
//
// Six kinds work on a chunk of C features of the activations. w is the weight row of the seed's
// slot and a is the slot's scale. Four use one weight per feature:
//
//	Residual       t(x) = x + a·w
//	AttentionGate  t(x) = a · x ⊙ softmax(w)
//	MLPExpansion   t(x) = a · relu(x ⊙ w)
//	ConvFilter     t(x)[i] = a · (w0·x[i] + w1·x[i−1] + w2·x[i−2]), with zeros to the left of the chunk
//
// (ConvFilter uses three weights only.) Two kinds can mix features. Their weight row w holds a matrix
// [m, C] followed by a matrix [C, m]. The width W of the layer's rows determines the rank or number
// of hidden features, m = ⌊W/2C⌋:
//
//	LowRank        t(x) = x + a·U(V·x), with V [m, C] and U [C, m]
//	ChunkMLP       t(x) = x + a·W2·silu(W1·x), with W1 [m, C] and W2 [C, m]
//
// # Depth
//
// Four kinds make a model deeper. They need no weights of their own, and the size given in the
// germination request determines how many blocks are added.
//
//	Stack       all blocks in order, size times over (Gong et al., "Efficient Training of BERT by
//	            Progressively Stacking", 2019)
//	Interleave  each block size times in succession
//	NewBlocks   size new blocks after the last one, which start as the identity
//	Middle      the first third of the blocks, the middle ones in order size times over, the last third
//
// # Weights and the stream
//
// One kind adds to the weight of a linear layer, and two add to the residual stream at its full
// width. For these, the requested size is the rank, the number of heads or the number of hidden
// features. Package llm/site builds them as graphs.
//
//	LoRA        W' = W + s·B·A, with A [size, in] and B [out, size] (Hu et al., "LoRA: Low-Rank
//	            Adaptation of Large Language Models", 2021)
//	Attention   x + attention(norm(x)), with size heads
//	Perceptron  x + perceptron(norm(x)), with size hidden features
//
// # Your own kinds
//
// [Register] adds a kind; its example shows a complete one. This package does not depend on graphs or
// tensors. Transforms work on slices holding one chunk row, and [Apply] computes one of them.
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

// Float is the constraint of the element types of transforms.
type Float interface{ float32 | float64 }

// Kind identifies a registered blueprint. Built-in kinds have fixed numbers, while registered ones
// are numbered in registration order. Programs should therefore store kinds by name, as lattices do,
// and look them up with [ByName].
type Kind uint8

// Built-in kinds.
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

// Homogeneity describes the effect of multiplying a transform's input by a factor λ > 0. The
// adaptive stability mode relies on it: for very large activations, it scales the input down,
// transforms it and scales the result up, and must obtain t(x).
type Homogeneity uint8

const (
	// NotHomogeneous transforms satisfy neither of the following properties, so their input is never
	// scaled.
	NotHomogeneous Homogeneity = iota
	// InX means t(λx; w, a) = λ·t(x; w, a).
	InX
	// InXAndScale means t(λx; w, λa) = λ·t(x; w, a).
	InXAndScale
)

// Arithmetic is a blueprint's transform and gradient in one element type.
//
// The slices x, t, g and dx hold the C elements of one chunk row. w, p and dp hold as many elements
// as the blueprint's Size returns, or C if Size is nil. p holds the prepared weights, which are the
// output of Prepare, or w itself if Prepare is nil. Slices do not overlap.
//
// The functions are called from several goroutines at once and must not keep state between calls. A
// panic in a function ends the run of the graph with an error.
type Arithmetic[T Float] struct {
	// Prepare computes p from w, once per seed and pass rather than once per row. If it is nil, p is
	// w.
	Prepare func(p, w []T)
	// Forward writes t(x) to t.
	Forward func(t, x, p []T, a T)
	// Backward writes ∂L/∂x to dx, adds ∂L/∂p to dp and returns ∂L/∂a, given g = ∂L/∂t(x).
	Backward func(dx, dp, g, x, p []T, a T) float64
	// Finish converts dp, the sum of ∂L/∂p over all rows, to ∂L/∂w in place. It must be nil if and
	// only if Prepare is.
	Finish func(dp, p []T)
}

// Blueprint describes one kind. Site Depth uses only Name, Layout and Order. Sites Weight and Stream
// use only Name, Layout and Parameters, because their computation is a graph registered with package
// llm/site.
type Blueprint struct {
	Name string // must be unique
	Site Site
	// Order determines the blocks of a model after a growth in depth; see the function [Order].
	Order func(blocks, size int) []int
	// Parameters returns the parameters of a blueprint at a weight or in the stream; see the
	// function [ParametersOf]. It is nil in built-in kinds, which take the parameters of the
	// model's own blocks.
	Parameters func(h Host, size int) ([]Parameter, error)

	Layout string // human-readable description of the weights and the scale
	// Size returns how many of a slot's width weights the kind uses for chunks of c features. If the
	// slot is too narrow, it returns the number needed. The result may increase with width. A nil
	// Size means c weights.
	Size func(c, width int) int
	// Parts returns the arrays that make up the n weights of a chunk of c features, in order. Files
	// store the weights under these names, which must be distinct, not "" and not "scale". The
	// arrays must have n elements in total. If Parts is nil, the weights are a single vector called
	// "weights".
	Parts func(c, n int) []Part
	// Identity fills w, the part of a slot's weights that the kind uses, and returns a scale such
	// that the transform of a chunk of c features is the identity or as close to it as the kind
	// allows. Weights that must not start out equal are drawn from r.
	Identity    func(w []float64, c int, r *rand.Rand) (scale float64)
	Homogeneity Homogeneity
	F32         Arithmetic[float32]
	F64         Arithmetic[float64]
	// Graph means that a blueprint on a chunk is computed by a graph, added with llm/site.Register,
	// instead of by F32 and F64.
	Graph bool
}

// Part is one of the arrays that make up a slot's weights.
type Part struct {
	Name  string
	Shape []int
}

// Parts returns the arrays that make up the first n weights of a slot, where n is the result of
// [Size] for chunks of c features. It returns an error wrapping [ErrInvalid] if c or n is out of
// range or the blueprint's Parts violates the rules in [Blueprint].
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

// scaleName is the name under which files store the scale, next to the parts of the weights.
const scaleName = "scale"

// checkParts returns an error unless the names of the parts are usable and their sizes add up to n.
func checkParts(parts []Part, n int) error {
	left := n
	names := map[string]bool{"": true, scaleName: true}
	for i, p := range parts {
		if names[p.Name] {
			return fmt.Errorf(
				"the name of part %d is %q, want distinct names other than \"\" and %q",
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
		return fmt.Errorf("the parts have %d elements in total, want %d", n-left, n)
	}
	return nil
}

// Errors that callers can test for with [errors.Is].
var (
	ErrUnknownKind = errors.New("unknown blueprint kind")
	ErrInvalid     = errors.New("invalid blueprint")
	ErrSlot        = errors.New("slot out of range")
	ErrWidth       = errors.New("slots are too narrow for the blueprint")
	ErrPanic       = errors.New("panic") // a function of a registered blueprint panicked
)

// guarded calls a function of a blueprint. If it panics, guarded returns an error wrapping
// [ErrPanic] with the location.
func guarded(b *Blueprint, function string, f func()) error {
	where := fmt.Sprintf("%s of blueprint %q", function, b.Name)
	return guard.Call(ErrPanic, where, func() error {
		f()
		return nil
	})
}

// maxKinds is the number of kinds that a Kind can represent.
const maxKinds = 256

var (
	registering sync.Mutex
	registry    atomic.Pointer[[]*Blueprint] // replaced as a whole, so readers need no lock
)

func init() { registry.Store(&builtin) }

// Register adds a blueprint and returns its kind. It returns an error wrapping [ErrInvalid] if the
// name is empty or taken, if a required function is missing, or if 256 kinds are already registered.
//
// GPUs lack kernels for registered kinds, so while a seed uses one, package cudaops computes the
// seed's layer on the host.
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
			"blueprints.Register: %w: %d kinds are registered already, the maximum",
			ErrInvalid, maxKinds)
	}

	grown := append(append([]*Blueprint(nil), kinds...), &b)
	registry.Store(&grown)
	return Kind(len(kinds)), nil
}

// check returns an error unless the blueprint is complete for its site.
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
		return fmt.Errorf("blueprints.Register: %w %q: Graph is set together with F32, F64 or "+
			"Homogeneity: want either the graph or the arithmetic", ErrInvalid, b.Name)
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

// Lookup returns the blueprint of a kind, or an error wrapping [ErrUnknownKind]. The caller must
// not modify the blueprint.
func Lookup(k Kind) (*Blueprint, error) {
	kinds := *registry.Load()
	if int(k) >= len(kinds) {
		return nil, fmt.Errorf("%w %d: kinds 0 to %d are registered",
			ErrUnknownKind, k, len(kinds)-1)
	}
	return kinds[k], nil
}

// ByName returns the kind with the given name and whether it is registered.
func ByName(name string) (Kind, bool) {
	for i, b := range *registry.Load() {
		if b.Name == name {
			return Kind(i), true
		}
	}
	return 0, false
}

// Kinds returns the number of registered kinds, which are 0 to Kinds()−1.
func Kinds() int { return len(*registry.Load()) }

// IsGraph reports whether a kind on a chunk is computed by a graph.
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

// For returns b's arithmetic in the element type T, or nil if b is nil.
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

// Size returns how many weights, starting with the first, a kind uses in a slot of the given width
// for chunks of c features. If the slot is too narrow, the error wraps [ErrWidth] and states the
// required width. The error wraps [ErrInvalid] if c is less than 1 or the kind belongs to another
// site, and [ErrUnknownKind] if the kind is unknown.
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
			"%w: %s needs %d weights per slot for chunks of %d features, but the slots have %d",
			ErrWidth, b.Name, n, c, width)
	}
	return n, nil
}

// Identity initializes a slot so that the transform of a kind starts as the identity, for chunks of c features.
//
// weights [slots, W], row by row, and scales [slots] are the parameters of a Kasmina layer. slot must
// be in 1 … slots−1, because slot 0 means "none". Kinds with random initial weights derive them from
// seed. Unused weights are set to 0.
//
// The error wraps [ErrSlot] if slot is out of range, [ErrWidth] if W is too small for the kind, and
// [ErrInvalid] if the blueprint's Identity returns values that are not finite or its Parts violates
// the rules in [Blueprint]. On an error, nothing is changed.
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

// start returns the initial weights and scale of a slot with the given width.
func start[T Float](k Kind, c, width int, seed uint64) (weights []T, scale T, err error) {
	n, err := Size(k, c, width)
	if err != nil {
		return nil, 0, err
	}
	if _, err := Parts(k, c, n); err != nil { // otherwise the slot could not be saved
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

// random returns the source of Identity's random numbers. The sequence is the same in every program,
// even if a registered kind is numbered differently there.
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
// must have the same positive length, but w may be longer than the kind requires. After an error, the
// contents of y are undefined.
func Apply[T Float](k Kind, y, x, w []T, a T) error {
	b, err := Lookup(k)
	if err != nil {
		return fmt.Errorf("blueprints.Apply: %w", err)
	}
	if len(y) != len(x) || len(x) == 0 {
		return fmt.Errorf(
			"blueprints.Apply: x has %d elements and y %d, want the same positive length",
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
