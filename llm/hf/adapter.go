package hf

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/internal/regular"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
)

// Files of adapters in the format of PEFT.
const (
	adapterConfigName  = "adapter_config.json"
	adapterWeightsName = "adapter_model.safetensors"

	// peftPrefix precedes the names of modules in adapter files.
	peftPrefix = "base_model.model."
)

// adapterConfig holds the fields of an adapter_config.json that concern low-rank adapters and chunk seeds.
type adapterConfig struct {
	Base         string             `json:"base_model_name_or_path"`
	Bias         string             `json:"bias"`
	FanInFanOut  bool               `json:"fan_in_fan_out"`
	Inference    bool               `json:"inference_mode"`
	Init         bool               `json:"init_lora_weights"`
	Alpha        float64            `json:"lora_alpha"`
	AlphaPattern map[string]float64 `json:"alpha_pattern"`
	Dropout      float64            `json:"lora_dropout"`
	PEFTType     string             `json:"peft_type"`
	Rank         int                `json:"r"`
	RankPattern  map[string]int     `json:"rank_pattern"`
	Targets      []string           `json:"target_modules"`
	TaskType     string             `json:"task_type"`
	UseDoRA      bool               `json:"use_dora"`
	UseRSLoRA    bool               `json:"use_rslora"`

	Layers []seedLayer `json:"kasmina_layers,omitempty"` // only with seedsType
}

// understood lists the fields of adapterConfig, and fields without an effect on the adapter's output. Any
// other field must be null, false or empty.
var understood = []string{"base_model_name_or_path", "bias", "inference_mode",
	"init_lora_weights", "lora_alpha", "alpha_pattern", "lora_dropout", "peft_type", "r", "rank_pattern",
	"target_modules", "exclude_modules", "task_type", "use_dora", "use_rslora", "auto_mapping",
	"megatron_core", "revision", "peft_version", "layers_pattern", "layers_to_transform",
	"qalora_group_size", "fan_in_fan_out", "runtime_config", "eva_config", "corda_config", "loftq_config",
	"lora_ga_config", "arrow_config"}

// isSeeds reports whether the configuration describes chunk seeds.
func (c adapterConfig) isSeeds() bool { return c.PEFTType == seedsType }

// modules maps the names of a model's layers to PEFT's names for them.
func modules(c llm.Config, like *Folder) (map[string]string, error) {
	c.Adapter = llm.LoRA{}
	l := plainLayout
	if like != nil {
		l = like.layout
	}

	names := map[string]string{}
	at := places(c, l(c))
	for _, layer := range c.LinearLayers() {
		p, ok := at[layer+".weight"]
		if !ok || !p.whole() {
			return nil, fmt.Errorf("the files of this family store %s together with other layers, or "+
				"transposed, and PEFT's adapters cannot be exchanged for such layers: save the merged model "+
				"instead", layer)
		}
		names[layer] = strings.TrimSuffix(p.name, ".weight")
	}

	// A tied output layer has a name in transformers, although it shares its weight with the embedding.
	if p, ok := at[embedName]; ok && p.whole() {
		names[llm.EmbeddingLayer] = strings.TrimSuffix(p.name, ".weight")
		names[llm.OutputLayer] = llm.OutputLayer
	}
	return names, nil
}

// LoadAdapter reads LoRA, rsLoRA or DoRA adapters in PEFT's format, and returns a copy of base with
// them. The copy shares the memory of base's parameters, so that one model can have several
// adapters.
//
// The argument like is the folder of base. It may be nil if the parameters have the names used by Llama.
func LoadAdapter(ctx context.Context, dir string, base *llm.Model, like *Folder) (*llm.Model, error) {
	m, err := loadAdapter(ctx, dir, base, like)
	if err != nil {
		return nil, fmt.Errorf("hf: LoadAdapter: %s: %w", dir, err)
	}
	return m, nil
}

// IsAdapter reports whether a folder holds adapters in the format of PEFT.
func IsAdapter(dir string) bool {
	info, err := os.Stat(filepath.Join(dir, adapterConfigName))
	return err == nil && info.Mode().IsRegular()
}

// WithTexts returns a copy of f that uses the tokenizer and the chat template of a folder of adapters. If that folder has
// no tokenizer, it returns f itself. The copy shares f's weights and becomes invalid when f is closed.
func (f *Folder) WithTexts(adapters string) *Folder {
	if info, err := os.Stat(filepath.Join(adapters, tokenizerName)); err != nil || !info.Mode().IsRegular() {
		return f
	}
	g := *f
	g.texts = adapters
	return &g
}

