// Package tensorboard writes the curves, samples and seed statistics of a run as event files for
// TensorBoard.
//
// An event file is a sequence of records of this form:
//
//	length     uint64, little-endian
//	check      uint32: the masked CRC-32C of the length
//	event      a protocol buffer of that length
//	check      uint32: the masked CRC-32C of the event
//
// The masked form of a checksum c is ((c >> 15) | (c << 17)) + 0xa282ead8, modulo 2³².
// TensorFlow's event.proto and summary.proto define the protocol buffers.
package tensorboard

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// Events returns a callback that writes an event file for each run to a directory, which it creates
// if necessary.
//
// The scalars are train/loss, train/learning_rate, train/gradient_norm, train/tokens_per_second,
// validation/loss, validation/bits_per_byte and, for each stage, seeds/STAGE with the number of
// seeds. Samples are written as the text "sample". After each epoch, the histograms
// lattice/LAYER/alpha, dead_ratio, variance and gradient_norm are written for each lattice. Events
// omits NaN and infinite numbers.
func Events(folder string) llm.Callback {
	w := &writer{folder: folder}
	return func(e llm.Event) error {
		if err := w.event(e); err != nil {
			return fmt.Errorf("tensorboard: Events: %w", err)
		}
		return nil
	}
}

type writer struct {
	folder string
	file   *os.File
	failed bool // a write has failed in this run
	runs   int  // number of runs so far, which makes file names unique
}

func (w *writer) event(e llm.Event) error {
	if e.Kind == llm.RunStart {
		w.failed = false
		if err := w.open(); err != nil {
			w.failed = true
			return err
		}
	}

	if w.failed || w.file == nil {
		return nil
	}

	var err error
	if values := summary(e); len(values) > 0 {
		_, err = w.file.Write(record(event(e.Step, values)))
	}

	w.failed = err != nil
	if e.Kind == llm.RunEnd || err != nil {
		err = errors.Join(err, w.file.Close())
		w.file = nil
	}

	return err
}

// open starts a new file. TensorBoard requires "tfevents" in the name and reads files in the order of
// their names.
func (w *writer) open() (err error) {
	if w.folder == "" {
		return errors.New("the name of the folder is empty")
	}

	if err := os.MkdirAll(w.folder, 0o777); err != nil {
		return err
	}

	w.runs++
	name := fmt.Sprintf("events.out.tfevents.%010d.%d.%d", time.Now().Unix(), os.Getpid(), w.runs)
	if w.file, err = os.OpenFile(filepath.Join(w.folder, name), os.O_CREATE|os.O_EXCL|os.O_WRONLY,
		0o666); err != nil {
		return err
	}

	first := protowire.AppendTag(stamped(nil), 3, protowire.BytesType) // file_version
	_, err = w.file.Write(record(protowire.AppendString(first, "brain.Event:2")))
	if err != nil {
		err = errors.Join(err, w.file.Close())
		w.file = nil
	}

	return err
}

// summary returns the values of an event, each as a Summary.Value.
func summary(e llm.Event) (values [][]byte) {
	add := func(tag string, x float64) {
		if !math.IsNaN(x) && !math.IsInf(x, 0) {
			values = append(values, scalar(tag, x))
		}
	}

	switch e.Kind {
	case llm.StepEnd:
		add("train/loss", e.Loss)
		add("train/learning_rate", e.LearningRate)
		add("train/gradient_norm", e.GradNorm)
		add("train/tokens_per_second", float64(e.RunTokens)/e.Elapsed.Seconds())
	case llm.EvalEnd:
		add("validation/loss", e.ValLoss)
		add("validation/bits_per_byte", e.ValBPB)
	case llm.Sampled:
		values = append(values, text("sample", e.Text))
	case llm.EpochEnd:
		var counts [state.RolledBack + 1]int
		for layer, r := range e.Reports {
			for i := range r.Seeds {
				counts[r.Seeds[i].Stage]++
			}
			values = append(values, histograms(layer, r.Seeds)...)
		}
		for stage, n := range counts {
			add("seeds/"+state.Stage(stage).String(), float64(n))
		}
	}

	return values
}

