package hf

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/llm"
)

const (
	configName = "config.json"
	maxConfig  = 4 << 20 // bytes; published files are a few kilobytes
	maxField   = 1 << 24
)

// traits describes a model as its config.json does.
type traits struct {
	family string
	dtype  string // of the weights: float32, float16 or bfloat16; "" if unspecified
	ids    tokenIDs

	vocab, dim, layers, heads, kvHeads, headDim, ff, positions int
	eps                                                        float64
	tied                                                       bool

	rope      rope
	localRope rope   // for windowed layers
	noRope    []bool // per layer
	window    int    // number of positions windowed layers attend to
	windowed  []bool // per layer
	biasQKV   bool
	biasOut   bool
	biasMLP   bool
	normQK    bool       // RMSNorm of each head of queries and keys
	gemma     bool       // windowed layers use localRope
	own       llm.Traits // properties of the family that the fields above don't cover
}

// rope describes how rotary angles follow from positions.
type rope struct {
	theta                     float64
	kind                      string // default, linear, llama3 or yarn
	factor, lowFreq, highFreq float64
	original                  int
	attention                 float64 // factor of cosine and sine, 0 for the default
	betaFast, betaSlow        float64
	mscale, mscaleAll         float64
	truncate, attentionGiven  bool
}

// tokenIDs holds the special tokens. An id is negative if the model lacks the token.
type tokenIDs struct {
	begin, pad int
	end        []int
}

// family describes the models of one model_type.
type family struct {
	class string // in architectures
	// fields maps Llama's field names to the family's where they differ.
	fields      map[string]string
	inner       int     // default of intermediate_size in multiples of hidden_size; 0 if it has no default
	eps         float64 // default of rms_norm_eps; 0 for 1e-6
	theta       float64
	localTheta  float64
	tied        bool
	activation  string // name of the field that holds the activation
	activations []string
	read        func(o *object, t *traits)
	// layout returns how the weight files store the parameters; nil means plainLayout.
	layout func(w *weights) layout
}

// field returns the family's name for one of Llama's fields.
func (f family) field(name string) string { return cmp.Or(f.fields[name], name) }

// layout returns how the weight files store the parameters.
func (t *traits) layout(w *weights) layout {
	if f := families[t.family]; f.layout != nil {
		return f.layout(w)
	}
	return plainLayout
}

var families = map[string]family{
	"llama": {class: "LlamaForCausalLM", theta: 10000, activation: "hidden_act",
		activations: []string{"silu", "swish"}, read: readLlama},
	"mistral": {class: "MistralForCausalLM", theta: 10000, activation: "hidden_act",
		activations: []string{"silu", "swish"}, read: readMistral},
	"qwen2": {class: "Qwen2ForCausalLM", theta: 10000, activation: "hidden_act",
		activations: []string{"silu", "swish"}, read: readQwen2},
	"qwen3": {class: "Qwen3ForCausalLM", theta: 10000, activation: "hidden_act",
		activations: []string{"silu", "swish"}, read: readQwen3},
	"gpt2":  gpt2,
	"olmo2": olmo2,
	"smollm3": {class: "SmolLM3ForCausalLM", theta: 2000000, tied: true, activation: "hidden_act",
		activations: []string{"silu", "swish"}, read: readSmolLM3},
	"gemma3_text": {class: "Gemma3ForCausalLM", theta: 1000000, localTheta: 10000, tied: true,
		activation:  "hidden_activation",
		activations: []string{"gelu_pytorch_tanh"}, read: readGemma3},
}

// inert lists fields that affect neither inference nor training.
var inert = []string{
	"_name_or_path", "name_or_path", "transformers_version", "use_cache", "initializer_range",
	"return_dict", "output_hidden_states", "output_attentions", "id2label", "label2id",
	"problem_type", "task_specific_params", "tokenizer_class", "torchscript",
	"cache_implementation",
	"_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
	"attn_implementation_autoset", "transformers.js_config", "unsloth_fixed", "unsloth_version",
	"is_llama_config", "_commit_hash",
	// Older files hold defaults for generation, which generation_config.json overrides.
	"temperature", "top_p", "top_k", "do_sample", "max_length", "min_length", "num_beams",
	"repetition_penalty", "num_return_sequences", "length_penalty", "early_stopping",
	"no_repeat_ngram_size", "typical_p", "output_scores", "return_dict_in_generate",
	"bad_words_ids", "diversity_penalty", "num_beam_groups", "remove_invalid_values",
	"encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
	"forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "prefix",
	"decoder_start_token_id", "sep_token_id", "tie_encoder_decoder", "cross_attention_hidden_size",
	"finetuning_task", "use_bfloat16", "tf_legacy_loss", "pruned_heads",
	// Older versions of transformers chose between equivalent computations.
	"pretraining_tp",
}

