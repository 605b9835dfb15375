package gguf

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/internal/regular"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/op"
)

// Is reports whether path is a regular file with the first bytes of a GGUF file.
func Is(path string) bool {
	file, _, err := regular.Open(path)
	if err != nil {
		return false
	}
	defer file.Close()

	var magic [4]byte
	_, err = io.ReadFull(file, magic[:])
	return err == nil && string(magic[:]) == "GGUF"
}

// Open opens a GGUF file as the folder of a model. It accepts the architectures that [Save] writes, with weights of
// type f32, f16, bf16 or q8_0, whether Save or llama.cpp wrote the file. The tokenizer must be SentencePiece's byte-pair
// encoding, or a byte-level encoding with a pre-tokenizer that Save knows.
//
// The configuration, the tokenizer and the chat template follow from the metadata of the file. As in llama.cpp, text
// is not normalized before it is encoded. Weights are converted while they are read; weights of type q8_0 become
// float32.
//
// Open returns an error that names any unsupported setting, unless the setting has no effect on results. The error
// wraps hf.ErrFolder.
func Open(path string) (*hf.Folder, error) {
	d, err := openDocument(path)
	if err != nil {
		return nil, fmt.Errorf("gguf: %s: %w: %w", path, hf.ErrFolder, err)
	}

	texts, err := d.texts()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("gguf: %s: %w: %w", path, hf.ErrFolder, err), d.file.Close())
	}
	return hf.OpenFiles(path, hf.Files{Texts: texts, Weights: d.weights, Close: d.file.Close})
}

// A document is an open GGUF file.
type document struct {
	file    *os.File
	size    int64
	data    int64 // position of the data
	arch    architecture
	family  string
	fields  map[string]any
	used    map[string]bool // fields of the architecture that have been read
	tensors map[string]Tensor
}

// familyOf maps the names of architectures to families. The family mistral has the architecture of llama.
var familyOf = map[string]string{"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gpt2": "gpt2", "olmo2": "olmo2"}

func openDocument(path string) (*document, error) {
	file, size, err := regular.Open(path)
	if err != nil {
		return nil, err
	}

	d := &document{file: file, size: size, fields: map[string]any{}, used: map[string]bool{},
		tensors: map[string]Tensor{}}
	if err := d.read(); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return d, nil
}

// read reads the header and checks that the tensors are in the file.
func (d *document) read() error {
	h := &head{r: bufio.NewReader(d.file), left: min(d.size, maxHead), longer: d.size > maxHead, keep: true}
	begin := h.left
	var order []Tensor
	h.read(func(name string, value any) {
		if _, ok := d.fields[name]; ok {
			h.fail("it has the field %.60q twice", name)
		}
		d.fields[name] = value
	}, func(t Tensor) {
		if _, ok := d.tensors[t.Name]; ok {
			h.fail("it has the tensor %.60q twice", t.Name)
		}
		d.tensors[t.Name] = t
		order = append(order, t)
	})
	if h.err != nil {
		return h.err
	}

	align := d.number("general.alignment", alignment)
	if align < 1 || align > 1<<20 {
		return fmt.Errorf("general.alignment is %d, want 1 to %d", align, 1<<20)
	}
	d.data = (begin - h.left + int64(align) - 1) / int64(align) * int64(align)

	name := d.text("general.architecture")
	d.family = familyOf[name]
	if d.family == "" {
		return fmt.Errorf("its architecture is %.60q, want one of %s", name,
			strings.Join(slices.Sorted(maps.Keys(familyOf)), ", "))
	}
	d.arch = architectures[d.family]

	for _, t := range order {
		if err := d.checkTensor(t); err != nil {
			return err
		}
	}
	return nil
}

// checkTensor checks the type of a tensor, and that the file contains it.
func (d *document) checkTensor(t Tensor) error {
	if _, ok := fileTypes[t.dtype]; !ok {
		return fmt.Errorf("tensor %.60q has the type %s, want f32, f16, bf16 or q8_0: use a file with weights of one of "+
			"these types, or llama.cpp", t.Name, t.dtype)
	}
	if len(t.Shape) < 1 || len(t.Shape) > 2 {
		return fmt.Errorf("tensor %.60q has %d dimensions, want 1 or 2", t.Name, len(t.Shape))
	}

	elements := int64(1)
	for _, n := range t.Shape {
		elements *= int64(n) // two factors below 2³¹
	}
	if width := t.Shape[len(t.Shape)-1]; t.dtype == Q80 && width%blockSize != 0 {
		return fmt.Errorf("tensor %.60q has rows of %d numbers, want a multiple of %d for q8_0", t.Name, width, blockSize)
	}
	if elements < 1 || elements > 1<<40 {
		return fmt.Errorf("tensor %.60q has %d elements, want 1 to %d", t.Name, elements, int64(1)<<40)
	}

	size := source{shape: t.Shape, dtype: t.dtype}.size()
	if room := d.size - d.data; room < 0 || t.offset > uint64(room) || size > room-int64(t.offset) {
		return fmt.Errorf("%w: tensor %.60q ends beyond its %d bytes: copy or download it again", errShort, t.Name, d.size)
	}
	return nil
}

