package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/curve"
	"github.com/kasmina-go/kasmina/state/graft"
	"github.com/kasmina-go/kasmina/state/internal/columns"
	"github.com/kasmina-go/kasmina/state/lifecycle"
)

// image holds the complete contents of a saved lattice.
type image struct {
	n, hidden  int
	config     config
	epoch      uint32
	step       uint64
	loss       float64
	curve      []Point
	strategies []graft.Entry
	seeds      *seedState

	quarantined []Event
}

// header holds, as JSON, everything in a saved lattice except the arrays with one element per seed.
type header struct {
	Schema     int             `json:"schema"`
	Seeds      int             `json:"seeds"`
	Hidden     int             `json:"hidden"`
	Epoch      uint32          `json:"epoch"`
	Step       uint64          `json:"step"`
	Loss       float64         `json:"loss"`
	Curve      []Point         `json:"curve,omitempty"`
	Config     config          `json:"config"`
	Strategies []graft.Saved   `json:"strategies"`
	Kinds      []string        `json:"kinds"`  // names of the blueprint kinds by number
	Fields     []columns.Field `json:"fields"` // arrays that follow; the last holds the checksums
}

const crcName = "crc32"

// Limits far beyond any run, so that a loaded lattice can continue counting without overflow.
const (
	maxEpoch = math.MaxInt32
	maxStep  = 1 << 62
)

// header returns the header of the saved form.
func (l *Lattice) header() header {
	h := header{Schema: Schema, Seeds: l.n, Hidden: l.hidden, Epoch: l.epoch, Step: l.step,
		Loss: l.loss, Curve: l.curve, Config: l.config}
	for _, s := range l.strategies {
		h.Strategies = append(h.Strategies, s.Saved)
	}
	for k := range blueprints.Kinds() {
		h.Kinds = append(h.Kinds, blueprints.Kind(k).String())
	}
	h.Fields = columns.Fields(l.seeds.saved())
	return h
}

// saved returns all fields that are saved, with the checksums last.
func (s *seedState) saved() []columns.Column {
	return append(s.columns(), columns.Column{Name: crcName, Array: &s.crc})
}

// bytes returns the head of the binary form, with capacity for the given number of further bytes.
func (h header) bytes(more int) []byte {
	// Marshaling a header cannot fail: its floats are finite, and strategies are admitted only if
	// they can be encoded.
	text, _ := json.Marshal(h)
	return columns.Head(text, more)
}

// parseHead returns the header at the start of data and the bytes after it.
func parseHead(data []byte) (h *header, rest []byte, err error) {
	text, rest, err := columns.ParseHead(data)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	h, err = parseHeader(text)
	return h, rest, err
}

// MarshalBinary returns the lattice's complete state. It returns an error if there are no seeds. It
// implements [encoding.BinaryMarshaler].
func (l *Lattice) MarshalBinary() ([]byte, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()

	if l.n == 0 {
		return nil, fmt.Errorf("state.MarshalBinary: %w: the lattice has no seeds", ErrArgument)
	}
	saved := l.seeds.saved()
	return columns.AppendRows(l.header().bytes(l.n*columns.RowWidth(saved)), saved, l.n), nil
}

// UnmarshalBinary replaces the lattice's contents with data returned by MarshalBinary. A lattice with
// seeds accepts only data of the same shape; otherwise the error wraps [ErrShape].
//
// Blueprint kinds and strategies are looked up by name, so a program must have registered those in
// use, in any order.
//
// For corrupted data, the error wraps [ErrCorrupt] and names the seed where possible. For data from a
// later version of this package, it wraps [ErrSchema]. After an error, the lattice is unchanged. It
// implements [encoding.BinaryUnmarshaler].
func (l *Lattice) UnmarshalBinary(data []byte) error {
	img, err := parse(data)
	if err != nil {
		return fmt.Errorf("state.UnmarshalBinary: %w", err)
	}
	return l.replace("UnmarshalBinary", img)
}

// replace installs img after checking that it fits the lattice.
func (l *Lattice) replace(method string, img *image) error {
	l.mu.Lock()
	defer l.mu.Unlock()

	if err := l.adapt(img); err != nil {
		return fmt.Errorf("state.%s: %w", method, err)
	}
	l.install(img)
	return nil
}

