package hf

import (
	"fmt"

	"github.com/kasmina-go/kasmina/llm"
)

// gpt2 describes a family with learned positions, layer norms, ungated MLPs, and biases everywhere.
var gpt2 = family{class: "GPT2LMHeadModel", theta: 10000, tied: true, inner: 4, eps: 1e-5,
	fields: map[string]string{"hidden_size": "n_embd", "num_hidden_layers": "n_layer",
		"num_attention_heads": "n_head", "intermediate_size": "n_inner",
		"max_position_embeddings": "n_positions", "rms_norm_eps": "layer_norm_epsilon"},
	activation:  "activation_function",
	activations: []string{"gelu_new", "gelu_pytorch_tanh", "gelu_fast"},
	read:        readGPT2, layout: gpt2Layout}

func readGPT2(o *object, t *traits) {
	t.biasQKV, t.biasOut, t.biasMLP = true, true, true
	t.own = llm.Traits{LayerNorm: true, GELU: true, PlainMLP: true, Positions: t.positions}
	t.noRope = make([]bool, t.layers)
	for i := range t.noRope {
		t.noRope[i] = true
	}

	if t.dim%t.heads != 0 {
		o.fail("n_embd", "it is %d, want a multiple of n_head, %d", t.dim, t.heads)
	}

	o.only("scale_attn_weights", "true", "only scaled scores are supported")
	o.only("scale_attn_by_inverse_layer_idx", "false", "a scale for each layer is not supported")
	o.only("n_ctx", fmt.Sprint(t.positions), "n_positions is different")
	o.harmless("reorder_and_upcast_attn", "gradient_checkpointing", "summary_activation",
		"summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
		// Dropout was used when the model was trained. Training here continues without it.
		"attn_pdrop", "embd_pdrop", "resid_pdrop")
}

// gpt2Parts pairs the tensors of a block with parameters. Queries, keys and values are missing because
// they share a tensor.
var gpt2Parts = []struct{ name, param string }{
	{"attn.c_proj", "self_attn.o_proj"},
	{"ln_1", "input_layernorm"}, {"ln_2", "post_attention_layernorm"},
	{"mlp.c_fc", "mlp.up_proj"}, {"mlp.c_proj", "mlp.down_proj"},
}

// gpt2Layout returns the layout of GPT-2's files. Files that transformers writes prefix the names of all
// tensors with "transformer."; the files that OpenAI published do not. Weights of linear layers are
// transposed.
func gpt2Layout(w *weights) layout {
	prefix := "transformer."
	if _, ok := w.in["wte.weight"]; ok {
		prefix = ""
	}

	return func(c llm.Config) (all []stored) {
		shapes := map[string][]int{}
		for name, shape := range c.Parameters() {
			shapes[name] = shape
		}
		// add appends a tensor that holds the rows of params one after the other.
		add := func(name string, transposed bool, params ...string) {
			shape := append([]int{}, shapes[params[0]]...)
			for _, p := range params[1:] {
				shape[0] += shapes[p][0]
			}
			if transposed {
				shape[0], shape[1] = shape[1], shape[0]
			}
			all = append(all, stored{prefix + name, shape, params, transposed})
		}

		for i := range c.Layers {
			block, from := fmt.Sprintf("h.%d.", i), fmt.Sprintf("model.layers.%d.", i)
			for _, kind := range []string{".bias", ".weight"} {
				attention := from + "self_attn."
				add(block+"attn.c_attn"+kind, kind == ".weight", attention+"q_proj"+kind,
					attention+"k_proj"+kind, attention+"v_proj"+kind)
				for _, p := range gpt2Parts {
					matrix := len(shapes[from+p.param+kind]) == 2
					add(block+p.name+kind, matrix, from+p.param+kind)
				}
			}
		}
		add("ln_f.bias", false, "model.norm.bias")
		add("ln_f.weight", false, "model.norm.weight")
		add("wpe.weight", false, "model.embed_positions.weight")
		add("wte.weight", false, embedName)
		if c.Untied {
			all = append(all, stored{name: headName, shape: shapes[headName], params: []string{headName}})
		}
		return all
	}
}
