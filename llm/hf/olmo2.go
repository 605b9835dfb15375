package hf

import "github.com/kasmina-go/kasmina/llm"

// olmo2 normalizes what attention and the perceptron add to the residual stream, and not what they
// read. Queries are normalized over all heads, and so are keys.
var olmo2 = family{class: "Olmo2ForCausalLM", theta: 10000, eps: 1e-5, activation: "hidden_act",
	activations: []string{"silu", "swish"}, read: readOLMo2}

func readOLMo2(o *object, t *traits) {
	bias := o.bool("attention_bias", false)
	t.biasQKV, t.biasOut, t.normQK = bias, bias, true
	t.own = llm.Traits{PostNorms: true, NoPreNorms: true, WideQKNorm: true}
}