func parseConfig(text []byte) (*traits, error) {
	o, err := parseObject(text)
	if err != nil {
		return nil, err
	}
	t, err := readTraits(o)
	if err != nil {
		return nil, err
	}
	return t, t.check()
}

func readTraits(o *object) (*traits, error) {
	t := &traits{family: o.string("model_type", "")}
	f, ok := families[t.family]
	switch {
	case o.err != nil:
		return nil, o.err
	case t.family == "gemma3":
		return nil,
			fmt.Errorf("model_type is gemma3, a model for text and images: only its text " +
				"part, gemma3_text, is supported")
	case !ok:
		return nil, fmt.Errorf("model_type is %.40q, want one of %s", t.family, familyNames())
	}

	// Report quantized weights and custom code before complaining about sizes.
	o.only("quantization_config", "",
		"quantized weights are not supported: use the folder of the model before "+
			"quantization")
	o.only("auto_map", "", "models with custom code are not supported")
	o.only("is_encoder_decoder", "false", "only decoders are supported")
	o.only("add_cross_attention", "false", "only decoders are supported")
	o.only("is_decoder", "false", "it changes how transformers builds the model")
	o.only("chunk_size_feed_forward", "0", "perceptrons are computed in one piece")
	o.only("attention_dropout", "0", "training with dropout is not supported: set it to 0")
	o.only("partial_rotary_factor", "1", "only RoPE of all features of a head is supported")
	o.harmless(inert...)
	var classes []string
	if o.take("architectures", &classes, "a list of names") && !slices.Contains(classes, f.class) {
		o.fail("architectures", "they are %.60q, want %s for a %s that continues text", classes,
			f.class, t.family)
	}

	t.dtype = readDtype(o)
	t.ids.read(o)
	if a := o.string(f.activation, f.activations[0]); !slices.Contains(f.activations, a) {
		o.fail(f.activation, "it is %.40q, want %s", a, f.activations[0])
	}

	t.readSizes(o, f)
	if o.err != nil {
		return nil, o.err
	}

	if t.rope, t.localRope = readRope(o, f, t.positions); o.err == nil {
		f.read(o, t)
	}

	return t, o.done()
}

func (t *traits) readSizes(o *object, f family) {
	t.vocab = o.must("vocab_size", 1, maxField)
	t.dim = o.must(f.field("hidden_size"), 1, maxField)
	t.layers = o.must(f.field("num_hidden_layers"), 1, 1<<12)
	t.heads = o.must(f.field("num_attention_heads"), 1, maxField)
	if f.inner > 0 {
		t.ff = o.number(f.field("intermediate_size"), f.inner*t.dim, 1, maxField)
	} else {
		t.ff = o.must("intermediate_size", 1, maxField)
	}

	t.positions = o.must(f.field("max_position_embeddings"), 1, maxField)
	t.kvHeads = o.number("num_key_value_heads", t.heads, 1, maxField)
	t.headDim = o.number("head_dim", 0, 1, maxField)
	t.eps = o.float(f.field("rms_norm_eps"), cmp.Or(f.eps, 1e-6))
	t.tied = o.bool("tie_word_embeddings", f.tied)
	if o.err == nil && t.headDim == 0 {
		t.headDim = t.dim / t.heads
		if t.family == "qwen3" {
			t.headDim = 128
		} else if t.family == "gemma3_text" {
			t.headDim = 256
		}
	}
}

