package state

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/state/graft"
)

// fill gives every field of every seed a random value that a lattice can have.
func fill(t *testing.T, l *Lattice) {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for _, c := range l.seeds.columns() {
		v := reflect.ValueOf(c.array).Elem()
		for i := range v.Len() {
			switch e := v.Index(i); e.Kind() {
			case reflect.Float32, reflect.Float64:
				e.SetFloat(r.Float64()) // in [0, 1), as an α is
			default:
				e.SetUint(r.Uint64N(200))
			}
		}
	}
	for i := range l.n {
		l.seeds.stage[i] = uint8(r.IntN(stages))
		l.seeds.kind[i] = uint8(r.IntN(4))
		l.seeds.strategy[i] = uint8(r.IntN(len(l.strategies)))
		l.seeds.schema[i] = Schema
		l.seeds.finished[i], l.seeds.learning[i] = uint8(r.IntN(2)), uint8(r.IntN(3))
		l.seeds.stageErrors[i] = uint32(r.IntN(1 + int(l.seeds.stageTrials[i])))
		l.seeds.nonFiniteTold[i] = uint32(r.IntN(1 + int(l.seeds.nonFiniteX[i])))
	}
	l.epoch, l.step, l.loss = r.Uint32N(maxEpoch), r.Uint64N(maxStep), 1/r.Float64()
	l.seal(0, l.n)
}

func filled(t *testing.T, seeds int) *Lattice {
	t.Helper()
	thresholds := DefaultThresholds()
	thresholds.CullDelta = -1.0 / 3
	l, err := NewLattice(seeds, 3*seeds, WithThresholds(thresholds), WithoutGates(), WithEmbargo(7), WithSlots(300), WithHistory(2),
		WithTelemetry(Telemetry{Sampling, MaxOfRows, 3, 0.1}))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.intern(graft.FixedRamp{Ramp: graft.Sigmoid, Epochs: 9, Target: 1.0 / 3}); err != nil {
		t.Fatal(err)
	}
	fill(t, l)
	return l
}

// same compares two lattices field by field.
func same(t *testing.T, a, b *Lattice) {
	t.Helper()
	if a.n != b.n || a.hidden != b.hidden || a.epoch != b.epoch || a.step != b.step || a.loss != b.loss || a.config != b.config {
		t.Errorf("lattices differ: %+v and %+v", a.config, b.config)
	}
	if !reflect.DeepEqual(a.strategies, b.strategies) {
		t.Errorf("strategies are %v and %v", a.strategies, b.strategies)
	}
	other := b.seeds.saved()
	for i, c := range a.seeds.saved() {
		if !reflect.DeepEqual(c.array, other[i].array) {
			t.Errorf("field %s differs", c.name)
		}
	}
}

func TestBinaryRoundTrip(t *testing.T) {
	a := filled(t, 67)
	data, err := a.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	var b Lattice
	if err := b.UnmarshalBinary(data); err != nil {
		t.Fatal(err)
	}
	same(t, a, &b)
	if err := b.Verify(); err != nil {
		t.Error(err)
	}
	if b.ID() == 0 || b.ID() == a.ID() {
		t.Errorf("identities are %d and %d", a.ID(), b.ID())
	}
	again, err := b.MarshalBinary()
	if err != nil || string(again) != string(data) {
		t.Errorf("the loaded lattice is saved differently (%v)", err)
	}
}

// Negative zeros, the least and the largest numbers come back with their bits.
func TestEveryBitIsRestored(t *testing.T) {
	a := filled(t, 4)
	copy(a.seeds.runMean, []float64{math.MaxFloat64, -math.MaxFloat64, math.Copysign(0, -1), 5e-324})
	copy(a.seeds.gradNorm, []float32{math.MaxFloat32, float32(math.Copysign(0, -1)), 0, math.SmallestNonzeroFloat32})
	a.seal(0, a.n)
	for name, load := range map[string]func(*Lattice) error{
		"binary": func(l *Lattice) error {
			data, err := a.MarshalBinary()
			return errors.Join(err, l.UnmarshalBinary(data))
		},
		"arrays": func(l *Lattice) error { return l.SetArrays(a.Arrays()) },
	} {
		var b Lattice
		if err := load(&b); err != nil {
			t.Fatal(err)
		}
		for i := range a.n {
			if math.Float64bits(b.seeds.runMean[i]) != math.Float64bits(a.seeds.runMean[i]) ||
				math.Float32bits(b.seeds.gradNorm[i]) != math.Float32bits(a.seeds.gradNorm[i]) {
				t.Errorf("%s: seed %d has %x and %x, want %x and %x", name, i, b.seeds.runMean[i], b.seeds.gradNorm[i], a.seeds.runMean[i], a.seeds.gradNorm[i])
			}
		}
	}
}

