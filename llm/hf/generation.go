package hf

import (
	"errors"
	"io/fs"
)

const generationName = "generation_config.json"

// Generation holds the publisher's recommended settings for generating text.
type Generation struct {
	Begin int   // token at the start of a text, negative if undefined
	Pad   int   // padding token, negative if undefined
	End   []int // tokens that end a text

	Sample      bool    // false selects the most probable token
	Temperature float64 // 1 by default
	TopK        int     // 50 by default, 0 for all tokens
	TopP        float64 // 1 by default, which keeps all tokens; 0 keeps only the most probable one
	MinP        float64 // 0 by default, which keeps all tokens
	Repetition  float64 // repetition_penalty, 1 by default, which changes nothing

	// Ignored names settings that this module doesn't support, such as no_repeat_ngram_size.
	Ignored []string
}

// readGeneration reads generation_config.json. If the file is missing, it reads the settings from
// config.json, where older versions of transformers wrote them.
func (f *Folder) readGeneration() error {
	ids := f.traits.ids
	f.Generation = Generation{Begin: ids.begin, Pad: ids.pad, End: ids.end}
	text, err := f.read(generationName, maxConfig)
	if errors.Is(err, fs.ErrNotExist) {
		o, err := parseObject(f.config)
		if err != nil {
			return err
		}
		f.Generation.readSampling(o)
		return o.err
	} else if err != nil {
		return err
	}

	o, err := parseObject(text)
	if err != nil {
		return err
	}

	f.generation = text
	return f.Generation.read(o, f.traits.vocab)
}

func (g *Generation) read(o *object, vocab int) error {
	var ids tokenIDs
	ids.read(o)
	if ids.begin >= 0 {
		g.Begin = ids.begin
	}

	if ids.pad >= 0 {
		g.Pad = ids.pad
	}

	if len(ids.end) > 0 {
		g.End = ids.end
	}

	for _, id := range g.End {
		if id < 0 || id >= vocab {
			o.fail("eos_token_id", "it is %d, and the vocabulary has %d tokens", id, vocab)
		}
	}

	g.readSampling(o)
	o.harmless("_from_model_config", "transformers_version", "use_cache", "output_attentions",
		"output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
		"max_length", "max_new_tokens", "max_time", "num_return_sequences", "early_stopping",
		"cache_implementation", "cache_config", "renormalize_logits", "remove_invalid_values",
		"low_memory", "stop_strings", "assistant_early_exit", "num_assistant_tokens",
		"num_assistant_tokens_schedule", "assistant_confidence_threshold",
		"prompt_lookup_num_tokens",
		"max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind", "is_assistant",
		"disable_compile", "compile_config", "return_legacy_cache",
		"prefill_chunk_size", "dola_layers",
		"decoder_start_token_id", "token_healing", "chat_format", "trust_remote_code",
		"max_window_size", "transformers.js_config")

	return o.done()
}

// readSampling reads the sampling settings, with the same defaults as transformers.
func (g *Generation) readSampling(o *object) {
	g.Sample = o.bool("do_sample", false)
	g.Temperature = o.float("temperature", 1)
	if !(g.Temperature >= 0) {
		o.fail("temperature", "it is %v, want at least 0", g.Temperature)
	}

	g.TopK = o.number("top_k", 50, 0, 1<<30)
	if g.TopP = o.float("top_p", 1); !(g.TopP >= 0 && g.TopP <= 1) {
		o.fail("top_p", "it is %v, want 0 to 1", g.TopP)
	}

	if g.MinP = o.float("min_p", 0); !(g.MinP >= 0 && g.MinP <= 1) {
		o.fail("min_p", "it is %v, want 0 to 1", g.MinP)
	}
	if g.Repetition = o.float("repetition_penalty", 1); !(g.Repetition > 0) {
		o.fail("repetition_penalty", "it is %v, want more than 0", g.Repetition)
	}

	for _, name := range []string{"num_beams", "num_beam_groups",
		"length_penalty", "typical_p", "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff",
		"penalty_alpha", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
		"diversity_penalty", "min_length", "min_new_tokens", "guidance_scale",
		"suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
		"bad_words_ids", "force_words_ids", "sequence_bias", "constraints", "watermarking_config",
		"exponential_decay_length_penalty"} {
		usual := "1"
		switch name {
		case "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "diversity_penalty",
			"min_length", "min_new_tokens", "epsilon_cutoff", "eta_cutoff",
			"penalty_alpha":
			usual = "0"
		}
		o.taken[name] = true
		if o.has(name) && !sameJSON(o.members[name], usual) {
			g.Ignored = append(g.Ignored, name)
		}
	}
}
