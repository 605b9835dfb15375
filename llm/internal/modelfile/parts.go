package modelfile

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/internal/safetensors"
)

// A checkpoint may consist of several files, which are called a set. The main file says how many
// parts belong to the set and how they are named. The parts stand next to it, one for each rank, and
// hold that rank's share of the optimizer's moments.
//
// A set is saved in this order: the parts, under names that no other set has, then the main file,
// which replaces its predecessor in one step, and only then are the parts of the predecessor removed.
// Whatever is killed at whatever moment, the main file therefore belongs to a complete set.
//
// A part holds flat stretches of moments. Each is named by OptimizerPrefix, the name of the moment,
// "@" and the index of the stretch's first element. If the moment does not have as many elements as its
// parameter, "/" and the number that it has follow. The ranks hold the stretches in order.

// PartsKey is where the main file has its [Parts], and a part its own [part].
const PartsKey = "kasmina.parts"

// Parts are the files beside a main file.
type Parts struct {
	ID    string `json:"id"` // sixteen hexadecimal digits, of this set alone
	Files int    `json:"files"`
}

// part is which of them a file is.
type part struct {
	Parts
	Rank int `json:"rank"`
}

const (
	maxParts    = 1 << 16
	maxPartText = 1 << 10
	// maxFields is the largest number of moments of a parameter that are read.
	maxFields = 8
)

// check says what is wrong with what a file says of its parts.
func (p Parts) check() error {
	if !regexp.MustCompile(`^[0-9a-f]{16}$`).MatchString(p.ID) || p.Files < 1 ||
		p.Files > maxParts {
		return fmt.Errorf("%w: its parts are %d of the set %.40q: want 1 to %d, and sixteen "+
			"hexadecimal digits", safetensors.ErrCorrupt, p.Files, p.ID, maxParts)
	}
	return nil
}

// The names of parts are made of the stem of the main file's name and a suffix. A main file may have
// any name that the file system takes, so the stem of a long name is shortened to leave room.
const (
	maxName   = 255 // bytes, on the file systems in use
	maxSuffix = len(".0123456789abcdef-65536of65536")
	maxStem   = maxName - maxSuffix
)

// file returns the path of a part of the checkpoint at path.
func (p Parts) file(path string, rank int) string {
	path = resolved(path)
	name := fmt.Sprintf("%s.%s-%dof%d", stem(filepath.Base(path)), p.ID, rank+1, p.Files)
	return filepath.Join(filepath.Dir(path), name)
}

// stem returns the beginning of the names of the parts of a main file: the main file's name, or, if
// that is too long, as much of it as fits and a hash of it.
func stem(name string) string {
	if len(name) <= maxStem {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	hash := "~" + hex.EncodeToString(sum[:8])
	return strings.ToValidUTF8(name[:maxStem-len(hash)], "") + hash
}

// resolved returns the path of the file that a symbolic link points to. The parts of a checkpoint
// stand next to that file.
func resolved(path string) string {
	if target, err := filepath.EvalSymlinks(path); err == nil {
		return target
	}
	return path
}

// Writable creates the folders that a checkpoint at path needs, and returns an error if its main file
// or its parts could not be written there.
func Writable(path string) error {
	if err := atomicfile.Writable(path); err != nil {
		return err
	}
	longest := Parts{ID: strings.Repeat("0", 16), Files: maxParts}.file(path, maxParts-1)
	if _, err := os.Lstat(longest); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the parts of a checkpoint cannot have such names: %w", err)
	}
	return nil
}

// Stretch is consecutive elements of a moment.
type Stretch struct {
	Moment string
	From   int // the first element
	Of     int // the number of elements of the whole moment, or 0 if it is that of the parameter
	Data   any
}

// SetOf is a set of one part, whose name follows from what it holds and from what the main file says
// of the run. Another state never has the name of a part that is there, and the same state always.
func SetOf(run string, moments []Stretch) Parts {
	h := sha256.New()
	io.WriteString(h, run)
	for _, m := range moments {
		var sum uint32
		switch x := m.Data.(type) {
		case []float32:
			sum = crc32.Checksum(bytesOf(x), castagnoli)
		case []float64:
			sum = crc32.Checksum(bytesOf(x), castagnoli)
		case []uint8:
			sum = crc32.Checksum(x, castagnoli)
		}
		fmt.Fprintln(h, m.Moment, sum)
	}

	return Parts{ID: hex.EncodeToString(h.Sum(nil)[:8]), Files: 1}
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// bytesOf is numbers as they lie in memory.
func bytesOf[T float32 | float64](x []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))),
		len(x)*int(unsafe.Sizeof(*new(T))))
}