// AdapterBase returns the name of the model that the adapters in a folder belong to, as stated in
// their configuration.
func AdapterBase(dir string) (string, error) {
	c, err := readAdapterConfig(dir)
	if err != nil {
		return "", fmt.Errorf("hf: AdapterBase: %s: %w", dir, err)
	}
	return c.Base, nil
}

func loadAdapter(ctx context.Context, dir string, base *llm.Model, like *Folder) (*llm.Model, error) {
	a, err := readAdapter(ctx, dir, base.Config, base.Dtype(), like)
	if err != nil {
		return nil, err
	}
	if len(a.Seeds) > 0 {
		return nil, errors.New("it holds chunk seeds, which models in the format of transformers do not have: name the " +
			"folder as the model of kasmina generate, chat, serve or eval")
	}
	return base.Attach(a)
}

// ReadAdapter reads LoRA, rsLoRA or DoRA adapters in PEFT's format, or chunk seeds that SaveAdapter has written, for
// the model of a folder. It does not read the model itself.
func ReadAdapter(ctx context.Context, dir string, f *Folder) (*llm.Adapter, error) {
	if f == nil || f.weights == nil {
		return nil, errors.New("hf: ReadAdapter: the folder of the model is nil or its zero value")
	}
	a, err := readAdapter(ctx, dir, f.Config, tensor.Float32, f)
	if err != nil {
		return nil, fmt.Errorf("hf: ReadAdapter: %s: %w", dir, err)
	}
	return a, nil
}