// The following methods return a field, or the default if it is missing or has another type.

func (d *document) number(key string, missing int) int {
	d.used[key] = true
	switch v := d.fields[key].(type) {
	case uint64:
		if v <= math.MaxInt32 {
			return int(v)
		}
	case int64:
		if v >= math.MinInt32 && v <= math.MaxInt32 {
			return int(v)
		}
	}
	return missing
}

func (d *document) float(key string, missing float64) float64 {
	d.used[key] = true
	switch v := d.fields[key].(type) {
	case float32:
		return shortest(v)
	case float64:
		return v
	}
	return missing
}

// shortest returns the number with the fewest decimal digits that becomes v as a float32, such as 1e-6. Model
// folders have such numbers, in float64.
func shortest(v float32) (x float64) {
	if _, err := fmt.Sscan(textOf(v), &x); err != nil {
		return float64(v)
	}
	return x
}

func (d *document) text(key string) string {
	d.used[key] = true
	v, _ := d.fields[key].(string)
	return v
}

func (d *document) bool(key string, missing bool) bool {
	if v, ok := d.fields[key].(bool); ok {
		return v
	}
	return missing
}

// all returns the elements of a field that is an array with elements of type T.
func all[T any](d *document, key string) ([]T, error) {
	a, ok := d.fields[key].(array)
	if !ok {
		return nil, fmt.Errorf("the field %s is missing", key)
	}
	list := make([]T, len(a.elements))
	for i, x := range a.elements {
		if list[i], ok = x.(T); !ok {
			return nil, fmt.Errorf("%s: element %d is %.40q", key, i, textOf(x))
		}
	}
	return list, nil
}

// texts returns the small files of a folder.
func (d *document) texts() (map[string][]byte, error) {
	config, err := d.config()
	if err != nil {
		return nil, err
	}
	texts, err := d.tokenizer(config["vocab_size"].(int))
	if err != nil {
		return nil, err
	}
	if texts["config.json"], err = json.MarshalIndent(config, "", "  "); err != nil {
		return nil, err
	}
	return texts, nil
}

// harmless lists fields of architectures that do not change results. In some files they have default values.
var harmless = []string{"rope.scaling.finetuned", "tensor_data_layout", "expert_count", "expert_used_count",
	"attention.causal"}

// config returns the contents of config.json.
func (d *document) config() (map[string]any, error) {
	prefix := d.arch.name + "."
	number := func(key string, missing int) int { return d.number(prefix+key, missing) }
	dim, heads := number("embedding_length", 0), number("attention.head_count", 0)
	table, ok := d.tensors["token_embd.weight"]
	switch {
	case !ok || len(table.Shape) != 2:
		return nil, errors.New("the tensor token_embd.weight is missing or not a matrix")
	case dim < 1 || heads < 1:
		return nil, fmt.Errorf("the field %sembedding_length or %sattention.head_count is missing", prefix, prefix)
	}
	head := number("attention.key_length", dim/heads)
	ff, eps := number("feed_forward_length", 0), d.float(prefix+"attention.layer_norm_rms_epsilon", 0)
	c := map[string]any{"model_type": d.family, "vocab_size": table.Shape[0]}

	dtypes := map[Type]string{F32: "float32", F16: "float16", BF16: "bfloat16", Q80: "float32"}
	c["dtype"] = dtypes[table.dtype]
	tied, err := d.tied()
	if err != nil {
		return nil, err
	}
	c["tie_word_embeddings"] = tied

	layers, positions := number("block_count", 0), number("context_length", 0)
	if d.family == "gpt2" {
		c["n_embd"], c["n_layer"], c["n_head"] = dim, layers, heads
		c["n_positions"], c["n_inner"] = positions, ff
		c["layer_norm_epsilon"] = d.float(prefix+"attention.layer_norm_epsilon", 1e-5)
		head = dim / heads
		number("attention.head_count_kv", heads)
	} else {
		c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"] = dim, ff, layers
		c["num_attention_heads"], c["num_key_value_heads"] = heads, number("attention.head_count_kv", heads)
		c["head_dim"], c["max_position_embeddings"], c["rms_norm_eps"] = head, positions, eps
		if err := d.rotary(c, head); err != nil {
			return nil, err
		}
		if d.family != "qwen2" {
			_, c["attention_bias"] = d.tensors["blk.0.attn_output.bias"]
		}
		if d.family == "llama" {
			_, c["mlp_bias"] = d.tensors["blk.0.ffn_up.bias"]
		}
	}

	if n := number("attention.value_length", head); n != head {
		return nil, fmt.Errorf("values have %d features and keys have %d, want the same number", n, head)
	}
	if n := number("rope.dimension_count", head); n != head {
		return nil, fmt.Errorf("%srope.dimension_count is %d, want %d, all features of a head", prefix, n, head)
	}
	if n := number("vocab_size", table.Shape[0]); n != table.Shape[0] {
		return nil, fmt.Errorf("%svocab_size is %d, and token_embd.weight has %d rows", prefix, n, table.Shape[0])
	}
	if n := number("expert_count", 0); n != 0 {
		return nil, fmt.Errorf("it is a mixture of %d experts, which is not supported", n)
	}
	if n := number("attention.sliding_window", 0); n != 0 && n < positions {
		return nil, fmt.Errorf("%sattention.sliding_window is %d, and windows are not supported", prefix, n)
	}
	return c, d.checkUsed(prefix)
}

