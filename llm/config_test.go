package llm

import (
	"math"
	"strings"
	"testing"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/state"
)

func TestConfigErrors(t *testing.T) {
	for want, change := range map[string]func(*Config){
		"Vocab is 0":              func(c *Config) { c.Vocab = 0 },
		"Dim is -1":               func(c *Config) { c.Dim = -1 },
		"Config.Default fills":    func(c *Config) { c.FF = 0 },
		"Layers is 65537":         func(c *Config) { c.Layers = 1<<16 + 1 },
		"Layers is 0":             func(c *Config) { c.Layers = 0 },
		"multiple of KVHeads":     func(c *Config) { c.KVHeads = 3 },
		"HeadDim is 3":            func(c *Config) { c.HeadDim = 3 },
		"Seq is 0":                func(c *Config) { c.Seq = 0 },
		"Base is 1":               func(c *Config) { c.Base = 1 },
		"Eps is -1":               func(c *Config) { c.Eps = -1 },
		"Kasmina names block 2":   func(c *Config) { c.Kasmina = []int{2} },
		"names block 1 twice":     func(c *Config) { c.Kasmina = []int{1, 1} },
		"Seeds is 5":              func(c *Config) { c.Seeds = 5 },
		"Seeds is 0":              func(c *Config) { c.Seeds = 0 },
		"Slots is 1":              func(c *Config) { c.Slots = 1 },
		"Slots is 70000":          func(c *Config) { c.Slots = 70000 },
		"multiple of Heads, 3":    func(c *Config) { *c = Config{Vocab: 256, Dim: 16, Layers: 1, Heads: 3, Seq: 4}.Default() },
		"FF is 16777217":          func(c *Config) { c.FF = 1<<24 + 1 },
		"2.6e+13 parameters":      func(c *Config) { c.Dim, c.FF, c.Seeds = 1<<20, 1<<22, 4 },
		"5.6e+14 parameters":      func(c *Config) { c.Vocab, c.Dim, c.Kasmina, c.Slots = 1<<24, 1<<24, nil, math.MinInt },
		"Base is +Inf":            func(c *Config) { c.Base = math.Inf(1) },
		"float32 or float64":      nil,
		"Config.Seq":              nil,
		"TrainConfig.Steps is 0":  nil,
		"TrainConfig.Schedule":    nil,
		"TrainConfig.Clip is NaN": nil,
		"vocabulary of 300":       nil,
		"TrainConfig.Epoch is -1": nil,
		"TrainConfig.Batch is 0":  nil,
		"Accumulate is -1":        nil,
		"a batch of 0 sequences":  nil,
		"the prompt is empty":     nil,
		"the layer is 2, want":    nil,
		"Temperature is -1":       nil,
		"ids[1] is 256|0 to 255":  nil,
	} {
		t.Run(want, func(t *testing.T) {
			c := tiny()
			if change != nil {
				change(&c)
			}
			_, err := NewModel(c, tensor.Float32, 1)
			if change == nil {
				err = otherError(t, want)
			}
			if err == nil {
				t.Fatal("no error")
			}
			for _, word := range strings.Split(want, "|") {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("error %q does not say %q", err, word)
				}
			}
		})
	}
}

// otherError provokes the error that should say want.
func otherError(t *testing.T, want string) error {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
	train := func(change func(*TrainConfig)) error {
		c := tr.Config
		change(&c)
		_, err := NewTrainer(tr.Model, tr.Loader, tr.Optimizer, c)
		return err
	}
	generate := func(prompt []int, c sampler.Config) error {
		g, err := NewGenerator(tr.Model)
		if err != nil {
			t.Fatal(err)
		}
		s, err := sampler.New(c)
		if err == nil {
			_, err = collect(g.Generate(t.Context(), prompt, 3, s))
		}
		return err
	}
	switch want {
	case "float32 or float64":
		_, err := NewModel(tiny(), tensor.Int, 1)
		return err
	case "Config.Seq":
		return train(func(c *TrainConfig) { c.Batch++ })
	case "TrainConfig.Steps is 0":
		return train(func(c *TrainConfig) { c.Steps = 0 })
	case "TrainConfig.Schedule":
		return train(func(c *TrainConfig) { c.Schedule = nil })
	case "TrainConfig.Clip is NaN":
		return train(func(c *TrainConfig) { c.Clip = math.NaN() })
	case "vocabulary of 300":
		tr.Loader.Tokens().(*idTokens).vocab = 300
		return train(func(*TrainConfig) {})
	case "TrainConfig.Epoch is -1":
		return train(func(c *TrainConfig) { c.Epoch = -1 })
	case "TrainConfig.Batch is 0":
		return train(func(c *TrainConfig) { c.Batch = 0 })
	case "Accumulate is -1":
		return train(func(c *TrainConfig) { c.Accumulate = -1 })
	case "a batch of 0 sequences":
		if _, err := tr.Model.Graph(ForLoss, math.MaxInt); err == nil {
			t.Error("a batch of all sequences that an int can count is accepted")
		}
		_, err := tr.Model.Graph(ForLoss, 0)
		return err
	case "the prompt is empty":
		return generate(nil, sampler.Config{})
	case "the layer is 2, want":
		return tr.Model.Germinate(2, 0, state.GerminationRequest{Slot: 1})
	case "Temperature is -1":
		return generate([]int{1}, sampler.Config{Temperature: -1})
	case "ids[1] is 256|0 to 255":
		return generate([]int{1, 256}, sampler.Config{})
	}
	t.Fatalf("nothing provokes %q", want)
	return nil
}