// SavePart writes the part of a rank.
func (p Parts) SavePart(path string, rank int, stretches []Stretch) error {
	var tensors []safetensors.Tensor
	for _, s := range stretches {
		name := OptimizerPrefix + s.Moment + "@" + strconv.Itoa(s.From)
		if s.Of > 0 {
			name += "/" + strconv.Itoa(s.Of)
		}
		x, err := safetensors.New(name, []int{reflect.ValueOf(s.Data).Len()}, s.Data)
		if err != nil {
			return err
		}
		tensors = append(tensors, x)
	}

	text, err := json.Marshal(part{p, rank})
	if err != nil {
		return err
	}

	return safetensors.SavePart(p.file(path, rank), resolved(path), tensors,
		map[string]string{"format": "pt", PartsKey: string(text)})
}

// Tidy removes the parts of sets other than p next to the main file at path, which must have been
// written. The zero Parts stand for no set.
func (p Parts) Tidy(path string) error {
	path = resolved(path)
	parts := regexp.MustCompile(`^` + regexp.QuoteMeta(stem(filepath.Base(path))) +
		`\.([0-9a-f]{16})-[0-9]+of[0-9]+$`)
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		return err
	}

	for _, e := range entries {
		m := parts.FindStringSubmatch(e.Name())
		if m == nil || m[1] == p.ID {
			continue
		}
		err := os.Remove(filepath.Join(filepath.Dir(path), e.Name()))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}

	return nil
}

// Replaceable returns an error if there is something at path that a checkpoint must not replace,
// because it is not a checkpoint or a model of package llm.
func Replaceable(path string) error {
	info, err := os.Stat(path)
	if err != nil || info.IsDir() || info.Size() == 0 {
		return nil // Writable looks at these
	}

	f, err := Open(path)
	if err != nil {
		return fmt.Errorf("%w: what is there is no checkpoint, or a damaged one; move it away, or "+
			"choose another name", err)
	}
	defer f.Close()

	if _, ok := f.Metadata[ConfigKey]; !ok {
		return f.Errorf("the file there is of another program; move it away, or choose another name")
	}

	return nil
}

// Moment is what the parts hold of one, whole.
type Moment struct {
	Name  string // without OptimizerPrefix
	Shape []int
	Data  any
}

// Moments reads what the parts of a file hold, for a model of parameters of some names and shapes.
// It reads nothing of a file that has no parts.
func (f *File) Moments(ctx context.Context, s Shape) ([]Moment, error) {
	if _, ok := f.Metadata[PartsKey]; !ok {
		return nil, nil
	}

	var p Parts
	if err := f.Decode(PartsKey, "the parts", maxPartText, &p); err != nil {
		return nil, err
	}

	if err := p.check(); err != nil {
		return nil, f.Errorf("%w", err)
	}

	g := gathering{shapes: map[string][]int{}, moments: map[string]*growing{},
		fields: map[string]int{}}
	for name, shape := range s.Params {
		g.shapes[name] = shape
	}

	// Memory is taken once all elements are known to be there: a file may announce anything.
	for _, take := range []func() error{g.allocate, g.complete} {
		for rank := range p.Files {
			if err := g.read(ctx, p, f.path, rank); err != nil {
				return nil, f.Errorf("%w", err)
			}
		}
		if err := take(); err != nil {
			return nil, f.Errorf("%w", err)
		}
	}

	var all []Moment
	for _, m := range g.order {
		all = append(all, m.Moment)
	}

	return all, nil
}

// gathering is moments that are being put together.
type gathering struct {
	shapes  map[string][]int // of parameters
	moments map[string]*growing
	order   []*growing
	fields  map[string]int // moments of each parameter
}

// growing is a moment of which so many elements have been found, and read where there is Data.
type growing struct {
	Moment
	dtype      safetensors.DType
	have, size int
}