// checkUsed returns an error that names a field of the architecture that has not been read.
func (d *document) checkUsed(prefix string) error {
	for _, key := range slices.Sorted(maps.Keys(d.fields)) {
		name, ok := strings.CutPrefix(key, prefix)
		if ok && !d.used[key] && !slices.Contains(harmless, name) {
			return fmt.Errorf("the field %s, which is %.60s, is not supported", key, textOf(d.fields[key]))
		}
	}
	return nil
}

// tied reports whether the output layer is the embedding table. For some architectures, llama.cpp stores the table
// twice.
func (d *document) tied() (bool, error) {
	a, b := d.tensors["token_embd.weight"], d.tensors[output]
	if b.Name == "" {
		return true, nil
	}
	if a.dtype != b.dtype || !slices.Equal(a.Shape, b.Shape) {
		return false, nil
	}

	const part = 1 << 20
	x, y := make([]byte, part), make([]byte, part)
	size := source{shape: a.Shape, dtype: a.dtype}.size()
	for at := int64(0); at < size; at += part {
		n := min(part, size-at)
		for _, t := range []struct {
			to []byte
			Tensor
		}{{x, a}, {y, b}} {
			if _, err := d.file.ReadAt(t.to[:n], d.data+int64(t.offset)+at); err != nil {
				return false, err
			}
		}
		if string(x[:n]) != string(y[:n]) {
			return false, nil
		}
	}

	delete(d.tensors, output)
	return true, nil
}

// rotary adds the settings of RoPE for heads with the given number of features.
func (d *document) rotary(c map[string]any, head int) error {
	prefix := d.arch.name + ".rope."
	base := d.float(prefix+"freq_base", 10000)
	c["rope_theta"] = base
	scaling := map[string]any{}
	factor, original := d.float(prefix+"scaling.factor", 0), d.number(prefix+"scaling.original_context_length", 0)
	switch kind := d.text(prefix + "scaling.type"); kind {
	case "", "none":
		if old := d.float(prefix+"scale_linear", 1); old != 1 { // before 2024
			scaling["rope_type"], scaling["factor"] = "linear", old
		}
	case "linear":
		scaling["rope_type"], scaling["factor"] = "linear", factor
	case "yarn":
		scaling["rope_type"], scaling["factor"], scaling["original_max_position_embeddings"] = "yarn", factor, original
		// The logits depend on these settings, which Save never writes.
		for _, key := range []string{"attn_factor", "yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor",
			"yarn_beta_fast", "yarn_beta_slow"} {
			if _, ok := d.fields[prefix+"scaling."+key]; ok {
				return fmt.Errorf("the field %sscaling.%s is not supported", prefix, key)
			}
		}
	default:
		return fmt.Errorf("%sscaling.type is %.40q, want linear or yarn", prefix, kind)
	}

	if t, ok := d.tensors["rope_freqs.weight"]; ok {
		if len(scaling) > 0 {
			return fmt.Errorf("it has the tensor %s and %sscaling.type, want one of them", t.Name, prefix)
		}
		found, err := d.llama3(t, base, head)
		if err != nil {
			return err
		}
		scaling = found
		delete(d.tensors, t.Name)
	}
	if len(scaling) > 0 {
		c["rope_scaling"] = scaling
	}
	return nil
}

