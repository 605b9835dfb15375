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
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/state/graft"
	"github.com/kasmina-go/kasmina/state/internal/columns"
	"github.com/kasmina-go/kasmina/state/lifecycle"
)

// fill gives every field of every seed a random value that a lattice can have.
func fill(t *testing.T, l *Lattice) {
	t.Helper()
	seed := randtest.Seed(t)
	r := rand.New(rand.NewPCG(seed, 0))
	for _, c := range l.seeds.columns() {
		v := reflect.ValueOf(c.Array).Elem()
		for i := range v.Len() {
			switch e := v.Index(i); e.Kind() {
			case reflect.Float32, reflect.Float64:
				e.SetFloat(r.Float64()) // in [0, 1), as α must be
			default:
				e.SetUint(r.Uint64N(200))
			}
		}
	}

	for i := range l.n {
		l.seeds.stage[i] = uint8(r.IntN(lifecycle.Count))
		l.seeds.kind[i] = uint8(r.IntN(4))
		l.seeds.strategy[i] = uint8(r.IntN(len(l.strategies)))
		l.seeds.schema[i] = Schema
		l.seeds.finished[i], l.seeds.learning[i] = uint8(r.IntN(2)), uint8(r.IntN(3))
		l.seeds.stageErrors[i] = uint32(r.IntN(1 + int(l.seeds.stageTrials[i])))
		l.seeds.nonFiniteReported[i] = uint32(r.IntN(1 + int(l.seeds.nonFiniteX[i])))
	}

	l.epoch, l.step, l.loss = r.Uint32N(maxEpoch), r.Uint64N(maxStep), 1/r.Float64()
	l.seal(0, l.n)
}

func filled(t *testing.T, seeds int) *Lattice {
	t.Helper()
	thresholds := DefaultThresholds()
	thresholds.CullDelta = -1.0 / 3
	l, err := NewLattice(seeds, 3*seeds, WithThresholds(thresholds), WithoutGates(), WithEmbargo(7),
		WithSlots(300), WithHistory(2),
		WithTelemetry(Telemetry{Mode: Sampling, Reduction: MaxOfRows, Every: 3,
			Share: 0.1}))
	if err != nil {
		t.Fatal(err)
	}

	if _, err := l.intern(graft.FixedRamp{Ramp: graft.Sigmoid, Epochs: 9,
		Target: 1.0 / 3}); err != nil {
		t.Fatal(err)
	}

	fill(t, l)
	return l
}