func readAdapter(ctx context.Context, dir string, config llm.Config, dt tensor.Dtype, like *Folder) (*llm.Adapter,
	error) {
	c, err := readAdapterConfig(dir)
	if err != nil {
		return nil, err
	}

	f, err := safetensors.Open(filepath.Join(dir, adapterWeightsName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("it has no %s, which save_pretrained of PEFT writes: %w", adapterWeightsName, err)
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()

	if c.isSeeds() {
		return c.readSeeds(ctx, f, dt)
	}
	a, tensors, err := c.adapterIn(f, config, like)
	if err != nil {
		return nil, err
	}

	m, err := llm.NewAdapter(config, a, dt)
	if err != nil {
		return nil, err
	}

	for _, name := range slices.Sorted(maps.Keys(tensors)) {
		if err := readAdapterTensor(ctx, f, tensors[name], m.Param(name)); err != nil {
			return nil, err
		}
	}

	return m, nil
}

// readAdapterConfig reads and checks an adapter_config.json.
func readAdapterConfig(dir string) (c adapterConfig, err error) {
	text, err := regular.Read(filepath.Join(dir, adapterConfigName), maxConfig, "an adapter_config.json has")
	if errors.Is(err, fs.ErrNotExist) {
		return c, fmt.Errorf("it has no %s: name a folder that save_pretrained of PEFT has written: %w",
			adapterConfigName, err)
	}
	if err != nil {
		return c, err
	}

	fail := func(format string, args ...any) (adapterConfig, error) {
		return c, fmt.Errorf("%s: %w", adapterConfigName, fmt.Errorf(format, args...))
	}

	var fields map[string]json.RawMessage
	if err := json.Unmarshal(text, &fields); err != nil {
		return fail("%w", err)
	}

	seeds := string(fields["peft_type"]) == `"`+seedsType+`"`
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if !slices.Contains(understood, name) && !isEmptyJSON(fields[name]) && !(seeds && name == "kasmina_layers") {
			return fail("%s is %.100s, which is not supported here", name, fields[name])
		}
	}

	// Do not decode fields that may have several types. target_modules is not needed, because the names of
	// the tensors show which modules have adapters.
	for _, name := range []string{"target_modules", "init_lora_weights"} {
		delete(fields, name)
	}

	text, err = json.Marshal(fields)
	if err != nil {
		return fail("%w", err)
	}
	if err := json.Unmarshal(text, &c); err != nil {
		return fail("%w", err)
	}

	switch {
	case seeds && len(c.Layers) == 0:
		return fail("kasmina_layers is missing")
	case seeds:
	case c.PEFTType != "LORA":
		return fail("peft_type is %.40q, want LORA", c.PEFTType)
	case c.Bias != "none" && c.Bias != "":
		return fail("bias is %.40q: adapters with biases are not supported", c.Bias)
	case c.Rank < 1:
		return fail("r is %d, want at least 1", c.Rank)
	}

	return c, nil
}

// isEmptyJSON reports whether a value is null, false or empty.
func isEmptyJSON(text json.RawMessage) bool {
	return slices.Contains([]string{"null", "false", `""`, "{}", "[]"}, strings.TrimSpace(string(text)))
}

// adapterIn returns a description of the adapters in a file. tensors maps the names of parameters to the names of the
// tensors that contain them.
func (c adapterConfig) adapterIn(f *safetensors.File, config llm.Config, like *Folder) (a llm.LoRA,
	tensors map[string]string, err error) {
	names, err := modules(config, like)
	if err != nil {
		return a, nil, err
	}

	a = llm.LoRA{Rank: c.Rank, Alpha: c.Alpha, RankStabilized: c.UseRSLoRA, Magnitude: c.UseDoRA,
		Dropout: c.Dropout, Ranks: map[string]int{}, Alphas: map[string]float64{}}
	rest := map[string]bool{}
	for _, name := range f.Names() {
		rest[name] = true
	}

	tensors = map[string]string{}
	layers := slices.Concat([]string{llm.EmbeddingLayer}, config.LinearLayers(), []string{llm.OutputLayer})
	for _, layer := range layers {
		if names[layer] == "" {
			continue
		}
		module := peftPrefix + names[layer]
		endings := []string{".lora_A.weight", ".lora_B.weight"}
		if layer == llm.EmbeddingLayer {
			endings = []string{embeddingA, embeddingB}
		}
		if !rest[module+endings[0]] {
			continue
		}

		// PEFT saves the weights of an adapted embedding and output layer too, as they are in the model.
		delete(rest, module+".base_layer.weight")

		a.Targets = append(a.Targets, layer)
		if c.UseDoRA && layer != llm.EmbeddingLayer {
			endings = append(endings, ".lora_magnitude_vector")
		}
		for _, ending := range endings {
			if !rest[module+ending] {
				return a, nil, fmt.Errorf("%s has no tensor %s", adapterWeightsName, module+ending)
			}
			delete(rest, module+ending)
			tensors[layer+ending] = module + ending
		}

		if err := c.patterns(&a, f, layer, names[layer], endings[0]); err != nil {
			return a, nil, err
		}
	}

	for _, name := range slices.Sorted(maps.Keys(rest)) {
		return a, nil, fmt.Errorf("%s has the tensor %.200s, which belongs to no linear layer of the model",
			adapterWeightsName, name)
	}

	return a, tensors, nil
}

// patterns adds the rank and the alpha of a layer if they differ from the common ones.
func (c adapterConfig) patterns(a *llm.LoRA, f *safetensors.File, layer, module, ending string) error {
	_, shape, err := f.Info(peftPrefix + module + ending)
	if err != nil {
		return err
	}

	if len(shape) == 2 && shape[0] != c.Rank {
		a.Ranks[layer] = shape[0]
	}

	for _, key := range slices.Sorted(maps.Keys(c.AlphaPattern)) {
		pattern, err := regexp.Compile(`^(.*\.)?(` + key + `)$`)
		if err != nil {
			return fmt.Errorf("alpha_pattern: %w", err)
		}
		if pattern.MatchString(module) && c.AlphaPattern[key] != c.Alpha {
			a.Alphas[layer] = c.AlphaPattern[key]
			break
		}
	}

	return nil
}

// readAdapterTensor reads a tensor into a parameter.
func readAdapterTensor(ctx context.Context, f *safetensors.File, name string, to *tensor.Dense) error {
	dtype, shape, err := f.Info(name)
	if err != nil {
		return err
	}
	if !readable(dtype) {
		return fmt.Errorf("tensor %s is of type %s, want F32, F16 or BF16", name, dtype)
	}
	transposed := strings.HasSuffix(name, embeddingA)
	want := slices.Clone(to.Shape())
	if transposed {
		slices.Reverse(want)
	}
	if !slices.Equal(shape, want) {
		return fmt.Errorf("tensor %s has shape %v, but the model implies %v", name, shape, want)
	}

	values := make([]float32, to.Shape().TotalSize())
	rest := values
	err = f.Chunks(ctx, name, finite(name, dtype, 0, func(part []byte, dtype safetensors.DType) error {
		rest = rest[widen(rest, part, dtype):]
		return nil
	}))
	if err != nil {
		return err
	}

	if transposed {
		values = transpose(values, shape[0], shape[1])
	}
	switch x := to.Data().(type) {
	case []float32:
		copy(x, values)
	case []float64:
		for i, v := range values {
			x[i] = float64(v)
		}
	}

	return nil
}

// PEFT's names for the matrices of an embedding's adapter. PEFT stores the first one transposed, as [rank,
// vocabulary].
const (
	embeddingA = ".lora_embedding_A"
	embeddingB = ".lora_embedding_B"
)

// transpose returns the transpose of a matrix.
func transpose(x []float32, rows, columns int) []float32 {
	y := make([]float32, len(x))
	for i := range rows {
		for j := range columns {
			y[j*rows+i] = x[i*columns+j]
		}
	}
	return y
}

// SaveAdapter writes the adapters of a model as a folder that PEFT loads: adapter_config.json,
// adapter_model.safetensors in float32, and the files of the tokenizer with its chat template. base names
// the model that the adapters belong to, for programs that load both.
//
// For a model with Kasmina layers, SaveAdapter writes its chunk seeds (see [llm.Model.SeedAdapter]) in Kasmina's own
// format, which PEFT rejects.
//
// Of the options of SavePretrained, only [Like], [WithTokenizer] and [WithFile] have an effect. The
// folder must be new or empty, and it appears only once it is complete.
func SaveAdapter(ctx context.Context, dir, base string, m *llm.Model, opts ...SaveOption) error {
	if err := saveAdapter(ctx, dir, base, m, opts); err != nil {
		return fmt.Errorf("hf: SaveAdapter: %w", err)
	}
	return nil
}

// CheckSaveAdapter returns an error if SaveAdapter would reject every model of the given configuration. Call it before a
// long run.
func CheckSaveAdapter(c llm.Config, base string, opts ...SaveOption) error {
	s, err := newSaving(opts)
	if err == nil {
		err = s.collectAdapter(base, c)
	}
	if err != nil {
		return fmt.Errorf("hf: CheckSaveAdapter: %w", err)
	}
	return nil
}

// weightsKey is the metadata key for the type of the frozen weights with which adapters were trained.
const weightsKey = "kasmina.weights"

// AdapterWeights returns the type of the frozen weights that adapters saved by SaveAdapter were trained with
// (see llm.LoadFrozen). It returns float32 for other adapters.
func AdapterWeights(dir string) (t cpuops.WeightType, err error) {
	f, err := safetensors.Open(filepath.Join(dir, adapterWeightsName))
	if err != nil {
		return 0, fmt.Errorf("hf: AdapterWeights: %w", err)
	}
	defer f.Close()

	name, ok := f.Metadata()[weightsKey]
	if !ok {
		return cpuops.Float32, nil
	}
	if err := t.UnmarshalText([]byte(name)); err != nil {
		return 0, fmt.Errorf("hf: AdapterWeights: %s: %w", dir, err)
	}
	return t, nil
}

// newSaving applies options.
func newSaving(opts []SaveOption) (*saving, error) {
	s := &saving{shard: shardBytes, files: map[string][]byte{}}
	for _, opt := range opts {
		opt(s)
	}
	return s, s.err
}

func saveAdapter(ctx context.Context, dir, base string, m *llm.Model, opts []SaveOption) error {
	s, err := newSaving(opts)
	if err != nil {
		return err
	}

	if m.Config.Adapter.IsZero() && len(m.Config.Kasmina) > 0 {
		if err := checkSeeds(m.Config); err != nil {
			return err
		}
		return s.saveSeeds(ctx, dir, base, m)
	}

	done, err := m.Current()
	if err != nil {
		return err
	}
	defer done()

	if err := s.collectAdapter(base, m.Config); err != nil {
		return err
	}

	names, err := modules(m.Config, s.like)
	if err != nil {
		return err
	}

	return atomicfile.CreateFolder(dir, func(dir string) error {
		if err := s.writeFiles(dir); err != nil {
			return err
		}
		metadata := map[string]string{"format": "pt"}
		if t := m.BaseType(); t != cpuops.Float32 {
			metadata[weightsKey] = t.String()
		}
		return safetensors.SaveSources(filepath.Join(dir, adapterWeightsName), adapterSources(ctx, m, names),
			metadata)
	})
}

// saveSeeds writes the chunk seeds of a model.
func (s *saving) saveSeeds(ctx context.Context, dir, base string, m *llm.Model) error {
	config, sources, err := seedsOf(ctx, base, m)
	if err != nil {
		return err
	}
	if err := s.collectConfig(config); err != nil {
		return err
	}
	return atomicfile.CreateFolder(dir, func(dir string) error {
		if err := s.writeFiles(dir); err != nil {
			return err
		}
		return safetensors.SaveSources(filepath.Join(dir, adapterWeightsName), sources, map[string]string{"format": "pt"})
	})
}

// collectAdapter collects the small files: the configuration, the tokenizer and the chat template.
func (s *saving) collectAdapter(base string, c llm.Config) error {
	if err := c.Check(); err != nil {
		return err
	}

	switch {
	case !c.Adapter.IsZero():
	case len(c.Kasmina) > 0:
		if err := checkSeeds(c); err != nil {
			return err
		}
		return s.collectConfig(seedsConfig{Base: base, PEFTType: seedsType})
	default:
		return errors.New("the model has no adapters: SavePretrained writes whole models")
	}

	names, err := modules(c, s.like)
	if err != nil {
		return err
	}
	return s.collectConfig(adapterConfigOf(base, c, names))
}

// collectConfig collects the configuration and the files of the tokenizer.
func (s *saving) collectConfig(c any) error {
	text, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return err
	}

	s.files[adapterConfigName] = append(text, '\n')
	return s.collectTokenizer()
}