// llama3 derives the scaling settings of Llama 3.1 from the factors of frequencies in a tensor. The inverse of a
// factor is interpolated linearly in the number of turns that a pair of features makes in the original context:
//
//	smooth = (turns − low) / (high − low), for turns = original·base^(−2i/head) / 2π
//
// Multiples of low, high and original have the same factors, so low is 1, as in all published models.
func (d *document) llama3(t Tensor, base float64, head int) (map[string]any, error) {
	fail := errors.New("the factors in rope_freqs.weight are not those of a Llama 3.1")
	if t.dtype != F32 || len(t.Shape) != 1 || 2*t.Shape[0] != head {
		return nil, fail
	}
	raw := make([]byte, 4*t.Shape[0])
	if _, err := d.file.ReadAt(raw, d.data+int64(t.offset)); err != nil {
		return nil, err
	}
	factors := make([]float32, t.Shape[0])
	for i := range factors {
		factors[i] = math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
	}

	scale := float64(slices.Max(factors))
	rate := func(i int) float64 { return math.Pow(base, -2*float64(i)/float64(head)) / (2 * math.Pi) } // turns per position
	smooth := func(i int) float64 { return (1/float64(factors[i]) - 1/scale) / (1 - 1/scale) }
	var between []int
	for i, f := range factors {
		if f > 1 && float64(f) < scale {
			between = append(between, i)
		}
	}
	candidates := []op.RoPEScaling{{Factor: scale, LowFreq: 1, HighFreq: 4, Original: 8192}}
	if n := len(between); n > 0 {
		candidates = append(candidates, op.RoPEScaling{Factor: scale, LowFreq: 1, HighFreq: 4,
			Original: int(math.Round((1 + 3*smooth(between[0])) / rate(between[0])))})
	}
	if n := len(between); n > 1 {
		a, b := between[0], between[n-1]
		slope := (smooth(a) - smooth(b)) / (rate(a) - rate(b)) // original / (high − low)
		low := slope*rate(a) - smooth(a)                       // low / (high − low)
		high := math.Round(1000*(1+1/low)) / 1000
		candidates = append(candidates, op.RoPEScaling{Factor: scale, LowFreq: 1, HighFreq: high,
			Original: int(math.Round(slope * (high - 1)))})
	}

	for _, s := range candidates {
		c := llm.Config{HeadDim: head, Base: base}
		c.Scaling = s
		same := slices.EqualFunc(factors, rotaryFactors(c), func(x, y float32) bool {
			return math.Abs(float64(x-y)) <= 1e-5*math.Abs(float64(x))
		})
		if same {
			return map[string]any{"rope_type": "llama3", "factor": s.Factor, "low_freq_factor": s.LowFreq,
				"high_freq_factor": s.HighFreq, "original_max_position_embeddings": s.Original}, nil
		}
	}
	return nil, fail
}

// weights returns the weights of a model with the configuration of config.json.
func (d *document) weights(c llm.Config) (hf.Weights, error) {
	sources, params, err := d.arch.layoutOf(c, F32)
	if err != nil {
		return hf.Weights{}, err
	}
	shapes := map[string][]int{}
	for name, shape := range c.Parameters() {
		shapes[name] = shape
	}

	v := &view{file: d.file}
	types := map[string]string{}
	header := map[string]any{}
	end := int64(0)
	for i, s := range sources {
		if len(params[i]) == 0 || s.name == output && params[i][0] == embedding {
			continue // derived, or a copy of the embedding that tied has found
		}
		t, ok := d.tensors[s.name]
		if !ok {
			return hf.Weights{}, fmt.Errorf("the tensor %s is missing", s.name)
		}
		if !slices.Equal(t.Shape, s.shape) {
			return hf.Weights{}, fmt.Errorf("tensor %s has the shape %v, but the metadata imply %v", s.name, t.Shape, s.shape)
		}
		delete(d.tensors, s.name)

		first := 0
		for _, name := range params[i] {
			p := segment{begin: end, at: d.data + int64(t.offset), first: first, dtype: t.dtype, rows: shapes[name][0], width: 1}
			if len(shapes[name]) == 2 {
				p.width = shapes[name][1]
			}
			if d.arch.interleaved && (strings.Contains(name, "q_proj") || strings.Contains(name, "k_proj")) {
				p.head = c.HeadDim
			}
			if t.dtype == Q80 && len(t.Shape) == 1 {
				return hf.Weights{}, fmt.Errorf("tensor %s is a vector of type q8_0, want f32, f16 or bf16", s.name)
			}
			first += p.rows
			end += p.bytes()
			v.segments = append(v.segments, p)
			header[name] = map[string]any{"dtype": p.stored(), "shape": shapes[name], "data_offsets": []int64{p.begin, end}}
			if t.dtype == Q80 {
				types[name] = "Q8_0"
			}
		}
	}

	if len(d.tensors) > 0 {
		names := slices.Sorted(maps.Keys(d.tensors))
		return hf.Weights{}, fmt.Errorf("tensor %.60q does not belong to the model that the metadata describe, and there "+
			"are %d such tensors", names[0], len(names))
	}

	text, err := json.Marshal(header)
	if err != nil {
		return hf.Weights{}, err
	}
	v.head = append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)
	return hf.Weights{ReaderAt: v, Size: int64(len(v.head)) + end, Types: types}, nil
}

