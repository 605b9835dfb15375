package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state/control"
)

// adapters holds the options for training LoRA adapters in a frozen model.
type adapters struct {
	where    string // "" for none
	rank     int
	directed bool
	seed     uint64 // random seed for --adapters random
}

// adapterPlaces maps the values of --adapters to the controller's ways of choosing layers.
var adapterPlaces = map[string]control.Where{"grow": control.Unhealthiest,
	"all": control.AllAtOnce, "random": control.AtRandom}

// adapterLayers lists the linear layers that can have adapters.
var adapterLayers = []string{"q", "k", "v", "o", "gate", "up", "down"}

// wider is the factor between the ranks of --adapters random and --adapters all. Only one layer in wider
// gets an adapter, so the number of parameters stays the same.
const wider = 4

func (a *adapters) flags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&a.where, "adapters", "", "freeze the weights, train LoRA adapters, and merge them at the "+
		"end; `where` is grow (on the layers with the largest gradients), all (on every layer) or "+
		"random (for comparison)")
	f.BoolVar(&a.directed, "directed", false,
		"initialize adapters along the gradients of their weights instead of at random; --adapters grow "+
			"always does so")
	f.IntVar(&a.rank, "rank", 8,
		"rank of the adapters with --adapters all; grow and random use as many parameters in total")
	completeFlag(c, "adapters", "grow", "all", "random")
}

func (a *adapters) check() error {
	if _, ok := adapterPlaces[a.where]; !ok && a.where != "" {
		return fmt.Errorf("--adapters is %.40q, want grow, all or random", a.where)
	}
	if a.rank < 1 {
		return fmt.Errorf("--rank is %d, want at least 1", a.rank)
	}
	return nil
}

// config adds a seed to each of a model's linear layers, and freezes the weights.
func (a *adapters) config(c *llm.Config, t *llm.TrainConfig) {
	if a.where == "" {
		return
	}
	c.Weights = c.WeightSites(adapterLayers...)
	t.Frozen, t.Directed = true, a.directed || a.where == "grow"
}

// grow makes the trainer plant adapters.
func (a *adapters) grow(t *llm.Trainer) error {
	if a.where == "" {
		return nil
	}

	budget, err := a.parameters(t.Model.Config)
	if err != nil {
		return fmt.Errorf("--rank is %d: %w", a.rank, err)
	}

	controller := control.NewAdapters(budget)
	controller.Where, controller.Random = adapterPlaces[a.where], a.seed
	switch a.where {
	case "all":
		controller.Rank = a.rank
	case "random":
		controller.Rank = min(wider*a.rank, t.Model.Config.Dim)
	}

	return t.Grow(llm.Growth{Controller: controller})
}

// parameters returns the number of parameters of adapters with the given rank on all layers.
func (a *adapters) parameters(c llm.Config) (all int, err error) {
	for seed := range c.Weights {
		n, err := c.SeedSize(llm.Planted{Site: blueprints.Weight, Seed: seed,
			Kind: blueprints.LoRA.String(), Size: a.rank})
		if err != nil {
			return 0, err
		}
		all += n
	}
	return all, nil
}

// describe lists the sums of the adapters' ranks by the kind of layer.
func (a *adapters) describe(m *llm.Model) string {
	byLayer := map[string]int{}
	for _, p := range m.Planted {
		byLayer[m.Config.Weights[p.Seed].Layer] += p.Size
	}
	var all []string
	for _, l := range adapterLayers {
		all = append(all, fmt.Sprintf("%s %d", l, byLayer[l]))
	}
	return fmt.Sprintf("adapters  %d, with these total ranks: %s", len(m.Planted), strings.Join(all, ", "))
}

var errAdaptersGrow = errors.New("--adapters and --grow are given: want one of them")

// errAdaptersProcesses is the error of --adapters in a run of several processes.
var errAdaptersProcesses = errors.New("--adapters needs a single process, which measures the gradients of the " +
	"frozen model before the first step: train with one GPU, without --gpus and without a launcher")

// report returns a callback that prints the adapters when they are planted or merged.
func (a *adapters) report(t *llm.Trainer, c *cobra.Command) llm.Callback {
	return func(e llm.Event) error {
		if e.Kind == llm.Reshaped && slices.ContainsFunc(t.Model.Planted,
			func(p llm.Planted) bool { return p.Kind == blueprints.LoRA.String() }) {
			fmt.Fprintln(c.ErrOrStderr(), a.describe(t.Model))
		}
		return nil
	}
}