func TestArraysRoundTrip(t *testing.T) {
	a := filled(t, 67)
	arrays := a.Arrays()
	rand.Shuffle(len(arrays), func(i, j int) { arrays[i], arrays[j] = arrays[j], arrays[i] })
	b, err := NewLattice(67, 3*67)
	if err != nil {
		t.Fatal(err)
	}
	id := b.ID()
	if err := b.SetArrays(arrays); err != nil {
		t.Fatal(err)
	}
	same(t, a, b)
	if b.ID() != id {
		t.Errorf("loading changed the identity from %d to %d", id, b.ID())
	}
	// Neither lattice holds on to the arrays.
	for _, x := range arrays {
		reflect.ValueOf(x.Data).Index(0).SetZero()
		if n := reflect.ValueOf(x.Data).Len(); len(x.Shape) != 1 || x.Shape[0] != n {
			t.Errorf("array %s has shape %v and %d elements", x.Name, x.Shape, n)
		}
	}
	same(t, a, b)
	if err := errors.Join(a.Verify(), b.Verify()); err != nil {
		t.Error(err)
	}
}

// Flipping any byte of a saved lattice is noticed; in a seed's fields, the error names the seed.
func TestEveryFlippedByteIsFound(t *testing.T) {
	const n = 3
	a := filled(t, n)
	data, err := a.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	saved := a.seeds.saved()
	start := len(data) - n*rowWidth(saved)
	owner := map[int]int{} // which seed a byte belongs to
	at := start
	for _, c := range saved {
		for i := range n * widths[c.typ()] {
			owner[at+i] = i / widths[c.typ()]
		}
		at += n * widths[c.typ()]
	}
	var b Lattice
	if err := b.UnmarshalBinary(data); err != nil {
		t.Fatal(err)
	}
	for i := range data {
		for _, bit := range []byte{1, 0x10, 0x80} {
			bad := slices.Clone(data)
			bad[i] ^= bit
			err := b.UnmarshalBinary(bad)
			if seed, ok := owner[i]; !errors.Is(err, ErrCorrupt) || ok && !strings.Contains(err.Error(), fmt.Sprintf("seed %d ", seed)) {
				t.Fatalf("byte %d of %d flipped: error %v", i, len(data), err)
			}
		}
	}
	for i := range len(data) {
		if err := b.UnmarshalBinary(data[:i]); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("%d of %d bytes: error %v", i, len(data), err)
		}
	}
	if err := b.UnmarshalBinary(append(slices.Clone(data), 0)); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a byte too many: error %v", err)
	}
	same(t, a, &b) // nothing was applied
}