// adapterConfigOf returns the configuration of a model's adapters.
func adapterConfigOf(base string, c llm.Config, names map[string]string) adapterConfig {
	a := c.Adapter
	out := adapterConfig{Base: base, Bias: "none", Inference: true, Init: true, Alpha: a.Alpha,
		AlphaPattern: map[string]float64{}, Dropout: a.Dropout, PEFTType: "LORA", Rank: a.Rank,
		RankPattern: map[string]int{}, TaskType: "CAUSAL_LM", UseDoRA: a.Magnitude,
		UseRSLoRA: a.RankStabilized}
	for layer, rank := range a.Ranks {
		out.RankPattern[names[layer]] = rank
	}
	for layer, alpha := range a.Alphas {
		out.AlphaPattern[names[layer]] = alpha
	}

	// List short names, such as q_proj, if all layers with that name have adapters.
	missing := map[string]bool{}
	for layer, module := range names {
		if !slices.Contains(a.Targets, layer) {
			missing[lastName(module)] = true
		}
	}
	for _, layer := range a.Targets {
		name := names[layer]
		if short := lastName(name); !missing[short] {
			name = short
		}
		if !slices.Contains(out.Targets, name) {
			out.Targets = append(out.Targets, name)
		}
	}

	slices.Sort(out.Targets)
	return out
}