// same compares two lattices field by field.
func same(t *testing.T, a, b *Lattice) {
	t.Helper()
	if a.n != b.n || a.hidden != b.hidden || a.epoch != b.epoch || a.step != b.step ||
		a.loss != b.loss || a.config != b.config {
		t.Errorf("lattices differ: %+v and %+v", a.config, b.config)
	}

	if !reflect.DeepEqual(a.strategies, b.strategies) {
		t.Errorf("strategies are %v and %v", a.strategies, b.strategies)
	}

	other := b.seeds.saved()
	for i, c := range a.seeds.saved() {
		if !reflect.DeepEqual(c.Array, other[i].Array) {
			t.Errorf("field %s differs", c.Name)
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

// TestEveryBitIsRestored checks that negative zero and the smallest and largest numbers are
// restored bit by bit.
func TestEveryBitIsRestored(t *testing.T) {
	a := filled(t, 4)
	copy(a.seeds.runMean, []float64{math.MaxFloat64, -math.MaxFloat64,
		math.Copysign(0, -1), 5e-324})
	copy(a.seeds.gradNorm, []float32{math.MaxFloat32, float32(math.Copysign(0, -1)), 0,
		math.SmallestNonzeroFloat32})
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
				t.Errorf("%s: seed %d has %x and %x, want %x and %x", name, i, b.seeds.runMean[i],
					b.seeds.gradNorm[i], a.seeds.runMean[i], a.seeds.gradNorm[i])
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

	// Neither lattice may share memory with the arrays.
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

// TestEveryFlippedByteIsFound checks that any flipped byte of a saved lattice is noticed, and that
// the error names the seed if the byte belongs to one.
func TestEveryFlippedByteIsFound(t *testing.T) {
	const n = 3
	a := filled(t, n)
	data, err := a.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}

	saved := a.seeds.saved()
	start := len(data) - n*columns.RowWidth(saved)
	owner := map[int]int{} // seed that owns a byte
	at := start
	for _, c := range saved {
		for i := range n * c.Width() {
			owner[at+i] = i / c.Width()
		}
		at += n * c.Width()
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
			if seed, ok := owner[i]; !errors.Is(err, ErrCorrupt) ||
				ok && !strings.Contains(err.Error(), fmt.Sprintf("seed %d ", seed)) {
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

// TestOtherShapes checks that a lattice rejects data with different numbers of seeds, features or
// slots, or a different slot width, and adopts whatever it does not know about its own slots.
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
		"seeds": made(2, 8), "features": made(4, 16), "slots": made(4, 8, WithSlots(4)),
		"width": made(4, 8, WithWidth(2)),
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
		"no header": {func(x []Array) []Array {
			find(x, "header").Name = "footer"
			return x
		}, ErrCorrupt, `"header"`},
		"cut header": {func(x []Array) []Array {
			h := find(x, "header")
			h.Data = h.Data.([]uint8)[:40]
			return x
		}, ErrCorrupt, "header"},
		"bent header": {func(x []Array) []Array {
			find(x, "header").Data.([]uint8)[30] ^= 1
			return x
		}, ErrCorrupt, "checksum"},
		"missing": {func(x []Array) []Array { return x[:len(x)-1] }, ErrCorrupt, "arrays"},
		"twice":   {func(x []Array) []Array { return append(x, x[3]) }, ErrCorrupt, "twice"},
		"unknown": {func(x []Array) []Array {
			find(x, "stage").Name = "phase"
			return x
		}, ErrCorrupt, `"stage"`},
		"wrong type": {func(x []Array) []Array {
			find(x, "alpha").Data = make([]float64, 4)
			return x
		}, ErrCorrupt, `"alpha"`},
		"nil": {func(x []Array) []Array {
			find(x, "alpha").Data = nil
			return x
		}, ErrCorrupt, `"alpha"`},
		"short": {func(x []Array) []Array {
			find(x, "slot").Data = make([]uint16, 3)
			return x
		}, ErrCorrupt, `"slot"`},
		"bent": {func(x []Array) []Array {
			find(x, "slot").Data.([]uint16)[2] ^= 4
			return x
		}, ErrCorrupt, "seed 2 "},
		"bent sum": {func(x []Array) []Array {
			find(x, "crc32").Data.([]uint32)[3] ^= 4
			return x
		}, ErrCorrupt, "seed 3 "},
		"swapped seed": {func(x []Array) []Array { swapAll(x); return x }, ErrCorrupt, "seed 0 "},
		"other size": {func([]Array) []Array {
			return filled(t, 5).Arrays()
		}, ErrArgument, "5 seeds"},
		"nothing": {func([]Array) []Array { return nil }, ErrCorrupt, `"header"`},
	} {
		b := filled(t, 4)
		before, err := b.MarshalBinary()
		if err != nil {
			t.Fatal(err)
		}
		if err := b.SetArrays(c.change(a.Arrays())); !errors.Is(err, c.is) ||
			!strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: error %v, want %q", name, err, c.text)
		}
		if after, _ := b.MarshalBinary(); string(after) != string(before) {
			t.Errorf("%s: the lattice was changed", name)
		}
	}
}

// swapAll exchanges seeds 0 and 1 including their checksums, which also cover the seed's number.
func swapAll(arrays []Array) {
	for _, a := range arrays {
		if a.Name != headerName {
			reflect.Swapper(a.Data)(0, 1)
		}
	}
}

// resaved saves a lattice as a program with another schema would: change edits the header and the
// list of fields.
func resaved(t *testing.T, l *Lattice,
	change func(h *header, fields []columns.Column) []columns.Column) []byte {
	t.Helper()
	h := l.header()
	fields := change(&h, l.seeds.columns())
	crc := make([]uint32, l.n)
	checksums(fields, h.Schema).Seal(0, l.n, crc)
	fields = append(fields, columns.Column{Name: crcName, Array: &crc})
	h.Fields = columns.Fields(fields)
	return columns.AppendRows(h.bytes(0), fields, l.n)
}

func TestSchemaVersions(t *testing.T) {
	a := filled(t, 4)
	newer := resaved(t, a, func(h *header, f []columns.Column) []columns.Column {
		h.Schema = Schema + 1
		return f
	})
	var b Lattice
	if err := b.UnmarshalBinary(newer); !errors.Is(err, ErrSchema) || !strings.Contains(err.Error(),
		fmt.Sprintf("version %d", Schema+1)) {
		t.Errorf("a newer schema: error %v", err)
	}

	// An older version had no drift, but a field that no longer exists.
	gone := []uint16{1, 2, 3, 4}
	older := resaved(t, a, func(h *header, f []columns.Column) []columns.Column {
		h.Schema = Schema - 1
		f = slices.DeleteFunc(f, func(c columns.Column) bool { return c.Name == "drift" })
		for _, c := range f {
			if c.Name == "schema" {
				c.Array = &[]uint8{Schema - 1, Schema - 1, Schema - 1, Schema - 1}
			}
		}
		return append(f, columns.Column{Name: "gone", Array: &gone})
	})

	if err := b.UnmarshalBinary(older); err != nil {
		t.Fatal(err)
	}

	if err := b.Verify(); err != nil {
		t.Error(err)
	}

	clear(a.seeds.drift)
	figures := [][]uint16{a.seeds.mean, a.seeds.lowest, a.seeds.highest, a.seeds.snr,
		a.seeds.gradVariance, a.seeds.gradMax}
	for _, all := range figures { // these were Float16
		for i, bits := range all {
			all[i] = toBFloat16(fromFloat16(bits))
		}
	}

	a.seal(0, a.n)
	same(t, a, &b)
	for name, change := range map[string]func(h *header, f []columns.Column) []columns.Column{
		"a field too few": func(_ *header, f []columns.Column) []columns.Column { return f[1:] },
		"a field too many": func(_ *header, f []columns.Column) []columns.Column {
			return append(f, columns.Column{Name: "more", Array: &gone})
		},
		"no seeds": func(h *header, f []columns.Column) []columns.Column {
			h.Seeds = 0
			return f
		},
		"uneven": func(h *header, f []columns.Column) []columns.Column {
			h.Hidden = 7
			return f
		},
		"too many seeds": func(h *header, f []columns.Column) []columns.Column {
			h.Seeds, h.Hidden = 1<<31, 1<<31
			return f
		},
		"bad config": func(h *header, f []columns.Column) []columns.Column {
			h.Config.Telemetry.Mode = 77
			return f
		},
		"bad strategy": func(h *header, f []columns.Column) []columns.Column {
			h.Strategies[1].Params = []byte(`{"epochs":-1}`)
			return f
		},
		"no strategies": func(h *header, f []columns.Column) []columns.Column {
			h.Strategies = nil
			return f
		},
	} {
		if err := new(Lattice).UnmarshalBinary(resaved(t, a, change)); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: error %v", name, err)
		}
	}

	unknown := resaved(t, a, func(h *header, f []columns.Column) []columns.Column {
		h.Strategies[1].Name = "Telepathy"
		return f
	})
	if err := new(Lattice).UnmarshalBinary(unknown); !errors.Is(err, ErrArgument) ||
		!strings.Contains(err.Error(), "Telepathy") {
		t.Errorf("an unknown strategy: error %v", err)
	}

	copy(a.seeds.stage, []uint8{5, 5, 5, 5})
	copy(a.seeds.kind, []uint8{1, 1, 1, 1})
	a.seal(0, a.n)
	renamed := resaved(t, a, func(h *header, f []columns.Column) []columns.Column {
		h.Kinds[1] = "Wavelet"
		return f
	})
	if err := new(Lattice).UnmarshalBinary(renamed); !errors.Is(err, ErrArgument) ||
		!errors.Is(err, blueprints.ErrUnknownKind) || !strings.Contains(err.Error(), "Wavelet") {
		t.Errorf("an unknown kind: error %v", err)
	}

	for name, bend := range map[string]func(){
		"stage": func() {
			a.seeds.stage[2] = lifecycle.Count
		}, "α": func() { a.seeds.alpha[2] = 1.5 },
		"strategy": func() { a.seeds.strategy[2] = 2 }, "schema": func() { a.seeds.schema[2] = 9 },
	} {
		a = filled(t, 4)
		bend()
		a.seal(0, a.n)
		data, err := a.MarshalBinary()
		if err != nil {
			t.Fatal(err)
		}
		if err := new(Lattice).UnmarshalBinary(data); !errors.Is(err, ErrCorrupt) ||
			!strings.Contains(err.Error(), "seed 2: "+name) {
			t.Errorf("%s out of range under a valid checksum: error %v", name, err)
		}
	}
}

// FuzzUnmarshal decodes altered lattices, also with a corrected header checksum, which the fuzzer
// could hardly find by itself. Decoding may take memory only in proportion to the data, whatever
// the header promises.
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
	f.Add([]byte(columns.Magic), false)
	f.Fuzz(func(t *testing.T, data []byte, repair bool) {
		if size := len(data) - columns.Prefix; repair && size >= 0 {
			head := min(size, int(binary.LittleEndian.Uint32(data[len(columns.Magic):])))
			binary.LittleEndian.PutUint32(data[len(columns.Magic)+4:],
				crc32.ChecksumIEEE(data[columns.Prefix:][:head]))
		}
		var l Lattice
		var err error
		bounded.Run(t, int64(len(data)), func() { err = l.UnmarshalBinary(data) })
		if err == nil && l.Verify() != nil {
			t.Error("a lattice was loaded that does not match its checksums")
		}
	})
}

// TestForged checks that states which no sequence of calls can produce are rejected by both decoders
// although their checksums match, and that nothing changes.
func TestForged(t *testing.T) {
	nan, inf := float32(math.NaN()), math.Inf(1)
	for name, forge := range map[string]func(l *Lattice, s *seedState){
		"slot is 300 of 300":  func(_ *Lattice, s *seedState) { s.slot[1] = 300 },
		"stage is 11":         func(_ *Lattice, s *seedState) { s.stage[1] = 11 },
		"strategy is 9 of":    func(_ *Lattice, s *seedState) { s.strategy[1] = 9 },
		"α is NaN":            func(_ *Lattice, s *seedState) { s.alpha[1] = nan },
		"α is 1.5":            func(_ *Lattice, s *seedState) { s.alpha[1] = 1.5 },
		"schema version is 1": func(_ *Lattice, s *seedState) { s.schema[1] = 1 },
		"finished is 2":       func(_ *Lattice, s *seedState) { s.finished[1] = 2 },
		"learning is 3":       func(_ *Lattice, s *seedState) { s.learning[1] = 3 },
		"7 errors in 3 trials": func(_ *Lattice, s *seedState) {
			s.stageErrors[1], s.stageTrials[1] = 7, 3
		},
		"run_mean is +Inf":   func(_ *Lattice, s *seedState) { s.runMean[1] = inf },
		"run_variance is -1": func(_ *Lattice, s *seedState) { s.runVariance[1] = -1 },
		"norm_count is -3":   func(_ *Lattice, s *seedState) { s.normCount[1] = -3 },
		"grad_norm is NaN":   func(_ *Lattice, s *seedState) { s.gradNorm[1] = nan },
		"stability is NaN": func(_ *Lattice, s *seedState) {
			s.stability[1] = toFloat16(math.NaN())
		},
		"variance is -1": func(_ *Lattice, s *seedState) { s.variance[1] = -1 },
		"base_performance is -Inf": func(_ *Lattice, s *seedState) {
			s.basePerformance[1] = float32(-inf)
		},
		"training_error is +Inf": func(_ *Lattice, s *seedState) {
			s.trainingError[1] = float32(inf)
		},
		"reported 9 NaN and Inf": func(_ *Lattice, s *seedState) {
			s.nonFiniteReported[1], s.nonFiniteX[1], s.nonFiniteG[1] = 9, 4, 4
		},
		"epoch 4294967295 and step": func(l *Lattice, _ *seedState) {
			l.epoch = math.MaxUint32
		},
		"and step 18446744073709551615": func(l *Lattice, _ *seedState) {
			l.step = math.MaxUint64
		},
		"performance is NaN": func(_ *Lattice, s *seedState) { s.performance[1] = nan },
		"it is Grafting but has no slot": func(l *Lattice, s *seedState) {
			l.config.Gates = true
			s.slot[0] = 1 // the slot drawn by fill may be 0
			s.stage[1], s.slot[1] = uint8(Grafting), 0
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := filled(t, 4)
			forge(l, l.seeds)
			l.seal(0, l.n)
			data, err := l.MarshalBinary()
			require.NoError(t, err)
			into := filled(t, 4)
			before, err := into.MarshalBinary()
			require.NoError(t, err)
			for _, err := range []error{into.UnmarshalBinary(data), into.SetArrays(l.Arrays())} {
				require.ErrorIs(t, err, ErrCorrupt)
				require.ErrorContains(t, err, name)
			}

			after, err := into.MarshalBinary()
			require.NoError(t, err)
			require.Equal(t, before, after)
		})
	}
}

