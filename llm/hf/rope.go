package hf

import (
	"cmp"
	"encoding/json"
	"maps"
	"math"

	"github.com/kasmina-go/kasmina/op"
)

// readRope reads the rotary embedding of layers with full attention and, in families where windowed
// layers use a separate one, that as well.
//
// Newer files use rope_parameters, older ones rope_theta and rope_scaling. If a file contains both,
// rope_scaling takes precedence, as it does in transformers. It replaces rope_parameters or, if
// windowed layers use a separate embedding, is merged into the parameters of full attention.
func readRope(o *object, f family, positions int) (full, local rope) {
	full = rope{theta: o.float("rope_theta", f.theta), kind: "default"}
	full.check(o, "rope_theta")
	var scaling, parameters map[string]json.RawMessage
	o.take("rope_scaling", &scaling, "an object")
	o.take("rope_parameters", &parameters, "an object")

	if f.localTheta == 0 {
		switch {
		case len(scaling) > 0:
			full.read(o, "rope_scaling", scaling, positions)
		case parameters != nil:
			full.read(o, "rope_parameters", parameters, positions)
		}
		return full, rope{kind: "default"}
	}

	local = rope{theta: o.float("rope_local_base_freq", f.localTheta), kind: "default"}
	p := newMembers("rope_parameters.", parameters)
	var ofFull, ofLocal map[string]json.RawMessage
	p.take("full_attention", &ofFull, "an object")
	if p.take("sliding_attention", &ofLocal, "an object") {
		local.read(o, "rope_parameters.sliding_attention", ofLocal, positions)
	}

	if err := p.done(); err != nil && o.err == nil {
		o.err = err
	}

	name := "rope_parameters.full_attention"
	if len(scaling) > 0 {
		name = "rope_scaling"
		// The defaults that transformers merges it into have a rope_type, which takes precedence over
		// type.
		if _, named := scaling["rope_type"]; !named && scaling["type"] != nil {
			o.fail("rope_scaling.type", "transformers ignores it for %s: name it rope_type",
				o.string("model_type", ""))
		}
		if ofFull == nil {
			ofFull = map[string]json.RawMessage{}
		}
		maps.Copy(ofFull, scaling)
	}

	if ofFull != nil {
		full.read(o, name, ofFull, positions)
	}

	return full, local
}

func (r *rope) check(o *object, name string) {
	if !(r.theta > 1) || math.IsInf(r.theta, 0) {
		o.fail(name, "the base of the angles is %v, want a finite number of more than 1", r.theta)
	}
}

// read reads a member that describes a rotary embedding.
func (r *rope) read(outer *object, name string, members map[string]json.RawMessage,
	positions int) {
	o := newMembers(name+".", members)
	r.kind = o.string("rope_type", o.string("type", "default"))
	o.taken["type"] = true
	r.theta = o.float("rope_theta", r.theta)
	r.check(o, "rope_theta")
	o.only("partial_rotary_factor", "1", "only RoPE of all features of a head is supported")
	r.original = o.number("original_max_position_embeddings", positions, 1, maxField)
	switch r.kind {
	case "default", "mrope":
		if r.kind == "mrope" {
			o.fail("rope_type", "it is mrope, which is for images")
		}
		// Older versions of transformers wrote a factor of 1 for the default embedding.
		o.only("factor", "1", "rope_type default has no factor")
	case "linear":
		r.factor = r.readFactor(o)
	case "llama3":
		r.factor = r.readFactor(o)
		r.lowFreq, r.highFreq = o.float("low_freq_factor", 0), o.float("high_freq_factor", 0)
		if !(r.lowFreq > 0) || !(r.highFreq > r.lowFreq) || math.IsInf(r.highFreq, 0) {
			o.fail("high_freq_factor", "it is %v and low_freq_factor %v, want it larger, and "+
				"both more than 0", r.highFreq, r.lowFreq)
		}
		if !o.has("original_max_position_embeddings") {
			o.fail("original_max_position_embeddings",
				"it is missing and has no default")
		}
	case "yarn":
		r.readYarn(o)
	default:
		o.fail("rope_type", "%.40q is not supported, want default, linear, llama3 or yarn", r.kind)
	}

	if err := o.done(); err != nil && outer.err == nil {
		outer.err = err
	}
}

func (r *rope) readFactor(o *object) float64 {
	f := o.float("factor", 0)
	if !(f >= 1) || math.IsInf(f, 0) {
		o.fail("factor", "it is %v, want a finite number of at least 1", f)
	}
	return f
}

func (r *rope) readYarn(o *object) {
	r.factor = r.readFactor(o)
	// transformers treats zero as the default for these two fields, and a null truncate as false.
	r.betaFast = cmp.Or(o.float("beta_fast", 32), 32)
	r.betaSlow = cmp.Or(o.float("beta_slow", 1), 1)
	r.mscale, r.mscaleAll = o.float("mscale", 0), o.float("mscale_all_dim", 0)
	r.attentionGiven = o.has("attention_factor")
	r.attention = o.float("attention_factor", 0)
	_, given := o.members["truncate"]
	r.truncate = o.bool("truncate", !given)
	if !(r.betaFast >= r.betaSlow) || !(r.betaSlow > 0) {
		o.fail("beta_fast", "it is %v and beta_slow %v, want it at least as large, and both more "+
			"than 0", r.betaFast, r.betaSlow)
	}

	if r.attentionGiven && !(r.attention > 0) {
		o.fail("attention_factor", "it is %v, want more than 0", r.attention)
	}
}

// scaling returns the scaling in the form that [op.RoPE] takes.
func (r rope) scaling() op.RoPEScaling {
	switch r.kind {
	case "linear":
		return op.RoPEScaling{Factor: r.factor}
	case "llama3":
		return op.RoPEScaling{Factor: r.factor, LowFreq: r.lowFreq, HighFreq: r.highFreq,
			Original: r.original}
	case "yarn":
		return op.RoPEScaling{Factor: r.factor, BetaFast: r.betaFast, BetaSlow: r.betaSlow,
			Original: r.original, Unrounded: !r.truncate, Magnitude: r.magnitude()}
	}

	return op.RoPEScaling{}
}

// magnitude returns YaRN's factor of cosines and sines, or 0 for the default.
func (r rope) magnitude() float64 {
	scale := func(m float64) float64 {
		if r.factor <= 1 {
			return 1
		}
		return 0.1*m*math.Log(r.factor) + 1
	}

	switch {
	case r.attentionGiven:
		return r.attention
	case r.mscale != 0 && r.mscaleAll != 0:
		return scale(r.mscale) / scale(r.mscaleAll)
	}

	return 0
}