func familyNames() string {
	var names []string
	for name := range families {
		names = append(names, name)
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

// readDtype returns the type declared in config.json. The tensors may have other types.
func readDtype(o *object) string {
	name := o.string("torch_dtype", "")
	name = strings.TrimPrefix(o.string("dtype", name), "torch.")
	if name != "" && !slices.Contains([]string{"float32", "float16", "bfloat16"}, name) {
		o.fail("dtype", "it is %.40q, want float32, float16 or bfloat16", name)
	}
	return name
}

func (ids *tokenIDs) read(o *object) {
	first := func(name string) int {
		if v := o.ids(name); len(v) > 0 {
			return v[0]
		}
		return -1
	}
	ids.begin, ids.pad = first("bos_token_id"), first("pad_token_id")
	ids.end = o.ids("eos_token_id")
}

func readLlama(o *object, t *traits) {
	bias := o.bool("attention_bias", false)
	t.biasQKV, t.biasOut = bias, bias
	t.biasMLP = o.bool("mlp_bias", false)
	o.only("rope_interleaved", "false", "only pairs of features that are half a head apart are supported")
}

func readMistral(o *object, t *traits) {
	t.window = o.number("sliding_window", 0, 1, maxField)
	if _, present := o.members["sliding_window"]; !present {
		t.window = 4096
	}
	t.allWindowed()
}

func (t *traits) allWindowed() {
	if t.window > 0 {
		t.windowed = slices.Repeat([]bool{true}, t.layers)
	}
}

func readQwen2(o *object, t *traits) {
	t.biasQKV = true
	o.only("use_mrope", "false", "it is for images")
	readQwenWindow(o, t)
}

func readQwen3(o *object, t *traits) {
	bias := o.bool("attention_bias", false)
	t.biasQKV, t.biasOut, t.normQK = bias, bias, true
	readQwenWindow(o, t)
}

// readQwenWindow reads the attention window. Unless layer_types says otherwise, layers from
// max_window_layers on are windowed.
func readQwenWindow(o *object, t *traits) {
	on, window := o.bool("use_sliding_window", false), o.number("sliding_window", 4096, 1, maxField)
	from := o.number("max_window_layers", 28, 0, maxField)
	if _, present := o.members["sliding_window"]; present && !o.has("sliding_window") {
		on = false
	}
	if !on {
		window = 0
	}
	t.window = window
	t.readLayerTypes(o, func(i int) bool { return window > 0 && i >= from })
}

// readLayerTypes reads which layers are windowed. If layer_types is missing, usual decides.
func (t *traits) readLayerTypes(o *object, usual func(layer int) bool) {
	types := make([]string, t.layers)
	for i := range types {
		types[i] = "full_attention"
		if usual(i) {
			types[i] = "sliding_attention"
		}
	}

	if o.take("layer_types", &types, "a list of names") && len(types) != t.layers {
		o.fail("layer_types", "it has %d entries for %d layers", len(types), t.layers)
		return
	}

	windowed := make([]bool, t.layers)
	for i, name := range types {
		switch {
		case name == "full_attention":
		case name == "sliding_attention" && t.window > 0:
			windowed[i] = true
		case name == "sliding_attention":
			o.fail("layer_types", "layer %d is %s, but sliding_window is missing", i, name)
		default:
			o.fail("layer_types", "layer %d is %.40q, want full_attention or sliding_attention", i,
				name)
		}
	}

	if slices.Contains(windowed, true) {
		t.windowed = windowed
	} else {
		t.window = 0
	}
}

func readSmolLM3(o *object, t *traits) {
	bias := o.bool("attention_bias", false)
	t.biasQKV, t.biasOut = bias, bias
	t.biasMLP = o.bool("mlp_bias", false)
	every := o.number("no_rope_layer_interval", 4, 1, maxField)
	has := make([]int, t.layers) // 1 if the layer uses RoPE
	for i := range has {
		if (i+1)%every != 0 {
			has[i] = 1
		}
	}

	if o.take("no_rope_layers", &has, "a list of 0 and 1") && len(has) != t.layers {
		o.fail("no_rope_layers", "it has %d entries for %d layers", len(has), t.layers)
		return
	}

	t.noRope = make([]bool, t.layers)
	for i, v := range has {
		if v != 0 && v != 1 {
			o.fail("no_rope_layers", "entry %d is %d, want 0 or 1", i, v)
			return
		}
		t.noRope[i] = v == 0
	}

	on := o.bool("use_sliding_window", false)
	if window := o.number("sliding_window", 0, 1, maxField); on {
		t.window = window
	}

	o.harmless("max_window_layers")
	t.readLayerTypes(o, func(i int) bool { return t.window > 0 && t.noRope[i] })
	if !slices.Contains(t.noRope, true) {
		t.noRope = nil
	}
}

func readGemma3(o *object, t *traits) {
	t.gemma, t.normQK = true, true
	t.own = llm.Traits{NormPlusOne: true, PostNorms: true, GELU: true,
		EmbedScale: math.Sqrt(float64(t.dim))}
	bias := o.bool("attention_bias", false)
	t.biasQKV, t.biasOut = bias, bias
	scalar := o.float("query_pre_attn_scalar", 256)
	if !(scalar > 0) || math.IsInf(scalar, 0) {
		o.fail("query_pre_attn_scalar", "it is %v, want more than 0", scalar)
	}

	t.own.AttentionScale = 1 / math.Sqrt(scalar)
	o.only("attn_logit_softcapping", "", "capping the scores is not supported")
	o.only("final_logit_softcapping", "", "capping the logits is not supported")
	o.only("use_bidirectional_attention", "false", "only causal attention is supported")
	every := o.number("sliding_window_pattern", 6, 1, maxField)
	o.harmless("_sliding_window_pattern") // transformers writes this field but never reads it
	t.window = o.number("sliding_window", 4096, 1, maxField)
	t.readLayerTypes(o, func(i int) bool { return (i+1)%every != 0 })
}

// check reports traits that contradict each other.
func (t *traits) check() error {
	fail := func(name, format string, args ...any) error {
		return fmt.Errorf("%s: %s", name, fmt.Sprintf(format, args...))
	}
	switch {
	case t.heads%t.kvHeads != 0:
		return fail("num_attention_heads", "it is %d, want a multiple of num_key_value_heads, %d",
			t.heads, t.kvHeads)
	case t.headDim < 1 || t.headDim%2 != 0:
		return fail("head_dim", "it is %d, want an even number of at least 2", t.headDim)
	case !(t.eps >= 0) || math.IsInf(t.eps, 0):
		return fail("rms_norm_eps", "it is %v, want a finite number of at least 0", t.eps)
	}

	for _, id := range slices.Concat(t.ids.end, []int{t.ids.begin}) {
		if id >= t.vocab {
			return fail("vocab_size",
				"it is %d, but the token at the start or end of a text has the id %d",
				t.vocab, id)
		}
	}

	_, err := t.config()
	return err
}

// config returns the configuration of the model that the traits describe. If llm models don't support
// a trait, it returns an error that names the field.
func (t *traits) config() (llm.Config, error) {
	c := llm.Config{Vocab: t.vocab, Dim: t.dim, Layers: t.layers, Heads: t.heads,
		KVHeads: t.kvHeads, HeadDim: t.headDim, FF: t.ff, Seq: t.positions, Base: t.rope.theta,
		Eps: t.eps, Untied: !t.tied}
	c.Traits = t.own
	c.Scaling, c.Blocks = t.rope.scaling(), t.blocks()
	c.QKVBias, c.OutBias, c.MLPBias, c.QKNorm = t.biasQKV, t.biasOut, t.biasMLP, t.normQK
	if c.MLPBias && !c.PlainMLP {
		return c, errors.New("mlp_bias: it is true, but biases of gated perceptrons are not supported")
	}
	return c, c.Check()
}

// blocks returns the settings of individual blocks, or nil if all blocks have the defaults.
func (t *traits) blocks() []llm.Block {
	blocks := make([]llm.Block, t.layers)
	for i := range blocks {
		if t.windowed != nil && t.windowed[i] {
			blocks[i].Window = t.window
			if t.gemma {
				blocks[i].Base, blocks[i].Scaling = t.localRope.theta, t.localRope.scaling()
			}
		}
		blocks[i].NoRoPE = t.noRope != nil && t.noRope[i]
	}

	if slices.ContainsFunc(blocks[1:], func(b llm.Block) bool { return b != blocks[0] }) {
		return blocks
	}

	if blocks[0] == (llm.Block{}) {
		return nil
	}

	return blocks[:1]
}