// TestOverflowingFigures checks that overflowing figures do not become limits for later passes, and
// that a lattice that has seen them can be loaded.
func TestOverflowingFigures(t *testing.T) {
	l, err := NewLattice(1, 4)
	require.NoError(t, err)
	var p Pass
	for _, m := range []Moments{moments(8, 1, 2), moments(8, math.MaxFloat64, math.Inf(1)),
		moments(8, math.NaN(), 1), moments(8, 1, 1e300)} {
		l.Begin(&p, true)
		require.NoError(t, l.RecordHealth(&p, func(int) HealthSample {
			return HealthSample{Moments: m, Health: Health{Variance: m.Variance, Mean: m.Mean}}
		}))
		require.NoError(t, l.RecordGradient(&p, func(int) GradientSample {
			return GradientSample{Norms: m, Gradient: Gradient{Norm: m.Variance}}
		}))
		_, err := l.StepEpoch(Metrics{})
		require.NoError(t, err)
		l.Begin(&p, true)
		require.True(t, p.Input[0].Valid() && p.Norms[0].Valid())
		data, err := l.MarshalBinary()
		require.NoError(t, err)
		require.NoError(t, new(Lattice).UnmarshalBinary(data), "after %+v", m)
	}
}

// FuzzNetworkLoad loads a network's own arrays after altering one and, if repair is set, correcting
// the checksums of the header and the seeds. Either Load rejects them and nothing changes, or the
// network holds them and continues.
func FuzzNetworkLoad(f *testing.F) {
	for which := range uint8(6) {
		f.Add(which, uint16(3), []byte{255}, which%2 == 0)
	}

	f.Add(uint8(0), uint16(columns.Prefix), []byte(`{"schema":1,"seeds":2,"hidden":1000000000000`),
		true)
	f.Fuzz(func(t *testing.T, which uint8, at uint16, data []byte, repair bool) {
		l, err := NewLattice(2, 4, WithoutGates(), WithSlots(3), WithWidth(2))
		require.NoError(t, err)
		n, err := NewNetwork(nil, Layer{Name: "a", Lattice: l})
		require.NoError(t, err)
		require.NoError(t, l.RequestGermination(0, GerminationRequest{Slot: 1}))
		before, arrays := fmt.Sprint(n.Arrays()), n.Arrays()
		memory := bytesOf(arrays[int(which)%len(arrays)].Data)
		if int(at) < len(memory) {
			copy(memory[at:], data)
		}

		if repair {
			renew(arrays)
		}

		var install func()
		bounded.Run(t, int64(len(data)), func() { install, err = n.Load(arrays) })
		require.True(t, before == fmt.Sprint(n.Arrays()), "Load itself changes something")
		if err != nil {
			return
		}

		install()
		require.NoError(t, n.Verify())
		_, err = n.StepEpoch([]Metrics{{}})
		_ = err // there may be no figures to judge by, but it must not panic
		n.Report()
		n.Arrays()
	})
}

