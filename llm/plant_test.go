package llm

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// sited is the tiny model with seeds at weights and in the stream, and one in depth.
func sited() Config {
	c := tiny()
	c.Weights = append(c.WeightSites("q", "down"), WeightSite{Layer: "head"},
		WeightSite{Block: 1, Layer: "q"})
	c.Streams = []int{0, 0, 1}
	c.LoRAAlpha, c.Depth = 4, 1
	return c
}

// at makes commands those for the lattice of a site.
func (tr *Trainer) at(site blueprints.Site, commands ...state.Command) []state.Command {
	commands = slices.Clone(commands)
	for i := range commands {
		commands[i].Layer = tr.Model.LayerAt(site)
	}
	return commands
}

// siteCommands are the commands that a run gets behind its steps, by site.
type siteCommands map[int]map[blueprints.Site][]state.Command

func (s siteCommands) give(tr *Trainer) Callback {
	return func(e Event) error {
		if e.Kind != StepEnd {
			return nil
		}
		for _, site := range []blueprints.Site{blueprints.Weight, blueprints.Stream,
			blueprints.Depth} {
			if err := tr.Model.Kasmina.Do(tr.at(site, s[e.Step][site]...)...); err != nil {
				return fmt.Errorf("step %d: %w", e.Step, err)
			}
		}
		return nil
	}
}

// lives takes a seed through the stages of a whole life, one behind each step from the given one.
func lives(seed int, k blueprints.Kind, size, from int, last state.Stage) map[int][]state.Command {
	all := map[int][]state.Command{from: {germinate(seed, k, size), move(seed, state.Training)}}
	for i, stage := range []state.Stage{state.Grafting, state.Stabilization, state.Evaluating,
		state.FineTuning, last} {
		all[from+1+i] = []state.Command{move(seed, stage)}
		if stage == state.Grafting {
			all[from+1+i] = append(all[from+1+i],
				state.Command{Action: state.SetAlpha, Seed: seed, Alpha: 0.4})
		}
	}
	return all
}

func together(site blueprints.Site, all ...map[int][]state.Command) siteCommands {
	s := siteCommands{}
	for _, one := range all {
		for step, c := range one {
			if s[step] == nil {
				s[step] = map[blueprints.Site][]state.Command{}
			}
			s[step][site] = append(s[step][site], c...)
		}
	}
	return s
}

// TestSitesResume wants a run whose seeds go through every stage at weights and in the stream, to
// the end and back, to be resumed behind any of its steps with the bits of the run that was never
// interrupted.
func TestSitesResume(t *testing.T) {
	for name, commands := range map[string]siteCommands{
		"weight": together(blueprints.Weight, lives(0, blueprints.LoRA, 3, 1, state.Fossilized),
			lives(5, blueprints.LoRA, 1, 2, state.RolledBack),
			lives(4, blueprints.LoRA, 2, 4, state.Fossilized)),
		"stream": together(blueprints.Stream,
			lives(0, blueprints.Attention, 1, 1, state.Fossilized),
			lives(2, blueprints.Perceptron, 5, 2, state.Culled),
			lives(1, blueprints.Perceptron, 7, 3, state.Fossilized)),
	} {
		t.Run(name, func(t *testing.T) {
			const steps = 11
			dir := t.TempDir()
			path := func(step int) string { return filepath.Join(dir, fmt.Sprint(step)) }
			options := trainerOptions{config: sited(), steps: steps}
			whole := newTrainer(t, options)
			whole.On(commands.give(whole), func(e Event) error {
				if e.Kind != StepEnd {
					return nil
				}
				return whole.Save(path(e.Step))
			})
			require.NoError(t, whole.Run(context.Background()))
			require.Empty(t, whole.Model.Config.Planted)
			want := learntBy(t, whole)
			for step := 1; step < steps; step++ {
				tr := newTrainer(t, options)
				require.NoError(t, tr.Resume(context.Background(), path(step)), "step %d", step)
				tr.On(commands.give(tr))
				require.NoError(t, tr.Run(context.Background()), "step %d", step)
				require.Equal(t, want, learntBy(t, tr), "from step %d", step)
				require.Equal(t, whole.Model.Config, tr.Model.Config)
			}
		})
	}
}