// scatterOne sets element i from its bytes.
// A lattice takes nothing of another shape, of which seeds, features, slots and their width alone can differ. What it does not
// know of its slots it takes over.
func TestOtherShapes(t *testing.T) {
	made := func(seeds, hidden int, opts ...Option) *Lattice {
		l, err := NewLattice(seeds, hidden, opts...)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	data, err := made(4, 8, WithSlots(5), WithWidth(3)).MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	for name, l := range map[string]*Lattice{
		"seeds": made(2, 8), "features": made(4, 16), "slots": made(4, 8, WithSlots(4)), "width": made(4, 8, WithWidth(2)),
	} {
		if err := l.UnmarshalBinary(data); !errors.Is(err, ErrShape) || l.Epoch() != 0 {
			t.Errorf("other %s: error %v", name, err)
		}
	}
	for _, l := range []*Lattice{made(4, 8), made(4, 8, WithSlots(5)), made(4, 8, WithWidth(3))} {
		if err := l.UnmarshalBinary(data); err != nil || l.Slots() != 5 || l.Width() != 3 {
			t.Errorf("%d slots of %d weights, error %v", l.Slots(), l.Width(), err)
		}
	}
}

func (c column) scatterOne(b []byte, i int) {
	one := column{c.name, reflect.New(reflect.TypeOf(c.array).Elem()).Interface()}
	one.make(1)
	one.scatter(b, len(b), 0, 1)
	reflect.ValueOf(c.array).Elem().Index(i).Set(reflect.ValueOf(one.array).Elem().Index(0))
}

func TestSetArraysErrors(t *testing.T) {
	a := filled(t, 4)
	find := func(arrays []Array, name string) *Array {
		for i := range arrays {
			if arrays[i].Name == name {
				return &arrays[i]
			}
		}
		t.Fatalf("no array %q", name)
		return nil
	}
	for name, c := range map[string]struct {
		change func([]Array) []Array
		is     error
		text   string
	}{
		"no header":    {func(x []Array) []Array { find(x, "header").Name = "footer"; return x }, ErrCorrupt, `"header"`},
		"cut header":   {func(x []Array) []Array { h := find(x, "header"); h.Data = h.Data.([]uint8)[:40]; return x }, ErrCorrupt, "header"},
		"bent header":  {func(x []Array) []Array { find(x, "header").Data.([]uint8)[30] ^= 1; return x }, ErrCorrupt, "checksum"},
		"missing":      {func(x []Array) []Array { return x[:len(x)-1] }, ErrCorrupt, "arrays"},
		"twice":        {func(x []Array) []Array { return append(x, x[3]) }, ErrCorrupt, "twice"},
		"unknown":      {func(x []Array) []Array { find(x, "stage").Name = "phase"; return x }, ErrCorrupt, `"stage"`},
		"wrong type":   {func(x []Array) []Array { find(x, "alpha").Data = make([]float64, 4); return x }, ErrCorrupt, `"alpha"`},
		"nil":          {func(x []Array) []Array { find(x, "alpha").Data = nil; return x }, ErrCorrupt, `"alpha"`},
		"short":        {func(x []Array) []Array { find(x, "slot").Data = make([]uint16, 3); return x }, ErrCorrupt, `"slot"`},
		"bent":         {func(x []Array) []Array { find(x, "slot").Data.([]uint16)[2] ^= 4; return x }, ErrCorrupt, "seed 2 "},
		"bent sum":     {func(x []Array) []Array { find(x, "crc32").Data.([]uint32)[3] ^= 4; return x }, ErrCorrupt, "seed 3 "},
		"swapped seed": {func(x []Array) []Array { swapAll(x); return x }, ErrCorrupt, "seed 0 "},
		"other size":   {func([]Array) []Array { return filled(t, 5).Arrays() }, ErrArgument, "5 seeds"},
		"nothing":      {func([]Array) []Array { return nil }, ErrCorrupt, `"header"`},
	} {
		b := filled(t, 4)
		before, err := b.MarshalBinary()
		if err != nil {
			t.Fatal(err)
		}
		if err := b.SetArrays(c.change(a.Arrays())); !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: error %v, want %q", name, err, c.text)
		}
		if after, _ := b.MarshalBinary(); string(after) != string(before) {
			t.Errorf("%s: the lattice was changed", name)
		}
	}
}

// swapAll exchanges seeds 0 and 1 with their checksums, which are over the seed's number too.
func swapAll(arrays []Array) {
	for _, a := range arrays {
		if a.Name != headerName {
			reflect.Swapper(a.Data)(0, 1)
		}
	}
}

// resaved saves a lattice as a program with another schema would have: change edits the header and the list of fields.
func resaved(t *testing.T, l *Lattice, change func(h *header, fields []column) []column) []byte {
	t.Helper()
	h := l.header()
	fields := change(&h, l.seeds.columns())
	sums := newChecksummer(fields, h.Schema)
	crc := make([]uint32, l.n)
	sums.each(0, l.n, func(seed int, sum uint32) { crc[seed] = sum })
	fields = append(fields, column{crcName, &crc})
	h.Fields = nil
	for _, c := range fields {
		h.Fields = append(h.Fields, savedField{c.name, c.typ()})
	}
	data := h.bytes(0)
	for _, c := range fields {
		width := widths[c.typ()]
		b := make([]byte, l.n*width)
		c.gather(b, width, 0, l.n)
		data = append(data, b...)
	}
	return data
}