// bytesOf returns the memory of a slice of numbers.
func bytesOf(data any) []byte {
	v := reflect.ValueOf(data)
	return unsafe.Slice((*byte)(v.UnsafePointer()), v.Len()*int(v.Type().Elem().Size()))
}

// repair makes the checksums of arrays valid if the header can be read.
func renew(arrays []Array) {
	head := arrays[0].Data.([]uint8)
	const at = len(columns.Magic)
	size := min(len(head)-columns.Prefix, int(binary.LittleEndian.Uint32(head[at:])))
	binary.LittleEndian.PutUint32(head[at+4:], crc32.ChecksumIEEE(head[columns.Prefix:][:size]))
	h, _, err := parseHead(head)
	if err != nil || h.Seeds != 2 {
		return
	}

	var fields []columns.Column
	for _, a := range arrays[1 : len(arrays)-1] {
		p := reflect.New(reflect.TypeOf(a.Data))
		p.Elem().Set(reflect.ValueOf(a.Data))
		_, name, _ := strings.Cut(a.Name, ".")
		fields = append(fields, columns.Column{Name: name, Array: p.Interface()})
	}

	sums := arrays[len(arrays)-1].Data.([]uint32)
	checksums(fields, h.Schema).Seal(0, h.Seeds, sums)
}