// histograms returns the histograms of a lattice.
func histograms(layer int, seeds []state.SeedReport) (values [][]byte) {
	for _, f := range []struct {
		name string
		of   func(*state.SeedReport) float64
	}{
		{"alpha", func(s *state.SeedReport) float64 { return s.Alpha }},
		{"dead_ratio", func(s *state.SeedReport) float64 { return s.Health.DeadRatio }},
		{"variance", func(s *state.SeedReport) float64 { return s.Health.Variance }},
		{"gradient_norm", func(s *state.SeedReport) float64 { return s.Gradient.Norm }},
	} {
		var all []float64
		for i := range seeds {
			if x := f.of(&seeds[i]); !math.IsNaN(x) && !math.IsInf(x, 0) {
				all = append(all, x)
			}
		}
		if len(all) > 0 {
			values = append(values, histogram(fmt.Sprintf("lattice/%d/%s", layer, f.name), all))
		}
	}

	return values
}

// scalar returns a value that contains a number.
func scalar(tag string, x float64) []byte {
	b := named(tag)
	b = protowire.AppendTag(b, 2, protowire.Fixed32Type) // simple_value
	return protowire.AppendFixed32(b, math.Float32bits(float32(x)))
}

// text returns a value that contains a string, for TensorBoard's plugin "text".
func text(tag, s string) []byte {
	plugin := field(nil, 1, []byte("text")) // plugin_name
	metadata := field(nil, 1, plugin)       // plugin_data
	tensor := protowire.AppendTag(nil, 1, protowire.VarintType)
	tensor = protowire.AppendVarint(tensor, 7) // dtype: DT_STRING
	tensor = field(tensor, 2, nil)             // tensor_shape: a scalar
	tensor = field(tensor, 8, []byte(s))       // string_val
	return field(field(named(tag), 8, tensor), 9, metadata)
}

// buckets is the number of equally wide buckets in a histogram.
const buckets = 30

// histogram returns a value that contains the distribution of numbers.
func histogram(tag string, all []float64) []byte {
	low, high := slices.Min(all), slices.Max(all)
	width := (high - low) / buckets

	var counts [buckets]float64
	var sum, squares float64
	for _, x := range all {
		i := buckets - 1
		if width > 0 {
			i = min(i, int((x-low)/width))
		}
		counts[i]++
		sum, squares = sum+x, squares+x*x
	}

	// The fields min, max, num, sum and sum_squares.
	var h, limits, heights []byte
	for i, x := range []float64{low, high, float64(len(all)), sum, squares} {
		h = protowire.AppendFixed64(protowire.AppendTag(h, protowire.Number(i+1),
			protowire.Fixed64Type), math.Float64bits(x))
	}

	for i, n := range counts {
		limit := low + float64(i+1)*width
		if i == buckets-1 {
			limit = high
		}
		limits = protowire.AppendFixed64(limits, math.Float64bits(limit))
		heights = protowire.AppendFixed64(heights, math.Float64bits(n))
	}

	// histo: bucket_limit, bucket
	return field(named(tag), 5, field(field(h, 6, limits), 7, heights))
}

// named returns a Summary.Value with only its tag.
func named(tag string) []byte { return field(nil, 1, []byte(tag)) }

// event returns an Event that contains a summary of values.
func event(step int, values [][]byte) []byte {
	b := protowire.AppendTag(stamped(nil), 2, protowire.VarintType) // step
	b = protowire.AppendVarint(b, uint64(step))
	var s []byte
	for _, v := range values {
		s = field(s, 1, v)
	}
	return field(b, 5, s)
}

// stamped appends the current time as wall_time.
func stamped(b []byte) []byte {
	b = protowire.AppendTag(b, 1, protowire.Fixed64Type)
	return protowire.AppendFixed64(b, math.Float64bits(float64(time.Now().UnixMicro())/1e6))
}

// field appends a field that contains bytes.
func field(b []byte, number protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, number, protowire.BytesType), value)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// masked returns the masked checksum of b.
func masked(b []byte) uint32 {
	c := crc32.Checksum(b, castagnoli)
	return (c>>15 | c<<17) + 0xa282ead8
}

// record returns the record that contains an event.
func record(e []byte) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(e)))
	b = binary.LittleEndian.AppendUint32(b, masked(b))
	return binary.LittleEndian.AppendUint32(append(b, e...), masked(e))
}
