package fatbin

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Param is a parameter of a kernel: its size in bytes and its kind. Its offset depends on the
// architecture.
type Param struct {
	Size int
	Kind gpu.ParamKind
}

// Signature is the parameters of a kernel, in order.
type Signature []Param

// Of returns a layout with the kinds of the signature. It returns an error if the two do not have
// parameters of the same sizes.
func (s Signature) Of(layout []gpu.Param) ([]gpu.Param, error) {
	layout = slices.Clone(layout)
	fits := len(s) == len(layout)
	for i := 0; fits && i < len(s); i++ {
		fits = s[i].Size == layout[i].Size
		layout[i].Kind = s[i].Kind
	}
	if !fits {
		return nil, fmt.Errorf("fatbin: the signature %v does not fit the parameters %+v", s, layout)
	}
	return layout, nil
}

// Table holds the signatures of all kernels by name. Its text form has a line per kernel, with a
// size in bytes and a letter for each parameter: i for integers and addresses, f for floating-point
// numbers, and s for structs.
type Table map[string]Signature

// header is the first line of the text form.
const header = "# The kernels' signatures, written by go generate. Do not edit.\n"

// MarshalText returns the table as text, sorted by kernel.
func (t Table) MarshalText() ([]byte, error) {
	var b strings.Builder
	b.WriteString(header)
	for _, name := range slices.Sorted(maps.Keys(t)) {
		b.WriteString(name)
		for _, p := range t[name] {
			fmt.Fprintf(&b, " %d%v", p.Size, p.Kind)
		}
		b.WriteByte('\n')
	}
	return []byte(b.String()), nil
}

// UnmarshalText reads a table that MarshalText has written.
func (t *Table) UnmarshalText(text []byte) error {
	*t = Table{}
	for line := range strings.Lines(string(text)) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name == "" || name == "#" {
			continue
		}

		signature := Signature{}
		for field := range strings.FieldsSeq(rest) {
			var p Param
			var kind string
			if _, err := fmt.Sscanf(field, "%d%s", &p.Size, &kind); err != nil {
				return fmt.Errorf("fatbin: %s has a parameter %q: %w", name, field, err)
			}
			if p.Kind = gpu.KindOf(kind); p.Kind == gpu.UnknownKind {
				return fmt.Errorf("fatbin: %s has a parameter %q of an unknown kind", name, field)
			}
			signature = append(signature, p)
		}
		(*t)[name] = signature
	}

	return nil
}
