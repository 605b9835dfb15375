package main

import (
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// A preset holds values of options, by name.
type preset map[string]string

// presets are the values that options have unless they are given. Those of small are the options'
// own. The others are models of the shapes that benchmarks of training commonly use, large enough
// to learn from subwords.
var presets = map[string]preset{
	"small": {},
	"124M": subwords(preset{"dim": "768", "layers": "12", "heads": "12", "ff": "2048",
		"seq": "1024", "batch": "32", "steps": "2000"}),
	"350M": subwords(preset{"dim": "1024", "layers": "24", "heads": "16", "ff": "2816",
		"seq": "1024", "batch": "16", "steps": "4000"}),
	"925M": subwords(preset{"dim": "2048", "layers": "16", "heads": "16", "ff": "5632",
		"seq": "2048", "batch": "8", "steps": "4000"}),
}

// adamwRates are AdamW's peak learning rates. The large models' are those of GPT-3's models of
// about their size (Brown et al., "Language Models are Few-Shot Learners", 2020).
var adamwRates = map[string]float64{"small": 3e-3, "124M": 6e-4, "350M": 3e-4, "925M": 2.5e-4}

// subwords adds what the presets of large models have in common.
func subwords(p preset) preset {
	maps.Copy(p, preset{"vocab": "50257", "optimizer": "adamw", "prompt": "",
		"sample": "200", "heldout": "1048576", "grow": "1",
		"eval-every": "250", "save-every": "1000"})
	return p
}

func presetNames() string { return strings.Join(slices.Sorted(maps.Keys(presets)), ", ") }

// apply sets the options that were not given to those of the preset.
func (o *options) apply(f *flag.FlagSet, given map[string]bool) error {
	p := presets[o.preset]
	for _, name := range slices.Sorted(maps.Keys(p)) {
		if given[name] {
			continue
		}
		if err := f.Lookup(name).Value.Set(p[name]); err != nil {
			return fmt.Errorf("-%s of -preset %s: %w", name, o.preset, err)
		}
	}
	return nil
}