// adapt gives img the slot width if only the lattice knows it. It returns an error wrapping
// ErrShape or blueprints.ErrWidth if img cannot become the lattice's contents.
func (l *Lattice) adapt(img *image) error {
	if img.config.Width == 0 { // saved by a lattice that did not know the width
		img.config.Width = l.config.Width
	}

	differ := func(own, saved int) bool { return own > 0 && own != saved }
	switch {
	case l.n == 0:
		return nil
	case l.config.Site != img.config.Site:
		return fmt.Errorf("%w: %w: the saved lattice grows in %v, this one in %v", ErrArgument,
			ErrShape, img.config.Site, l.config.Site)
	case l.n != img.n || l.hidden != img.hidden:
		return fmt.Errorf("%w: %w: the saved lattice has %d seeds over %d features, this one %d over "+
			"%d",
			ErrArgument, ErrShape, img.n, img.hidden, l.n, l.hidden)
	case differ(l.config.Slots, img.config.Slots):
		return fmt.Errorf("%w: %w: the saved lattice has %d slots, this one %d", ErrArgument, ErrShape,
			img.config.Slots, l.config.Slots)
	case differ(l.config.Width, img.config.Width):
		return fmt.Errorf("%w: %w: the saved lattice has slots of %d weights, this one of %d",
			ErrArgument, ErrShape, img.config.Width, l.config.Width)
	case img.config.Width > 0 && img.config.Site == blueprints.Chunk:
		return img.seeds.fit(img.hidden, img.config.Width)
	}

	return nil
}

// parse decodes the binary form of a lattice.
func parse(data []byte) (*image, error) {
	h, rest, err := parseHead(data)
	if err != nil {
		return nil, err
	}

	stored, err := h.columns()
	if err != nil {
		return nil, err
	}
	if err := columns.ReadRows(stored, h.Seeds, rest); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return h.image(stored)
}

// parseHeader decodes a header and checks its fields.
func parseHeader(head []byte) (*header, error) {
	var version struct {
		Schema int `json:"schema"`
	}
	if err := json.Unmarshal(head, &version); err != nil {
		return nil, fmt.Errorf("%w: header: %w", ErrCorrupt, err)
	}
	if version.Schema > Schema {
		return nil, fmt.Errorf("%w: the data has version %d, and this program reads up to %d",
			ErrSchema, version.Schema, Schema)
	}

	h := &header{}
	if err := json.Unmarshal(head, h); err != nil {
		return nil, fmt.Errorf("%w: header: %w", ErrCorrupt, err)
	}
	if h.Epoch > maxEpoch || h.Step > maxStep {
		return nil, fmt.Errorf("%w: header: epoch %d and step %d, want at most %d and %d",
			ErrCorrupt, h.Epoch, h.Step,
			maxEpoch, uint64(maxStep))
	}
	if err := curve.Check(h.Curve, h.Epoch); err != nil {
		return nil, fmt.Errorf("%w: header: %w", ErrCorrupt, err)
	}
	if h.Seeds < 1 || uint64(h.Seeds) > math.MaxUint32 || h.Hidden < 1 || h.Hidden%h.Seeds != 0 {
		return nil, fmt.Errorf("%w: header: %d seeds over %d features",
			ErrCorrupt, h.Seeds, h.Hidden)
	}
	return h, nil
}

// columns returns empty columns for the fields that the header lists.
func (h *header) columns() ([]columns.Column, error) {
	stored, err := columns.Empty(h.Fields)
	if err != nil {
		return nil, fmt.Errorf("%w: header: %w", ErrCorrupt, err)
	}

	last := columns.Field{}
	if n := len(h.Fields); n > 0 {
		last = h.Fields[n-1]
	}
	if last != (columns.Field{Name: crcName, Type: "uint32"}) {
		return nil, fmt.Errorf("%w: header: the last field is %q, want the checksums", ErrCorrupt,
			last)
	}
	return stored, nil
}