func TestSchemaVersions(t *testing.T) {
	a := filled(t, 4)
	newer := resaved(t, a, func(h *header, f []column) []column { h.Schema = Schema + 1; return f })
	var b Lattice
	if err := b.UnmarshalBinary(newer); !errors.Is(err, ErrSchema) || !strings.Contains(err.Error(), fmt.Sprintf("version %d", Schema+1)) {
		t.Errorf("a newer schema: error %v", err)
	}
	// An older version had no drift, and a field that is no more.
	gone := []uint16{1, 2, 3, 4}
	older := resaved(t, a, func(h *header, f []column) []column {
		h.Schema = Schema - 1
		f = slices.DeleteFunc(f, func(c column) bool { return c.name == "drift" })
		for _, c := range f {
			if c.name == "schema" {
				c.array = &[]uint8{Schema - 1, Schema - 1, Schema - 1, Schema - 1}
			}
		}
		return append(f, column{"gone", &gone})
	})
	if err := b.UnmarshalBinary(older); err != nil {
		t.Fatal(err)
	}
	if err := b.Verify(); err != nil {
		t.Error(err)
	}
	clear(a.seeds.drift)
	figures := [][]uint16{a.seeds.mean, a.seeds.lowest, a.seeds.highest, a.seeds.snr, a.seeds.gradVariance, a.seeds.gradMax}
	for _, all := range figures { // which were Float16
		for i, bits := range all {
			all[i] = brain(Float16(bits).Float64())
		}
	}
	a.seal(0, a.n)
	same(t, a, &b)
	for name, change := range map[string]func(h *header, f []column) []column{
		"a field too few":  func(_ *header, f []column) []column { return f[1:] },
		"a field too many": func(_ *header, f []column) []column { return append(f, column{"more", &gone}) },
		"no seeds":         func(h *header, f []column) []column { h.Seeds = 0; return f },
		"uneven":           func(h *header, f []column) []column { h.Hidden = 7; return f },
		"too many seeds":   func(h *header, f []column) []column { h.Seeds, h.Hidden = 1<<31, 1<<31; return f },
		"bad config":       func(h *header, f []column) []column { h.Config.Telemetry.Mode = 77; return f },
		"bad strategy":     func(h *header, f []column) []column { h.Strategies[1].Params = []byte(`{"epochs":-1}`); return f },
		"no strategies":    func(h *header, f []column) []column { h.Strategies = nil; return f },
	} {
		if err := new(Lattice).UnmarshalBinary(resaved(t, a, change)); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: error %v", name, err)
		}
	}
	unknown := resaved(t, a, func(h *header, f []column) []column { h.Strategies[1].Name = "Telepathy"; return f })
	if err := new(Lattice).UnmarshalBinary(unknown); !errors.Is(err, ErrArgument) || !strings.Contains(err.Error(), "Telepathy") {
		t.Errorf("an unknown strategy: error %v", err)
	}
	copy(a.seeds.stage, []uint8{5, 5, 5, 5})
	copy(a.seeds.kind, []uint8{1, 1, 1, 1})
	a.seal(0, a.n)
	renamed := resaved(t, a, func(h *header, f []column) []column { h.Kinds[1] = "Wavelet"; return f })
	if err := new(Lattice).UnmarshalBinary(renamed); !errors.Is(err, ErrArgument) || !errors.Is(err, blueprints.ErrUnknownKind) || !strings.Contains(err.Error(), "Wavelet") {
		t.Errorf("an unknown kind: error %v", err)
	}
	for name, bend := range map[string]func(){
		"stage": func() { a.seeds.stage[2] = stages }, "α": func() { a.seeds.alpha[2] = 1.5 },
		"strategy": func() { a.seeds.strategy[2] = 2 }, "schema": func() { a.seeds.schema[2] = 9 },
	} {
		a = filled(t, 4)
		bend()
		a.seal(0, a.n)
		data, err := a.MarshalBinary()
		if err != nil {
			t.Fatal(err)
		}
		if err := new(Lattice).UnmarshalBinary(data); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "seed 2: "+name) {
			t.Errorf("%s out of range under a valid checksum: error %v", name, err)
		}
	}
}

// FuzzUnmarshal reads altered lattices, also with the header's checksum made right again, behind which the fuzzer could hardly get
// by itself. What is read takes memory in proportion to what is there, whatever the header promises.
func FuzzUnmarshal(f *testing.F) {
	l, err := NewLattice(2, 4, WithQuarantine())
	if err != nil {
		f.Fatal(err)
	}
	data, err := l.MarshalBinary()
	if err != nil {
		f.Fatal(err)
	}
	older, err := os.ReadFile("testdata/schema2.lattice")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data, true)
	f.Add(older, true)
	f.Add(older, false)
	f.Add([]byte(magic), false)
	f.Fuzz(func(t *testing.T, data []byte, repair bool) {
		if size := len(data) - prefix; repair && size >= 0 {
			head := min(size, int(binary.LittleEndian.Uint32(data[len(magic):])))
			binary.LittleEndian.PutUint32(data[len(magic)+4:], crc32.ChecksumIEEE(data[prefix:][:head]))
		}
		var l Lattice
		var err error
		bounded.Run(t, int64(len(data)), func() { err = l.UnmarshalBinary(data) })
		if err == nil && l.Verify() != nil {
			t.Error("a lattice was loaded that does not match its checksums")
		}
	})
}
