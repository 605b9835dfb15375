package blueprints

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/internal/enum"
)

// Site is a kind of place in a model where blueprints grow.
type Site uint8

// Sites.
const (
	Chunk  Site = iota // a chunk of the residual stream, in a Kasmina layer
	Depth              // the stack of a model's blocks
	Weight             // the weight of a linear layer
	Stream             // the residual stream at its full width, after a block
)

var siteNames = [...]string{Chunk: "chunk", Depth: "depth", Weight: "weight", Stream: "stream"}

// String returns the site's name.
func (s Site) String() string {
	return enum.Name(s, "Site", siteNames[:])
}

// MarshalText returns the site's name. Together with UnmarshalText, it also determines the JSON
// form.
func (s Site) MarshalText() ([]byte, error) {
	if int(s) >= len(siteNames) {
		return nil, fmt.Errorf("%w: %v is not a site", ErrInvalid, s)
	}
	return []byte(siteNames[s]), nil
}

// UnmarshalText sets the site to the one with the given name.
func (s *Site) UnmarshalText(text []byte) error {
	i := slices.Index(siteNames[:], string(text))
	if i < 0 {
		return fmt.Errorf("%w: the site is %.40q, want one of %q", ErrInvalid, text, siteNames)
	}
	*s = Site(i)
	return nil
}

// Host describes the place of a blueprint at a weight or in the stream.
type Host struct {
	In, Out int // features of the linear layer; in the stream, both are its width
	Seq     int // rows per sequence
}

// Parameter is a tensor of a blueprint at a weight or in the stream. Its initial values are normally
// distributed around Start with the given standard deviation, so they equal Start if Deviation is 0.
type Parameter struct {
	Name             string // unique within the blueprint; consists of a to z, 0 to 9 and _
	Shape            []int
	Start, Deviation float64
}

// maxParameters is the maximum number of parameters of a blueprint.
const maxParameters = 1 << 8

// ParametersOf returns the parameters of a registered blueprint of the given size on a host. The
// error wraps [ErrInvalid] if the kind defines no Parameters, does not fit the host, or returns
// parameters that violate the rules in [Parameter].
func ParametersOf(k Kind, h Host, size int) ([]Parameter, error) {
	b, err := Lookup(k)
	if err != nil {
		return nil, err
	}
	if b.Parameters == nil {
		return nil, fmt.Errorf("%w %q: it has no Parameters of its own", ErrInvalid, b.Name)
	}

	var all []Parameter
	if failed := guarded(b, "Parameters", func() { all, err = b.Parameters(h, size) }); failed != nil {
		return nil, failed
	}
	if err != nil {
		return nil, fmt.Errorf("%w %q of size %d: %w", ErrInvalid, b.Name, size, err)
	}
	if len(all) == 0 || len(all) > maxParameters {
		return nil, fmt.Errorf("%w %q: it has %d parameters, want 1 to %d", ErrInvalid, b.Name,
			len(all), maxParameters)
	}

	for i, p := range all {
		same := func(q Parameter) bool { return q.Name == p.Name }
		odd := func(r rune) bool {
			return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '_'
		}
		switch {
		case p.Name == "" || strings.ContainsFunc(p.Name, odd) ||
			slices.ContainsFunc(all[:i], same) || b.Site == Stream && p.Name == "norm":
			return nil, fmt.Errorf("%w %q: parameter %d is called %.40q, want distinct names of a to z, 0 "+
				"to 9 and _, other than norm, which every seed of the stream has", ErrInvalid,
				b.Name, i, p.Name)
		case len(p.Shape) == 0 || len(p.Shape) > 4 || slices.Min(p.Shape) < 1:
			return nil, fmt.Errorf("%w %q: parameter %s has shape %v, want 1 to 4 positive sizes",
				ErrInvalid, b.Name, p.Name, p.Shape)
		case p.Start-p.Start != 0 || !(p.Deviation >= 0) || p.Deviation-p.Deviation != 0:
			return nil, fmt.Errorf("%w %q: parameter %s starts at %v ± %v, want finite numbers",
				ErrInvalid, b.Name, p.Name, p.Start, p.Deviation)
		}
	}

	return all, nil
}

// Mergeable reports whether a fossilized blueprint of a kind can become part of a plain model. This
// holds for blueprints that add to a weight and for blocks like the model's own. All others remain
// separate.
func Mergeable(k Kind) bool {
	b, err := Lookup(k)
	return err == nil && (b.Site == Weight || b.Site == Depth || k == Attention || k == Perceptron)
}

// NewBlock represents, in an order of blocks, a new block that starts as the identity.
const NewBlock = -1

// maxBlocks is the maximum number of blocks of a grown model.
const maxBlocks = 1 << 16

// Order returns the blocks of a model with the given number of blocks after a blueprint of depth has
// been grafted. Each element is the index of the block to copy, or [NewBlock]. size is the size given
// in the germination request. It returns an error wrapping [ErrInvalid] if the kind does not support
// the size or its order would lose blocks.
func Order(k Kind, blocks, size int) ([]int, error) {
	b, err := Lookup(k)
	if err != nil {
		return nil, err
	}
	if b.Site != Depth {
		return nil, fmt.Errorf("%w %q: it grows at a %v, not in depth", ErrInvalid, b.Name, b.Site)
	}
	if blocks < 1 || blocks > maxBlocks || size < 1 || size > maxBlocks {
		return nil, fmt.Errorf("%w %q: size %d for %d blocks, want 1 to %d of both", ErrInvalid,
			b.Name, size, blocks, maxBlocks)
	}

	var order []int
	if err := guarded(b, "Order", func() { order = b.Order(blocks, size) }); err != nil {
		return nil, err
	}
	if len(order) <= blocks || len(order) > maxBlocks {
		return nil, fmt.Errorf("%w %q: size %d makes %d blocks of %d, want more, and at most %d",
			ErrInvalid, b.Name, size, len(order), blocks, maxBlocks)
	}

	for i, from := range order {
		if from < NewBlock || from >= blocks {
			return nil, fmt.Errorf("%w %q: Order(%d, %d): block %d is a copy of %d, want %d to %d",
				ErrInvalid, b.Name, blocks, size, i, from, NewBlock, blocks-1)
		}
	}

	for i := range blocks {
		if !slices.Contains(order, i) {
			return nil, fmt.Errorf("%w %q: Order(%d, %d) loses block %d", ErrInvalid,
				b.Name, blocks, size, i)
		}
	}

	return order, nil
}

// stack repeats the whole stack of blocks size times.
func stack(blocks, size int) (order []int) {
	if size > maxBlocks/blocks {
		return nil
	}
	for range size {
		for i := range blocks {
			order = append(order, i)
		}
	}
	return order
}

// interleave repeats each block size times.
func interleave(blocks, size int) (order []int) {
	order = stack(blocks, size)
	slices.Sort(order)
	return order
}

// middle repeats the blocks between the first and the last third size times: C1 C2 becomes C1 C2 C1
// C2. Both thirds are rounded down, so a model of one or two blocks is repeated as a whole.
func middle(blocks, size int) (order []int) {
	third := blocks / 3
	if size > maxBlocks/blocks {
		return nil
	}

	for i := range third {
		order = append(order, i)
	}

	for range size {
		for i := third; i < blocks-third; i++ {
			order = append(order, i)
		}
	}

	for i := blocks - third; i < blocks; i++ {
		order = append(order, i)
	}
	return order
}

// appendBlocks adds new blocks after the last one.
func appendBlocks(blocks, size int) (order []int) {
	order = stack(blocks, 1)
	for range size {
		order = append(order, NewBlock)
	}
	return order
}
