package hf

import (
	"encoding/json"
	"math"

	"github.com/kasmina-go/kasmina/op"
)

// readRope reads the angles of full attention and, for families that have other ones there, of
// layers with a window. It takes them from rope_parameters, or from rope_theta and rope_scaling in
// older files.
func readRope(o *object, f family, positions int) (full, local rope) {
	full = rope{theta: o.float("rope_theta", f.theta), kind: "default"}
	local = rope{theta: f.localTheta, kind: "default"}
	if f.localTheta > 0 {
		local.theta = o.float("rope_local_base_freq", f.localTheta)
	}
	full.check(o, "rope_theta")
	var text json.RawMessage
	if o.take("rope_scaling", &text, "an object") {
		full.read(o, "rope_scaling", text, positions)
	}
	if !o.take("rope_parameters", &text, "an object") {
		return full, local
	}
	if f.localTheta == 0 {
		full.read(o, "rope_parameters", text, positions)
		return full, local
	}
	p, err := newObject("rope_parameters.", text)
	if err != nil {
		o.fail("rope_parameters", "%w", err)
		return full, local
	}
	for _, kind := range []struct {
		name string
		rope *rope
	}{{"full_attention", &full}, {"sliding_attention", &local}} {
		if p.take(kind.name, &text, "an object") {
			kind.rope.read(o, "rope_parameters."+kind.name, text, positions)
		}
	}
	if err := p.done(); err != nil && o.err == nil {
		o.err = err
	}
	return full, local
}

func (r *rope) check(o *object, name string) {
	if !(r.theta > 1) || math.IsInf(r.theta, 0) {
		o.fail(name, "the base of the angles is %v, want a finite number of more than 1", r.theta)
	}
}

// read reads a member that describes scaled angles.
func (r *rope) read(outer *object, name string, text json.RawMessage, positions int) {
	o, err := newObject(name+".", text)
	if err != nil {
		outer.fail(name, "%w", err)
		return
	}
	r.kind = o.string("rope_type", o.string("type", "default"))
	o.taken["type"] = true
	r.theta = o.float("rope_theta", r.theta)
	r.check(o, "rope_theta")
	o.only("partial_rotary_factor", "1", "every feature of a head takes part in RoPE here")
	r.original = o.number("original_max_position_embeddings", positions, 1, maxField)
	switch r.kind {
	case "default", "mrope":
		if r.kind == "mrope" {
			o.fail("rope_type", "it is mrope, which is for pictures")
		}
		// Older versions of transformers wrote what defaults are scaled by: nothing.
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
				"it is missing, and nothing can stand for it")
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
	r.betaFast, r.betaSlow = o.float("beta_fast", 32), o.float("beta_slow", 1)
	r.mscale, r.mscaleAll = o.float("mscale", 0), o.float("mscale_all_dim", 0)
	r.attentionGiven = o.has("attention_factor")
	r.attention = o.float("attention_factor", 0)
	r.truncate = o.bool("truncate", true)
	if !(r.betaFast >= r.betaSlow) || !(r.betaSlow > 0) {
		o.fail("beta_fast", "it is %v and beta_slow %v, want it at least as large, and both more "+
			"than 0", r.betaFast, r.betaSlow)
	}
	if r.attentionGiven && !(r.attention > 0) {
		o.fail("attention_factor", "it is %v, want more than 0", r.attention)
	}
}

// scaling is what [op.RoPE] takes.
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

// magnitude is YaRN's factor on cosines and sines, 0 for the usual one.
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
