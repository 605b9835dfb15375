package main

import (
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
)

// ineffective has a command line for every flag that does nothing in some company. The flag has no
// effect there, and must be refused by name.
var ineffective = map[string]string{
	"generate --top-k":      "generate --model MODEL --prompt Once -n 1 --top-k 5",
	"generate --top-p":      "generate --model MODEL --prompt Once -n 1 --top-p 0.9",
	"generate --seed":       "generate --model MODEL --prompt Once -n 1 --seed 3",
	"train --steps":         "train --model MODEL --data TEXT --out OUT --time 1s --steps 5",
	"train --directed":      "train --model MODEL --data TEXT --out OUT --directed",
	"train --rank":          "train --model MODEL --data TEXT --out OUT --rank 4",
	"train --board-control": "train --model MODEL --data TEXT --out OUT --board-control",
	"train --deadline":      "train --model MODEL --data TEXT --out OUT --deadline 10s --device cpu",
	"train --gpus":          "train --model MODEL --data TEXT --out OUT --gpus 2 --device cpu",
	"train --save-parts":    "train --model MODEL --data TEXT --out OUT --save-parts --device cpu",
	"convert --precision":   "convert --model MODEL --out OUT --gguf f32 --precision f16",
	"convert --shard":       "convert --model MODEL --out OUT --gguf f32 --shard 1e-9",
}

// TestEveryFlagHasARule walks the flags of all commands. Each must have a rule that says when it has
// an effect, and each rule but "always" must refuse the flag where it has none.
func TestEveryFlagHasARule(t *testing.T) {
	always := map[string]bool{}
	commands := newRoot().Commands()
	for _, c := range commands {
		commands = append(commands, c.Commands()...)
	}
	for _, c := range commands {
		rules := flagRules[c.Name()]
		require.NotNil(t, rules, "the command %s has no rules", c.Name())
		c.Flags().VisitAll(func(f *pflag.Flag) {
			require.NotNil(t, rules[f.Name], "the flag --%s of %s has no rule", f.Name, c.Name())
		})
		for name := range rules {
			require.NotNil(t, c.Flags().Lookup(name), "%s has no flag --%s", c.Name(), name)
			if isAlways(c, name) {
				always[c.Name()+" --"+name] = true
				continue
			}
			require.Contains(t, ineffective, c.Name()+" --"+name)
		}
	}

	for flag, line := range ineffective {
		require.False(t, always[flag], "%s is said to have an effect always", flag)
		out := filepath.Join(t.TempDir(), "out")
		line = strings.NewReplacer("MODEL", tiny, "TEXT", license, "OUT", out).Replace(line)
		_, err := kasmina(t, strings.Fields(line)...)
		_, name, _ := strings.Cut(flag, " ")
		require.Regexp(t, name+" (2 )?has no effect", err, line)
		require.NoFileExists(t, out)
	}
}

// isAlways reports whether the rule of a flag is the function always.
func isAlways(c *cobra.Command, name string) bool {
	rule := flagRules[c.Name()][name]
	return nameOf(rule) == nameOf(always)
}

// TestSeveralFlagsWithoutEffect wants all flags that do nothing to be named, and a greedy text that
// was asked for to come with a remark only.
func TestSeveralFlagsWithoutEffect(t *testing.T) {
	_, err := kasmina(t, "generate", "--model", tiny, "--prompt", "Once", "-n", "3", "--top-k", "5",
		"--seed", "2")
	require.ErrorContains(t, err, "--top-k and --seed have no effect")
	want, err := kasmina(t, "generate", "--model", tiny, "--prompt", "Once", "-n", "3")
	require.NoError(t, err)
	got, err := kasmina(t, "generate", "--model", tiny, "--prompt", "Once", "-n", "3", "--top-p", "0.9",
		"--seed", "2", "--temperature", "0")
	require.NoError(t, err)
	require.Equal(t, want, got)

	// Saying that a switch is off changes nothing.
	_, err = kasmina(t, "train", "--model", tiny, "--data", license, "--out",
		filepath.Join(t.TempDir(), "out"), "--steps", "1", "--batch", "1", "--seq", "16", "--device",
		"cpu", "--directed=false", "--save-parts=false", "--board-control=false")
	require.NoError(t, err)
}

// nameOf returns the name of a rule's function.
func nameOf(r rule) string { return runtime.FuncForPC(reflect.ValueOf(r).Pointer()).Name() }