// lastName returns what follows the last dot of a name.
func lastName(name string) string { return name[strings.LastIndexByte(name, '.')+1:] }

// adapterSources returns the tensors of a model's adapters.
func adapterSources(ctx context.Context, m *llm.Model, names map[string]string) (all []safetensors.Source) {
	for _, p := range m.Params {
		layer, ending, ok := strings.Cut(p.Name, ".lora_")
		if !ok || !llm.IsAdapterParam(p.Name) {
			continue
		}
		shape := slices.Clone([]int(p.Value.Shape()))
		transposed := ".lora_"+ending == embeddingA
		if transposed {
			slices.Reverse(shape)
		}
		all = append(all, safetensors.Source{Name: peftPrefix + names[layer] + ".lora_" + ending,
			DType: safetensors.F32, Shape: shape, Write: func(w io.Writer) error {
				values := float32sOf(p.Value)
				if transposed {
					values = transpose(values, shape[1], shape[0])
				}
				return writeFloats(ctx, w, p.Name, values)
			}})
	}

	slices.SortFunc(all, func(a, b safetensors.Source) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// writeFloats writes the elements of a tensor, unless one is not finite.
func writeFloats(ctx context.Context, w io.Writer, name string, values []float32) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if bad := slices.IndexFunc(values, notFinite); bad >= 0 {
		return fmt.Errorf("%w: element %d of %s is %v", llm.ErrDiverged, bad, name, values[bad])
	}
	_, err := w.Write(narrow(nil, values, safetensors.F32))
	return err
}

// float32sOf returns the numbers of a tensor as float32.
func float32sOf(x *tensor.Dense) []float32 {
	wide, ok := x.Data().([]float64)
	if !ok {
		return x.Float32s()
	}
	values := make([]float32, len(wide))
	for i, v := range wide {
		values[i] = float32(v)
	}
	return values
}