// A view presents the tensors of a GGUF file as a safetensors file.
type view struct {
	file     io.ReaderAt
	head     []byte
	segments []segment // in the order of their positions
}

// A segment is a parameter in a view. It consists of consecutive rows of a tensor.
type segment struct {
	begin       int64 // position in the data of the view
	at          int64 // position of the tensor in the file
	first       int   // row of the tensor
	rows, width int   // a vector has rows of one element
	head        int   // number of features of a head, or 0 if the rows need not be reordered for RoPE
	dtype       Type
}

// stored returns the name of the segment's type in the view.
func (s segment) stored() string {
	return map[Type]string{F32: "F32", F16: "F16", BF16: "BF16", Q80: "F32"}[s.dtype]
}

// rowBytes returns the size of a row in the view and in the file.
func (s segment) rowBytes() (view, file int64) {
	file = source{shape: []int{1, s.width}, dtype: s.dtype}.size()
	if s.dtype == Q80 {
		return 4 * int64(s.width), file
	}
	return file, file
}

func (s segment) bytes() int64 {
	row, _ := s.rowBytes()
	return int64(s.rows) * row
}

// row returns the row of the tensor in the file that holds row i of the segment. It reverses the
// reordering by interleaved.
func (s segment) row(i int) int {
	if s.head == 0 {
		return s.first + i
	}
	head, within, half := i/s.head, i%s.head, s.head/2
	return s.first + head*s.head + 2*(within%half) + within/half
}

// ReadAt implements io.ReaderAt.
func (v *view) ReadAt(b []byte, at int64) (n int, err error) {
	for n < len(b) && err == nil {
		k := 0
		if at < int64(len(v.head)) {
			k = copy(b[n:], v.head[at:])
		} else if k, err = v.read(b[n:], at-int64(len(v.head))); err == nil && k == 0 {
			err = io.EOF
		}
		n, at = n+k, at+int64(k)
	}
	return n, err
}

// read reads part of a single segment, at a position in the data.
func (v *view) read(b []byte, at int64) (int, error) {
	i, found := slices.BinarySearchFunc(v.segments, at, func(s segment, at int64) int { return cmp.Compare(s.begin, at) })
	if !found {
		i--
	}
	if i < 0 || at >= v.segments[i].begin+v.segments[i].bytes() {
		return 0, nil
	}
	s := v.segments[i]
	at -= s.begin
	b = b[:min(int64(len(b)), s.bytes()-at)]
	row, stored := s.rowBytes()
	if s.dtype != Q80 && s.head == 0 {
		return v.file.ReadAt(b, s.at+int64(s.first)*row+at)
	}

	in, out := make([]byte, stored), make([]byte, 0, row)
	n := 0
	for n < len(b) {
		r, within := int(at/row), at%row
		if _, err := v.file.ReadAt(in, s.at+int64(s.row(r))*stored); err != nil {
			return n, err
		}
		out = append(out[:0], in...)
		if s.dtype == Q80 {
			out = widenQ80(out[:0], in)
		}
		k := copy(b[n:], out[within:])
		n, at = n+k, at+int64(k)
	}
	return n, nil
}

// widenQ80 appends the numbers of a row of type q8_0 as float32.
func widenQ80(to, row []byte) []byte {
	for ; len(row) > 0; row = row[blockSize+2:] {
		scale := float32(half.Float16(binary.LittleEndian.Uint16(row)).Float64())
		for _, q := range row[2 : blockSize+2] {
			to = binary.LittleEndian.AppendUint32(to, math.Float32bits(scale*float32(int8(q))))
		}
	}
	return to
}