// image checks and assembles the decoded fields. stored holds the columns in the order of the
// header, checksums last; the image takes ownership of them.
func (h *header) image(stored []columns.Column) (*image, error) {
	crc := *stored[len(stored)-1].Array.(*[]uint32)
	stored = stored[:len(stored)-1]
	if err := h.Config.check(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}

	sums := checksums(stored, h.Schema)
	found := sums.All(crc)
	if err := faultError(sums, found, h.Seeds); err != nil && !h.Config.Quarantine {
		return nil, err
	}

	seeds, err := h.emptySeeds(stored)
	if err != nil {
		return nil, err
	}

	img := &image{n: h.Seeds, hidden: h.Hidden, config: h.Config, epoch: h.Epoch, step: h.Step,
		loss: h.Loss, curve: h.Curve, seeds: seeds}
	if err := h.migrate(img.seeds, stored); err != nil {
		return nil, err
	}

	copy(img.seeds.crc, crc)
	for _, f := range found {
		img.seeds.reset(f.Row)
		img.quarantined = append(img.quarantined,
			Event{Kind: Quarantined, Seed: f.Row, Epoch: int(h.Epoch),
				Reason: sums.Locate(f.Syndrome)})
	}

	for _, s := range h.Strategies {
		strategy, err := s.Load()
		if errors.Is(err, graft.ErrUnknown) {
			return nil, fmt.Errorf("%w: %w", ErrArgument, err)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		img.strategies = append(img.strategies, strategy)
	}

	if err := img.check(); err != nil {
		return nil, err
	}

	renumbered, err := img.renumber(h.Kinds)
	if err != nil {
		return nil, err
	}

	if h.Schema < Schema || len(found) > 0 || renumbered {
		checksums(img.seeds.columns(), Schema).Seal(0, img.n, img.seeds.crc)
	}
	return img, nil
}

// check returns an error if an option has an impossible value.
func (c config) check() error {
	if _, err := c.Site.MarshalText(); err != nil {
		return err
	}
	if err := c.Thresholds.Check(); err != nil {
		return err
	}
	if !(c.Noise >= 0 && c.Noise <= 1) {
		return fmt.Errorf("the noise of α is %v, want 0 to 1", c.Noise)
	}
	if err := c.Telemetry.Check(); err != nil {
		return err
	}

	for _, err := range []error{
		inRange("embargo", c.Embargo, 0, math.MaxInt32),
		inRange("renormalize", c.Renormalize, 1, math.MaxInt32),
		inRange("slots", c.Slots, 0, math.MaxUint16+1), inRange("history", c.History, 0, 1<<16),
		inRange("width", c.Width, 0, math.MaxInt32),
		inRange("transitions", c.Transitions, 0, math.MaxUint8),
	} {
		if err != nil {
			return err
		}
	}

	return nil
}

// renumber maps the kinds of the seeds from the numbers of the program that saved them to this
// program's numbers. names lists the kinds of the program that saved them. renumber reports whether
// any number has changed. It returns an error if a kind in use is not registered.
func (img *image) renumber(names []string) (changed bool, err error) {
	s := img.seeds
	for i, number := range s.kind {
		active := Stage(s.stage[i]) != Dormant && s.slot[i] != 0
		var kind blueprints.Kind
		known := int(number) < len(names)
		if known {
			kind, known = blueprints.ByName(names[number])
		}
		switch {
		case active && int(number) >= len(names):
			return false, fmt.Errorf("%w: seed %d: kind is %d of %d", ErrCorrupt,
				i, number, len(names))
		case active && !known:
			return false,
				fmt.Errorf("%w: seed %d: %w %q: register it under this name with "+
					"blueprints.Register before the lattice is loaded",
					ErrArgument, i, blueprints.ErrUnknownKind, names[number])
		}

		changed = changed || s.kind[i] != uint8(kind)
		s.kind[i] = uint8(kind)
	}

	return changed, nil
}

// check returns an error unless all seeds are in a possible state, which matching checksums do not
// prove.
func (img *image) check() error {
	for i := range img.n {
		if err := img.checkSeed(i); err != nil {
			return fmt.Errorf("%w: seed %d: %w", ErrCorrupt, i, err)
		}
	}
	return nil
}

// checkSeed returns an error if a field of seed i has an impossible value.
func (img *image) checkSeed(i int) error {
	s, stage, slots := img.seeds, Stage(img.seeds.stage[i]), img.config.Slots
	if slots == 0 {
		slots = math.MaxUint16 + 1
	}

	switch {
	case stage >= lifecycle.Count:
		return fmt.Errorf("stage is %d", stage)
	case int(s.slot[i]) >= slots:
		return fmt.Errorf("slot is %d of %d", s.slot[i], slots)
	case img.config.Gates && stage.Alive() && s.slot[i] == 0:
		return fmt.Errorf("it is %v but has no slot", stage)
	case int(s.strategy[i]) >= len(img.strategies):
		return fmt.Errorf("strategy is %d of %d", s.strategy[i], len(img.strategies))
	case !(s.alpha[i] >= 0 && s.alpha[i] <= 1):
		return fmt.Errorf("α is %v", s.alpha[i])
	case s.schema[i] != Schema:
		return fmt.Errorf("schema version is %d, want %d", s.schema[i], Schema)
	case s.finished[i] > 1 || s.learning[i] > uint8(changing):
		return fmt.Errorf("finished is %d and learning is %d", s.finished[i], s.learning[i])
	case s.stageErrors[i] > s.stageTrials[i]:
		return fmt.Errorf("%d errors in %d trials", s.stageErrors[i], s.stageTrials[i])
	case s.nonFiniteReported[i] > addSaturating(s.nonFiniteX[i], int(s.nonFiniteG[i])):
		return fmt.Errorf("it has reported %d NaN and Inf, but saw %d in activations and %d in gradients", s.nonFiniteReported[i],
			s.nonFiniteX[i], s.nonFiniteG[i])
	}

	for _, f := range []struct {
		name  string
		value float64
		least float64
	}{
		{"step_mean", s.stepMean[i], anything}, {"step_variance", s.stepVariance[i], 0},
		{"step_count", s.stepCount[i], 0},
		{"run_mean", s.runMean[i], anything}, {"run_variance", s.runVariance[i], 0},
		{"run_count", s.runCount[i], 0},
		{"epoch_mean", s.epochMean[i], anything}, {"epoch_variance", s.epochVariance[i], 0},
		{"norm_mean", s.normMean[i], 0}, {"norm_variance", s.normVariance[i], 0},
		{"norm_count", s.normCount[i], 0},
		{"performance", float64(s.performance[i]), anything},
		{"stability", fromFloat16(s.stability[i]), 0},
	} {
		if !(f.value >= f.least) || math.IsInf(f.value, 0) {
			return fmt.Errorf("%s is %v", f.name, f.value)
		}
	}

	return s.checkOpen(i)
}

// checkOpen checks the figures of a seed that need not be finite, because they may overflow in
// float32 or are NaN until they are reported.
func (s *seedState) checkOpen(i int) error {
	for _, f := range []struct {
		name  string
		value float32
	}{{"variance", s.variance[i]}, {"dead_ratio", s.deadRatio[i]}, {"grad_norm", s.gradNorm[i]}} {
		if !(f.value >= 0) {
			return fmt.Errorf("%s is %v", f.name, f.value)
		}
	}

	for _, f := range []struct {
		name  string
		value float32
	}{{"training_error", s.trainingError[i]}, {"entry_training_error", s.entryTrainingError[i]},
		{"entry_loss", s.entryLoss[i]},
		{"entry_performance", s.entryPerformance[i]}, {"base_performance", s.basePerformance[i]}} {
		if math.IsInf(float64(f.value), 0) {
			return fmt.Errorf("%s is %v", f.name, f.value)
		}
	}

	return nil
}

// anything is the lower limit of a figure that may be any finite number.
var anything = math.Inf(-1)

// Array is a named array of a lattice's state, for storage formats such as safetensors.
type Array struct {
	Name  string
	Shape []int
	Data  any // []uint8, []uint16, []uint32, []uint64, []float32 or []float64
}

// headerName is the name of the array that holds the header.
const headerName = "header"

// Arrays returns a copy of the lattice's complete state as named arrays: one per field of the seeds,
// and "header", a byte vector with everything else. It returns none for the zero Lattice.
func (l *Lattice) Arrays() []Array {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.arrays()
}

// arrays implements Arrays. The caller holds the lock.
func (l *Lattice) arrays() []Array {
	if l.n == 0 {
		return nil
	}
	head := l.header().bytes(0)
	arrays := []Array{{headerName, []int{len(head)}, head}}
	for _, c := range l.seeds.saved() {
		arrays = append(arrays, Array{c.Name, []int{l.n}, c.Clone().Data()})
	}
	return arrays
}

// SetArrays replaces the lattice's contents with a copy of the given arrays, as returned by
// [Lattice.Arrays], in any order. It returns the same errors as UnmarshalBinary. After an error, the
// lattice is unchanged.
func (l *Lattice) SetArrays(arrays []Array) error {
	img, err := fromArrays(arrays)
	if err != nil {
		return fmt.Errorf("state.SetArrays: %w", err)
	}
	return l.replace("SetArrays", img)
}

// fromArrays checks and decodes named arrays.
func fromArrays(arrays []Array) (*image, error) {
	byName := map[string]any{}
	for _, a := range arrays {
		if _, twice := byName[a.Name]; twice {
			return nil, fmt.Errorf("%w: array %q occurs twice", ErrCorrupt, a.Name)
		}
		byName[a.Name] = a.Data
	}

	head, ok := byName[headerName].([]uint8)
	if !ok {
		return nil, fmt.Errorf("%w: array %q is missing or not []uint8", ErrCorrupt, headerName)
	}

	h, rest, err := parseHead(head)
	if err != nil {
		return nil, err
	}
	if len(rest) > 0 {
		return nil, fmt.Errorf("%w: %d bytes follow the header in array %q", ErrCorrupt,
			len(rest), headerName)
	}
	if len(arrays) != len(h.Fields)+1 {
		return nil, fmt.Errorf("%w: got %d arrays, want %d", ErrCorrupt,
			len(arrays), len(h.Fields)+1)
	}

	// These checks precede any allocation, so that a header claiming too many seeds cannot exhaust
	// memory.
	for _, f := range h.Fields {
		data := reflect.ValueOf(byName[f.Name])
		if !data.IsValid() || data.Type().String() != "[]"+f.Type || data.Len() != h.Seeds {
			return nil, fmt.Errorf("%w: array %q is a %T, want %d elements of type %s", ErrCorrupt,
				f.Name, byName[f.Name], h.Seeds, f.Type)
		}
	}

	stored, err := h.columns()
	if err != nil {
		return nil, err
	}

	for i, c := range stored {
		c.Set(byName[c.Name])
		stored[i] = c.Clone()
	}

	return h.image(stored)
}

// History of the schema:
//
//	2  adds "finished"
//	3  stores performance in single precision instead of Float16, and training_error, entry_loss, entry_performance and
//	   base_performance in single instead of double precision; drops delta and improvement, which can be computed; adds
//	   the last transitions
//	4  stores normal-quality figures as bfloat16 instead of Float16, whose range was too small; adds "entry_training_error",
//	   "slot_sum", "learning" and "scored"

// emptySeeds returns new seeds, the target of migrate. It rejects headers with too little data per
// seed to justify the allocation.
func (h *header) emptySeeds(stored []columns.Column) (*seedState, error) {
	if h.Schema < 3 {
		h.Config.Transitions = defaultTransitions
	}
	want := columns.RowWidth((&seedState{past: make([][]uint32, h.Config.Transitions)}).columns())
	if have := columns.RowWidth(stored); 2*have < want {
		return nil, fmt.Errorf("%w: header: the fields take %d bytes per seed, want %d",
			ErrCorrupt, have, want)
	}
	return newSeedState(h.Seeds, h.Config.Transitions), nil
}

// migrate moves the stored arrays into s. Data of the current schema must contain exactly the fields
// of s. In data of an older schema, fields that did not exist yet keep their initial values, and
// obsolete fields are dropped.
func (h *header) migrate(s *seedState, stored []columns.Column) error {
	byName := map[string]columns.Column{}
	for _, c := range stored {
		byName[c.Name] = c
	}

	old, moved := h.Schema < Schema, 0
	for _, c := range s.columns() {
		from, ok := byName[c.Name]
		if c.Name == "schema" && old {
			continue
		}
		switch {
		case ok && from.Type() == c.Type():
			c.Set(from.Data())
			moved++
		case ok && h.Schema < 3 && c.Narrow(from):
		case ok || !old:
			return fmt.Errorf("%w: field %q is missing or not %s", ErrCorrupt, c.Name, c.Type())
		}
	}

	if h.Schema < 4 {
		for _, figures := range [][]uint16{s.mean, s.lowest, s.highest, s.snr,
			s.gradVariance, s.gradMax} {
			for i, bits := range figures {
				figures[i] = toBFloat16(fromFloat16(bits))
			}
		}
	}

	if !old && moved != len(stored) {
		return fmt.Errorf("%w: %d fields are stored, want %d", ErrCorrupt, len(stored), moved)
	}
	return nil
}
