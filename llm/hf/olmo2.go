package hf

import "github.com/kasmina-go/kasmina/llm"

// olmo2 describes a family that normalizes the outputs of attention and the MLP instead of their
// inputs. Queries are normalized over all heads at once, and so are keys.
var olmo2 = family{class: "Olmo2ForCausalLM", theta: 10000, eps: 1e-5, activation: "hidden_act",
	activations: []string{"silu", "swish"}, read: readOLMo2}

func readOLMo2(o *object, t *traits) {
	bias := o.bool("attention_bias", false)
	t.biasQKV, t.biasOut, t.normQK = bias, bias, true
	t.own = llm.Traits{PostNorms: true, NoPreNorms: true, WideQKNorm: true}
}