// complete checks that all elements of all moments have been found.
func (g *gathering) complete() error {
	for _, m := range g.order {
		if m.have != m.size {
			return fmt.Errorf("%w: its parts have %d of the %d elements of %s",
				safetensors.ErrCorrupt, m.have, m.size, m.Name)
		}
	}
	return nil
}

// allocate makes room for moments that are complete, whose elements are then read.
func (g *gathering) allocate() error {
	if err := g.complete(); err != nil {
		return err
	}

	for _, m := range g.order {
		m.have = 0
		switch m.dtype {
		case safetensors.F64:
			m.Data = make([]float64, m.size)
		case safetensors.U8:
			m.Data = make([]uint8, m.size)
		default:
			m.Data = make([]float32, m.size)
		}
	}

	return nil
}

// read adds what a part holds.
func (g *gathering) read(ctx context.Context, p Parts, path string, rank int) error {
	name := p.file(path, rank)
	file, err := safetensors.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: a checkpoint of several files is all of them", err)
	} else if err != nil {
		return err
	}
	defer file.Close()

	var own part
	text := file.Metadata()[PartsKey]
	if len(text) > maxPartText || json.Unmarshal([]byte(text), &own) != nil ||
		own != (part{p, rank}) {
		return fmt.Errorf("%w: %s does not belong to it: it says that it is %.100q",
			safetensors.ErrCorrupt, name, text)
	}

	for _, stretch := range file.Names() {
		if err := g.add(ctx, file, stretch); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}

	return nil
}

// add adds a stretch.
func (g *gathering) add(ctx context.Context, file *safetensors.File, stretch string) error {
	own, prefixed := strings.CutPrefix(stretch, OptimizerPrefix)
	at := strings.LastIndexByte(own, '@')
	dot := strings.LastIndexByte(own[:max(0, at)], '.')
	dtype, shape, err := file.Info(stretch)
	if err != nil {
		return err
	}

	if !prefixed || dot < 0 || len(shape) != 1 || g.shapes[own[:dot]] == nil ||
		!slices.Contains([]safetensors.DType{safetensors.F32, safetensors.F64, safetensors.U8}, dtype) {
		return fmt.Errorf("%w: %.100q is no stretch of a moment of the model's", ErrArchitecture,
			stretch)
	}

	first, total, sized := strings.Cut(own[at+1:], "/")
	whole := g.shapes[own[:dot]]
	if sized {
		n, err := strconv.Atoi(total)
		if err != nil || n < 0 {
			return fmt.Errorf("%w: %.100q says that its moment has %.20q elements",
				safetensors.ErrCorrupt, stretch, total)
		}
		whole = []int{n}
	}

	m, err := g.moment(own[:at], own[:dot], whole, dtype)
	if err != nil {
		return err
	}

	if from, err := strconv.Atoi(first); err != nil || from != m.have ||
		shape[0] > m.size-from {
		return fmt.Errorf("%w: %.100q has %d elements, and comes where element %d of %d is next",
			safetensors.ErrCorrupt, stretch, shape[0], m.have, m.size)
	}

	m.have += shape[0]
	if m.Data == nil {
		return nil
	}

	return file.Read(ctx, stretch,
		reflect.ValueOf(m.Data).Slice(m.have-shape[0], m.have).Interface())
}

// moment returns the moment of a parameter that a stretch belongs to, and begins it if need be.
func (g *gathering) moment(name, param string, shape []int, dtype safetensors.DType) (*growing,
	error) {
	if m := g.moments[name]; m != nil {
		if m.dtype != dtype || !slices.Equal(m.Shape, shape) {
			return nil, fmt.Errorf("%w: its parts have %s as %s of shape %v and as %s of shape %v",
				safetensors.ErrCorrupt, name, m.dtype, m.Shape, dtype, shape)
		}
		return m, nil
	}

	if g.fields[param]++; g.fields[param] > maxFields {
		return nil, fmt.Errorf("%w: %s has more than %d moments", ErrArchitecture, param, maxFields)
	}

	size := 1
	for _, d := range shape {
		size *= d
	}

	m := &growing{Moment: Moment{Name: name, Shape: shape}, dtype: dtype, size: size}
	g.moments[name], g.order = m, append(g.order, m)
	return m, nil
}
