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

// A checkpoint may consist of several files, which form a set. The main file records the number of
// parts in the set and their names. The parts are stored in the same directory, one per rank, each
// holding that rank's share of the optimizer's moments.
//
// A set is saved in this order: the parts, under names that no other set uses; then the main file,
// which atomically replaces its predecessor; and finally the parts of the predecessor are removed.
// Therefore the main file always belongs to a complete set, even if a process is killed at any point.
//
// A part holds stretches, which are ranges of consecutive elements of moments. The name of a stretch
// consists of OptimizerPrefix, the name of the moment, "@" and the index of the stretch's first
// element. If the moment's size differs from its parameter's, "/" and the moment's size follow. The
// ranks hold the stretches in order.

// PartsKey is the metadata key for [Parts] in a main file, and for [part] in a part.
const PartsKey = "kasmina.parts"

// Parts describes the set that a main file belongs to.
type Parts struct {
	ID    string `json:"id"` // sixteen hexadecimal digits, unique to the set
	Files int    `json:"files"`
}

// part identifies a file within its set.
type part struct {
	Parts
	Rank int `json:"rank"`
}

const (
	maxParts    = 1 << 16
	maxPartText = 1 << 10
	// maxFields limits the number of moments per parameter.
	maxFields = 8
)

// check returns an error if the description of a set is invalid.
func (p Parts) check() error {
	if !regexp.MustCompile(`^[0-9a-f]{16}$`).MatchString(p.ID) || p.Files < 1 ||
		p.Files > maxParts {
		return fmt.Errorf("%w: it has %d parts and the ID %.40q, want 1 to %d parts and sixteen "+
			"hexadecimal digits", safetensors.ErrCorrupt, p.Files, p.ID, maxParts)
	}
	return nil
}

// The name of a part consists of the stem of the main file's name and a suffix. The stem of a long name
// is shortened, because the main file's name may be as long as the file system allows.
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

// stem returns the common prefix of the part names: the main file's name or, if that is too long, as much
// of the name as fits and a hash.
func stem(name string) string {
	if len(name) <= maxStem {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	hash := "~" + hex.EncodeToString(sum[:8])
	return strings.ToValidUTF8(name[:maxStem-len(hash)], "") + hash
}

// resolved returns the path of the file that a symbolic link points to. The parts of a checkpoint are
// in that file's directory.
func resolved(path string) string {
	if target, err := filepath.EvalSymlinks(path); err == nil {
		return target
	}
	return path
}

// Writable creates missing directories for a checkpoint at path, and returns an error if its main
// file or its parts could not be written there.
func Writable(path string) error {
	if err := atomicfile.Writable(path); err != nil {
		return err
	}
	longest := Parts{ID: strings.Repeat("0", 16), Files: maxParts}.file(path, maxParts-1)
	if _, err := os.Lstat(longest); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the parts of a checkpoint cannot have the required names: %w", err)
	}
	return nil
}

// Stretch is a range of consecutive elements of a moment.
type Stretch struct {
	Moment string
	From   int // the first element
	Of     int // number of elements of the whole moment; 0 means the parameter's size
	Data   any
}

// SetOf returns a set of a single part. Its ID is derived from the moments and from the run's
// metadata in the main file, so that part names are equal if and only if the states are.
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

// bytesOf returns the memory of x as bytes.
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

// Tidy removes the parts of all sets except p from the directory of the main file at path, which must
// already have been written. With the zero Parts, it removes all sets.
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

// Replaceable returns an error if a checkpoint must not replace what exists at path, because it is
// neither a checkpoint nor a model of package llm.
func Replaceable(path string) error {
	info, err := os.Stat(path)
	if err != nil || info.IsDir() || info.Size() == 0 {
		return nil // left to Writable
	}

	f, err := Open(path)
	if err != nil {
		return fmt.Errorf("%w: the existing file is not a checkpoint, or it is corrupted; move it away, or "+
			"choose another name", err)
	}
	defer f.Close()

	if _, ok := f.Metadata[ConfigKey]; !ok {
		return f.Errorf("the existing file belongs to another program; move it away, or choose another name")
	}

	return nil
}

// Moment is a complete moment, read from the parts.
type Moment struct {
	Name  string // without OptimizerPrefix
	Shape []int
	Data  any
}

// Moments reads the moments in the parts of a file, for a model with the parameters in s. It returns
// nothing if the file has no parts.
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

	// Allocate only once all elements are known to exist, because a file can claim any size.
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

// gathering assembles moments from their stretches.
type gathering struct {
	shapes  map[string][]int // of parameters
	moments map[string]*growing
	order   []*growing
	fields  map[string]int // number of moments of each parameter
}

// growing is a moment being assembled. have counts the elements found so far or, if Data is set, read
// so far.
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

// allocate allocates memory for all moments, which must be complete, for a second pass that reads them.
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

// read adds the stretches of a part.
func (g *gathering) read(ctx context.Context, p Parts, path string, rank int) error {
	name := p.file(path, rank)
	file, err := safetensors.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: a checkpoint of several files needs all of them", err)
	} else if err != nil {
		return err
	}
	defer file.Close()

	var own part
	text := file.Metadata()[PartsKey]
	if len(text) > maxPartText || json.Unmarshal([]byte(text), &own) != nil ||
		own != (part{p, rank}) {
		return fmt.Errorf("%w: %s does not belong to it: its metadata is %.100q",
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
		return fmt.Errorf("%w: %.100q is not a stretch of one of the model's moments", ErrArchitecture,
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
		return fmt.Errorf("%w: %.100q has %d elements, where element %d of %d is expected next",
			safetensors.ErrCorrupt, stretch, shape[0], m.have, m.size)
	}

	m.have += shape[0]
	if m.Data == nil {
		return nil
	}

	return file.Read(ctx, stretch,
		reflect.ValueOf(m.Data).Slice(m.have-shape[0], m.have).Interface())
}

// moment returns the moment that a stretch belongs to, and creates it if necessary.
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
