package main

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
)

// ineffective maps every flag that can be without effect to a command line in which it has none. The
// command must refuse the flag by name.
var ineffective = map[string]string{
	"eval --data":               "eval --model MODEL --data TEXT --tasks TEXT",
	"eval --few-shot":           "eval --model MODEL --data TEXT --few-shot 1",
	"eval --examples":           "eval --model MODEL --data TEXT --examples TEXT",
	"eval --chat":               "eval --model MODEL --data TEXT --chat",
	"eval --limit":              "eval --model MODEL --data TEXT --limit 1",
	"eval --answer-tokens":      "eval --model MODEL --data TEXT --answer-tokens 1",
	"eval --out":                "eval --model MODEL --data TEXT --out OUT",
	"generate --top-k":          "generate --model MODEL --prompt Once -n 1 --top-k 5",
	"generate --top-p":          "generate --model MODEL --prompt Once -n 1 --top-p 0.9",
	"generate --seed":           "generate --model MODEL --prompt Once -n 1 --seed 3",
	"chat --top-k":              "chat --model MODEL --top-k 5",
	"chat --top-p":              "chat --model MODEL --top-p 0.9",
	"chat --seed":               "chat --model MODEL --seed 3",
	"train --steps":             "train --model MODEL --data TEXT --out OUT --time 1s --steps 5",
	"train --preset":            "train --model MODEL --data TEXT --out OUT --preset small",
	"train --layers":            "train --model MODEL --data TEXT --out OUT --layers 2",
	"train --dim":               "train --model MODEL --data TEXT --out OUT --dim 32",
	"train --heads":             "train --model MODEL --data TEXT --out OUT --heads 2",
	"train --kv-heads":          "train --model MODEL --data TEXT --out OUT --kv-heads 2",
	"train --ff":                "train --model MODEL --data TEXT --out OUT --ff 64",
	"train --untied":            "train --model MODEL --data TEXT --out OUT --untied",
	"train --vocab":             "train --model MODEL --data TEXT --out OUT --vocab 300",
	"train --tokenizer":         "train --model MODEL --data TEXT --out OUT --tokenizer MODEL",
	"train --documents":         "train --model MODEL --data TEXT --out OUT --documents",
	"train --cache":             "train --model MODEL --data TEXT --out OUT --cache OUT",
	"train --adapters":          "train --preset small --data TEXT --out OUT --adapters all",
	"train --gguf":              "train --preset small --data TEXT --out OUT --gguf f16",
	"train --grad-precision":    "train --model MODEL --data TEXT --out OUT --grad-precision bf16 --device cpu",
	"train --tune":              "train --model MODEL --data TEXT --out OUT --tune full --device cpu",
	"train --profile":           "train --model MODEL --data TEXT --out OUT --profile OUT --device cpu",
	"train --memory":            "train --model MODEL --data TEXT --out OUT --memory 2 --device cpu",
	"train --monitor":           "train --model MODEL --data TEXT --out OUT --monitor 2 --gpus 2",
	"train --directed":          "train --model MODEL --data TEXT --out OUT --directed",
	"train --rank":              "train --model MODEL --data TEXT --out OUT --rank 4",
	"train --board-control":     "train --model MODEL --data TEXT --out OUT --board-control",
	"train --deadline":          "train --model MODEL --data TEXT --out OUT --deadline 10s --device cpu",
	"train --weight-decay":      "train --model MODEL --data TEXT --out OUT --adapters all --weight-decay 0.2",
	"train --keep-best":         "train --model MODEL --data TEXT --out OUT --keep-best --eval-every 0",
	"train --gpus":              "train --model MODEL --data TEXT --out OUT --gpus 2 --device cpu",
	"train --save-parts":        "train --model MODEL --data TEXT --out OUT --save-parts --device cpu",
	"finetune --rank":           "finetune --model MODEL --data TEXT --out OUT --method full --rank 4",
	"finetune --alpha":          "finetune --model MODEL --data TEXT --out OUT --method full --alpha 4",
	"finetune --dropout":        "finetune --model MODEL --data TEXT --out OUT --method full --dropout 0.1",
	"finetune --recompute-mlps": "finetune --model MODEL --data TEXT --out OUT --recompute --recompute-mlps 2",
	"train --recompute-mlps":    "train --model MODEL --data TEXT --out OUT --recompute --recompute-mlps 2",
	"finetune --targets":        "finetune --model MODEL --data TEXT --out OUT --method last --blocks 1 --targets q_proj",
	"finetune --merge":          "finetune --model MODEL --data TEXT --out OUT --method full --merge",
	"finetune --blocks":         "finetune --model MODEL --data TEXT --out OUT --blocks 1",
	"finetune --epochs":         "finetune --model MODEL --data TEXT --out OUT --steps 2 --epochs 2",
	"finetune --gpus":           "finetune --model MODEL --data TUNE --out OUT --gpus 2 --device cpu",

	"finetune --memory":          "finetune --model MODEL --data TUNE --out OUT --memory 7 --device cpu",
	"finetune --preference-loss": "finetune --model MODEL --data TUNE --out OUT --preference-loss ipo --device cpu",
	"finetune --beta":            "finetune --model MODEL --data TUNE --out OUT --beta 0.2 --device cpu",
	"finetune --label-smoothing": "finetune --model MODEL --data TUNE --out OUT --label-smoothing 0.1 --device cpu",

	"finetune --keep":      "finetune --model MODEL --data PAIRS --out OUT --keep self --device cpu",
	"finetune --forget":    "finetune --model MODEL --data TUNE --out OUT --forget 0.1 --device cpu",
	"finetune --grow-rank": "finetune --model MODEL --data TUNE --out OUT --method dora --grow-rank --device cpu",

	"convert --precision": "convert --model MODEL --out OUT --gguf f32 --precision f16",
	"convert --shard":     "convert --model MODEL --out OUT --gguf f32 --shard 1e-9",
}

// TestEveryFlagHasARule checks that each flag of all commands has a rule, and that each rule except
// "always" refuses the flag on a command line where it has no effect.
func TestEveryFlagHasARule(t *testing.T) {
	always := map[string]bool{}
	commands := newRoot().Commands()
	for _, c := range commands {
		commands = append(commands, c.Commands()...)
	}

	for _, c := range commands {
		rules := flagRules[nameOf(c)]
		require.NotNil(t, rules, "the command %s has no rules", c.Name())
		c.Flags().VisitAll(func(f *pflag.Flag) {
			require.NotNil(t, rules[f.Name], "the flag --%s of %s has no rule", f.Name, c.Name())
		})
		for name := range rules {
			require.NotNil(t, c.Flags().Lookup(name), "%s has no flag --%s", c.Name(), name)
			if isAlways(c, name) {
				always[nameOf(c)+" --"+name] = true
				continue
			}
			require.Contains(t, ineffective, nameOf(c)+" --"+name)
		}
	}

	for flag, line := range ineffective {
		require.False(t, always[flag], "%s is said to have an effect always", flag)
		out := filepath.Join(t.TempDir(), "out")
		line = strings.NewReplacer("MODEL", tiny, "TEXT", license, "OUT", out, "TUNE",
			writeTuning(t, 3), "PAIRS", writePairs(t, 4)).Replace(line)
		_, err := kasmina(t, strings.Fields(line)...)
		_, name, _ := strings.Cut(flag, " ")
		require.Regexp(t, name+" (2 )?has no effect", err, line)
		require.NoFileExists(t, out)
	}
}

// isAlways reports whether the rule of a flag is the function always.
func isAlways(c *cobra.Command, name string) bool {
	rule := flagRules[nameOf(c)][name]
	return functionOf(rule) == functionOf(always)
}

// TestSeveralFlagsWithoutEffect checks that an error names all flags without effect, and that a greedy
// text requested explicitly only causes a remark.
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

	// Turning off a switch that is off by default changes nothing.
	_, err = kasmina(t, "train", "--model", tiny, "--data", license, "--out",
		filepath.Join(t.TempDir(), "out"), "--steps", "1", "--batch", "1", "--seq", "16", "--device",
		"cpu", "--directed=false", "--save-parts=false", "--board-control=false")
	require.NoError(t, err)
}

// commands returns the subcommands of a command at all levels.
func commands(c *cobra.Command) (all []*cobra.Command) {
	for _, sub := range c.Commands() {
		all = append(append(all, sub), commands(sub)...)
	}
	return all
}

// functionOf returns the name of a rule's function.
func functionOf(r rule) string { return runtime.FuncForPC(reflect.ValueOf(r).Pointer()).Name() }

// invalid lists values that are invalid for every flag of a type. Types that are missing have no such
// value.
var invalid = map[string][]string{
	"int":      {"-7"},
	"int64":    {"-7"},
	"float64":  {"-7", "NaN", "+Inf"},
	"duration": {"-7s"},
}

// newModelFlags are the flags with sizes of a new model.
var newModelFlags = []string{"layers", "dim", "heads", "kv-heads", "ff", "vocab"}

// TestErrorsNameTheFlag gives every flag impossible values. The error must name the flag, but no field or
// option of a Go package.
func TestErrorsNameTheFlag(t *testing.T) {
	lines := map[string]string{
		"eval":     "eval -m MODEL -d TEXT",
		"generate": "generate -m MODEL -p a -n 2 -t 1",
		"train":    "train -m MODEL -d TEXT -o OUT -n 200 --device cpu",
		"finetune": "finetune -m MODEL -d CHAT -o OUT --device cpu",
		"convert":  "convert -m MODEL -o OUT",
		"chat":     "chat -m MODEL -t 1",
		"serve":    "serve -m MODEL --addr 127.0.0.1:0",

		"data check": "data check -m MODEL CHAT",
	}

	excessive := map[string]string{"batch": "1000000000000", "accumulate": "1000000000000",
		"grow": "1000000000000", "rank": "1000000000000", "warmup": "1000000000000"}
	for _, c := range commands(newRoot()) {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			values := invalid[f.Value.Type()]
			if c.Name() == "train" && excessive[f.Name] != "" {
				values = append(slices.Clip(values), excessive[f.Name])
			}
			for _, value := range values {
				out := filepath.Join(t.TempDir(), "out")
				line := strings.NewReplacer("MODEL", tiny, "TEXT", license, "CHAT", license, "OUT", out).Replace(lines[nameOf(c)])
				flag := "--" + f.Name + "=" + value
				args := append(strings.Fields(line), flag)
				if slices.Contains(newModelFlags, f.Name) {
					args = append(slices.DeleteFunc(args, func(a string) bool { return a == "-m" || a == tiny }),
						"--preset", "small")
				}
				if f.Name == "forget" {
					args = append(args, "--keep", "self")
				}
				if f.Name == "blocks" {
					args = append(args, "--method", "last")
				}
				if f.Name == "rank" && c.Name() == "train" {
					args = append(args, "--adapters", "all")
				}
				_, err := kasmina(t, args...)
				if err == nil || !strings.Contains(err.Error(), "--"+f.Name) ||
					regexp.MustCompile(`[A-Z][A-Za-z]+\.[A-Z]|With[A-Z]`).MatchString(err.Error()) {
					t.Errorf("%s %s: %v", c.Name(), flag, err)
				}
			}
		})
	}
}

// An effect shows that a flag does something: with the flag, the command prints or writes something
// different.
type effect struct{ line, with string }

// effects has an entry for every flag that can have an effect.
var effects = map[string]effect{
	"inspect --model": {"inspect TINY", "inspect --model LLAMA"},
	"report --out":    {"report RUN", "report RUN --out OUT.html"},
	"board --addr":    {"board RUN --addr nowhere", "board RUN --addr elsewhere"},

	"data check --model": {"data check CHAT -m TINY", "data check CHAT --model LLAMA"},
	"data check --seq":   {"data check CHAT -m TINY", "data check CHAT -m TINY --seq 16"},
	"data check --show":  {"data check CHAT -m TINY", "data check CHAT -m TINY --show 0"},
	"data check --list":  {"data check CHAT -m TINY", "data check CHAT -m TINY --list 1"},

	"eval --model":     {"eval -m TINY -d TEXT", "eval --model ALTERED -d TEXT"},
	"eval --adapter":   {"eval -m TINY -d TEXT", "eval -m TINY -d TEXT --adapter none"},
	"eval --data":      {"eval -m TINY -d TEXT", "eval -m TINY --data OTHER"},
	"eval --seq":       {"eval -m TINY -d TEXT", "eval -m TINY -d TEXT --seq 16"},
	"eval --device":    {"eval -m TINY -d TEXT", "eval -m TINY -d TEXT --device none"},
	"eval --precision": {"eval -m TINY -d TEXT", "eval -m TINY -d TEXT --precision none"},

	"eval --tasks":    {"eval -m TINY -d TEXT", "eval -m TINY --tasks PIQA"},
	"eval --few-shot": {"eval -m TINY --tasks PIQA", "eval -m TINY --tasks PIQA --few-shot 3 --examples SOLVED"},
	"eval --examples": {"eval -m TINY --tasks PIQA --few-shot 3",
		"eval -m TINY --tasks PIQA --few-shot 3 --examples SOLVED"},
	"eval --chat":          {"eval -m TINY --tasks PIQA", "eval -m TINY --tasks PIQA --chat"},
	"eval --limit":         {"eval -m TINY --tasks PIQA", "eval -m TINY --tasks PIQA --limit 3"},
	"eval --answer-tokens": {"eval -m TINY --tasks SUMS", "eval -m TINY --tasks SUMS --answer-tokens 3"},
	"eval --out":           {"eval -m TINY --tasks PIQA", "eval -m TINY --tasks PIQA --out OUT/results.json"},

	"generate --model":   {"generate -m TINY -p a -n 9", "generate --model ALTERED -p a -n 9"},
	"generate --adapter": {"generate -m TINY -p a -n 9", "generate -m TINY -p a -n 9 --adapter none"},
	"generate --prompt":  {"generate -m TINY -p a -n 9", "generate -m TINY --prompt b -n 9"},
	"generate --n":       {"generate -m TINY -p a -n 9", "generate -m TINY -p a --n 8"},
	"generate --chat":    {"generate -m TINY -p a -n 9", "generate -m TINY -p a -n 9 --chat"},
	"generate --device":  {"generate -m TINY -p a -n 9", "generate -m TINY -p a -n 9 --device none"},
	"generate --precision": {"generate -m TINY -p a -n 9",
		"generate -m TINY -p a -n 9 --precision none"},
	"generate --temperature": {"generate -m TINY -p a -n 30", "generate -m TINY -p a -n 30 --temperature 9"},
	"generate --top-k": {"generate -m TINY -p a -n 30 -t 9",
		"generate -m TINY -p a -n 30 -t 9 --top-k 1"},
	"generate --top-p": {"generate -m TINY -p a -n 30 -t 9",
		"generate -m TINY -p a -n 30 -t 9 --top-p 0"},
	"generate --seed": {"generate -m TINY -p a -n 30 -t 9", "generate -m TINY -p a -n 30 -t 9 --seed 2"},

	"generate --stop":        {"generate -m TINY -p a -n 9", "generate -m TINY -p a -n 9 --stop="},
	"chat --stop":            {"chat -m TINY", "chat -m TINY --stop="},
	"generate --json-schema": {"generate -m TINY -p a -n 9", "generate -m TINY -p a -n 9 --json-schema PIQA"},
	"chat --json-schema":     {"chat -m TINY", "chat -m TINY --json-schema none"},
	"chat --model":           {"chat -m TINY", "chat --model none"},
	"chat --adapter":         {"chat -m TINY", "chat -m TINY --adapter none"},
	"chat --n":               {"chat -m TINY", "chat -m TINY --n -1"},
	"chat --temperature":     {"chat -m TINY", "chat -m TINY --temperature -2"},
	"chat --top-k":           {"chat -m TINY -t 1", "chat -m TINY -t 1 --top-k -2"},
	"chat --top-p":           {"chat -m TINY -t 1", "chat -m TINY -t 1 --top-p 2"},
	"chat --device":          {"chat -m TINY", "chat -m TINY --device none"},
	"chat --precision":       {"chat -m TINY", "chat -m TINY --precision none"},

	"serve --model":     {"serve -m TINY --cors x", "serve --model none"},
	"serve --lookup":    {"serve -m TINY --addr nowhere", "serve -m TINY --addr nowhere --lookup -1"},
	"chat --lookup":     {"chat -m TINY", "chat -m TINY --lookup 65"},
	"generate --lookup": {"generate -m TINY -p a -n 9", "generate -m TINY -p a -n 9 --lookup -1"},
	"serve --adapter":   {"serve -m TINY --addr nowhere", "serve -m TINY --addr 127.0.0.1:0 --adapter none"},
	"serve --addr":      {"serve -m TINY --addr nowhere", "serve -m TINY --addr elsewhere"},
	"serve --api-key":   {"serve -m TINY --addr nowhere", "serve -m TINY --addr nowhere --api-key="},
	"serve --context":   {"serve -m TINY --addr nowhere", "serve -m TINY --addr 127.0.0.1:0 --context 129"},
	"serve --slots":     {"serve -m TINY --addr nowhere", "serve -m TINY --addr nowhere --slots 0"},
	"serve --queue":     {"serve -m TINY --addr nowhere", "serve -m TINY --addr nowhere --queue -1"},
	"serve --timeout":   {"serve -m TINY --addr nowhere", "serve -m TINY --addr nowhere --timeout 0"},
	"serve --max-body":  {"serve -m TINY --addr nowhere", "serve -m TINY --addr nowhere --max-body 0"},
	"serve --cors":      {"serve -m TINY --addr nowhere", "serve -m TINY --addr nowhere --cors x"},
	"serve --device":    {"serve -m TINY --addr nowhere", "serve -m TINY --addr 127.0.0.1:0 --device none"},
	"serve --precision": {"serve -m TINY --addr nowhere", "serve -m TINY --addr 127.0.0.1:0 --precision none"},

	"convert --model":     {"convert -m TINY -o OUT", "convert --model ALTERED -o OUT"},
	"convert --out":       {"convert -m TINY -o OUT", "convert -m TINY --out OUT/x"},
	"convert --precision": {"convert -m TINY -o OUT", "convert -m TINY -o OUT --precision f16"},
	"convert --shard":     {"convert -m TINY -o OUT", "convert -m TINY -o OUT --shard 1e-5"},
	"convert --gguf":      {"convert -m TINY -o OUT", "convert -m TINY -o OUT --gguf f16"},

	"finetune --model":      {"TUNED", "TUNED --model ALTERED"},
	"finetune --data":       {"TUNED", "TUNED --data CHAT"},
	"finetune --out":        {"TUNED", "TUNED --out OUT/x"},
	"finetune --method":     {"TUNED", "TUNED --method full"},
	"finetune --rank":       {"TUNED", "TUNED --rank 2"},
	"finetune --alpha":      {"TUNED", "TUNED --alpha 1"},
	"finetune --dropout":    {"TUNED", "TUNED --dropout 0.5"},
	"finetune --base":       {"TUNED", "TUNED --base nf4"},
	"finetune --targets":    {"TUNED", "TUNED --targets q_proj"},
	"finetune --merge":      {"TUNED", "TUNED --merge"},
	"finetune --blocks":     {"TUNED --method last --blocks 1", "TUNED --method last --blocks 2"},
	"finetune --steps":      {"TUNED", "TUNED --steps 3"},
	"finetune --epochs":     {"LONG", "LONG --epochs 1"},
	"finetune --batch":      {"TUNED", "TUNED --batch 1"},
	"finetune --accumulate": {"TUNED", "TUNED --accumulate 2"},
	"finetune --seq":        {"TUNED", "TUNED --seq 64"},
	"finetune --lr":         {"TUNED", "TUNED --lr 0.01"},
	"finetune --held-out":   {"TUNED", "TUNED --held-out 0.5"},

	"finetune --preference-loss": {"PREFERRED", "PREFERRED --preference-loss ipo"},
	"finetune --beta":            {"PREFERRED", "PREFERRED --beta 0.9"},
	"finetune --label-smoothing": {"PREFERRED", "PREFERRED --label-smoothing 0.4"},

	"finetune --keep":      {"TUNED", "TUNED --keep self"},
	"finetune --forget":    {"TUNED --keep self", "TUNED --keep self --forget 0.5"},
	"finetune --grow-rank": {"TUNED", "TUNED --grow-rank"},

	"finetune --prompt":     {"TUNED", "TUNED --prompt another"},
	"finetune --save-every": {"TUNED", "TUNED --save-every 1"},
	"finetune --eval-every": {"TUNED", "TUNED --eval-every 1"},
	"finetune --seed":       {"TUNED", "TUNED --seed 2"},
	"finetune --resume":     {"TUNED", "TUNED --resume"},
	"finetune --board":      {"TUNED", "TUNED --board 127.0.0.1:0"},
	"finetune --quiet":      {"TUNED", "TUNED --quiet"},
	"finetune --device":     {"TUNED", "TUNED --device none"},
	"finetune --precision":  {"TUNED", "TUNED --precision none"},

	"train --preset":    {"FRESH --preset small", "FRESH --preset none"},
	"train --layers":    {"FRESH --layers 1", "FRESH --layers 2"},
	"train --dim":       {"FRESH --layers 1", "FRESH --layers 1 --dim 16"},
	"train --heads":     {"FRESH --layers 1", "FRESH --layers 1 --heads 4"},
	"train --kv-heads":  {"FRESH --layers 1", "FRESH --layers 1 --kv-heads 1"},
	"train --ff":        {"FRESH --layers 1", "FRESH --layers 1 --ff 32"},
	"train --untied":    {"FRESH --layers 1", "FRESH --layers 1 --untied"},
	"train --vocab":     {"FRESH --layers 1", "FRESH --layers 1 --vocab 310"},
	"train --tokenizer": {"FRESH --layers 1", "FRESH --layers 1 --tokenizer none"},
	"train --documents": {"FRESH --layers 1 -d FOLDER", "FRESH --layers 1 -d FOLDER --documents"},
	"train --cache":     {"FRESH --layers 1", "FRESH --layers 1 --cache OUT-tokens"},
	"train --max-bytes": {"TRAIN", "TRAIN --max-bytes 600"},
	"train --held-out":  {"TRAIN", "TRAIN --held-out 30"},

	"train --model":         {"TRAIN", "TRAIN --model ALTERED"},
	"train --data":          {"TRAIN", "TRAIN --data OTHER"},
	"train --out":           {"TRAIN", "TRAIN --out OUT/x"},
	"train --steps":         {"TRAIN", "TRAIN --steps 3"},
	"train --batch":         {"TRAIN", "TRAIN --batch 2"},
	"train --accumulate":    {"TRAIN", "TRAIN --accumulate 2"},
	"train --seq":           {"TRAIN", "TRAIN --seq 8"},
	"train --lr":            {"TRAIN", "TRAIN --lr 0.01"},
	"train --grow":          {"TRAIN", "TRAIN --grow 2"},
	"train --adapters":      {"TRAIN", "TRAIN --adapters all"},
	"train --directed":      {"TRAIN --adapters all", "TRAIN --adapters all --directed"},
	"train --rank":          {"TRAIN --adapters all", "TRAIN --adapters all --rank 2"},
	"train --time":          {"TRAIN --time 1ms", "TRAIN --time 2s"},
	"train --save-every":    {"TRAIN", "TRAIN --save-every 1"},
	"train --eval-every":    {"TRAIN", "TRAIN --eval-every 1"},
	"train --seed":          {"TRAIN", "TRAIN --seed 2"},
	"train --resume":        {"TRAIN", "TRAIN --resume"},
	"train --board":         {"TRAIN", "TRAIN --board 127.0.0.1:0"},
	"train --board-control": {"TRAIN --board nowhere", "TRAIN --board 127.0.0.1:0 --board-control"},
	"train --tensorboard":   {"TRAIN", "TRAIN --tensorboard"},
	"train --quiet":         {"TRAIN", "TRAIN --quiet"},
	"train --device":        {"TRAIN", "TRAIN --device none"},
	"train --precision":     {"TRAIN", "TRAIN --precision none"},
	"train --optimizer":     {"TRAIN", "TRAIN --optimizer muon"},
	"train --schedule":      {"TRAIN", "TRAIN --schedule constant"},
	"train --warmup":        {"TRAIN", "TRAIN --warmup 1"},
	"train --clip":          {"TRAIN", "TRAIN --clip 0.01"},
	"train --weight-decay":  {"TRAIN --lr 0.1", "TRAIN --lr 0.1 --weight-decay 0"},
	"train --keep-best":     {"TRAIN", "TRAIN --keep-best"},
	"train --gguf":          {"TRAIN", "TRAIN --gguf f16"},
}

// unseen lists the flags without a visible effect in a single process on a CPU, with the reason.
var unseen = map[string]string{
	"finetune --recompute":      "it changes the memory that a run takes, and no bits",
	"finetune --recompute-mlps": "it changes the memory that a run takes, and no bits",
	"finetune --gpus":           "TestFinetuneRanks starts several processes",
	"chat --system":             "TestChat looks for it in the prompt",
	"chat --seed":               "TestChat compares two seeds",
	"train --monitor":           "TestTrainFromScratch looks for the table, which has times",
	"train --grad-precision":    "it is for GPUs",
	"train --tune":              "it is for GPUs",
	"train --profile":           "it is for GPUs",
	"train --memory":            "it is for GPUs",
	"finetune --memory":         "it is for GPUs",
	"train --recompute":         "it changes the memory that a run takes, and no bits",
	"train --recompute-mlps":    "it changes the memory that a run takes, and no bits",
	"train --gpus":              "TestTrainGPUs starts several processes",
	"train --deadline":          "it is for processes that hang",
	"train --save-parts":        "TestTrainGPUs looks for the parts",
}

// TestEveryFlagHasAnEffect runs each command with and without a flag, and requires that the output or the
// files differ. Long tests try every flag, and short ones a sixth of them.
func TestEveryFlagHasAnEffect(t *testing.T) {
	altered := filepath.Join(t.TempDir(), "altered")
	_, err := kasmina(t, "train", "-m", tiny, "-d", license, "-o", altered, "-n", "1", "-b", "1", "--seq",
		"16", "--lr", "0.1", "--device", "cpu")
	require.NoError(t, err)
	other := filepath.Join(t.TempDir(), "text")
	require.NoError(t, os.WriteFile(other, bytes.Repeat([]byte("other text. "), 200), 0o666))
	chats := filepath.Join(t.TempDir(), "chat.jsonl")
	require.NoError(t, os.WriteFile(chats, []byte(`{"text": "Permission is hereby granted, free of `+
		`charge, to any person obtaining a copy of this software"}`+"\n{}\n[]\n"), 0o666))
	tune, pairs := writeTuning(t, 40), writePairs(t, 20)
	recorded := finishedRun(t)
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	folder := t.TempDir()
	for _, name := range []string{"a", "b", "c"} {
		text := bytes.Repeat([]byte("a text of "+name+". "), 80)
		require.NoError(t, os.WriteFile(filepath.Join(folder, name), text, 0o666))
	}

	observe := func(line string) string {
		t.Chdir(t.TempDir())
		line = strings.Replace(line, "TRAIN", "train -m TINY -d TEXT -o OUT -n 2 -b 1 --seq 16 --device cpu", 1)
		line = strings.Replace(line, "LONG", "finetune -m TINY -d TUNE -o OUT -b 1 --accumulate 1 --device cpu", 1)
		line = strings.Replace(line, "PREFERRED", "finetune -m TINY -d PAIRS -o OUT -n 2 -b 2 --accumulate 1 --lr 0.01 "+
			"--device cpu", 1)
		line = strings.Replace(line, "TUNED", "finetune -m TINY -d TUNE -o OUT -n 2 -b 2 --accumulate 1 --device cpu", 1)
		line = strings.Replace(line, "FRESH", "train --dim 32 --heads 2 -d TEXT -o OUT -n 2 -b 1 --seq 16 "+
			"--device cpu", 1)
		if !strings.Contains(line, "--vocab") && !strings.Contains(line, "--tokenizer") &&
			!strings.Contains(line, "-m TINY") {
			line = strings.Replace(line, "--dim 32 ", "--dim 32 --vocab 300 ", 1)
		}
		if strings.Contains(line, "--time") {
			line = strings.Replace(line, "-n 2 ", "", 1)
		}
		dir := filepath.Join(t.TempDir(), "dir")
		line = strings.NewReplacer("TINY", absolute(t, tiny), "LLAMA", absolute(t, testdata+"/llama2"),
			"ALTERED", altered, "TEXT", absolute(t, license), "OTHER", other, "FOLDER", folder, "CHAT", chats, "TUNE", tune,
			"PAIRS", pairs, "RUN", recorded,
			"PIQA", absolute(t, taskFiles+"/piqa.jsonl"), "SOLVED", absolute(t, taskFiles+"/train/piqa.jsonl"),
			"SUMS", absolute(t, taskFiles+"/gsm8k.jsonl"), "OUT",
			filepath.Join(dir, "out")).Replace(line)
		var stdout, stderr bytes.Buffer
		err := run(t.Context(), strings.Fields(line), &stdout, &stderr)
		text := timesAndPlaces.ReplaceAllString(fmt.Sprintf("%s\n%s\n%v\n", &stdout, &stderr, err), "")
		files := snapshotOf(t, filepath.Dir(dir))
		for _, path := range slices.Sorted(maps.Keys(files)) {
			switch filepath.Base(path) {
			case manifestName: // contains the options
				text += path
			case resultName:
				text += path + timesAndPlaces.ReplaceAllString(files[path], "")
			case logName: // contains times
				text += fmt.Sprint(path, strings.Count(files[path], `"event":"saved"`))
			default:
				text += path + files[path]
			}
		}
		return strings.ReplaceAll(text, filepath.Dir(dir), "DIR")
	}

	drawn := randtest.Sample(t, len(effects)/6, effects)
	without := map[string]string{} // output and files of commands without the flag
	for _, c := range commands(newRoot()) {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			name := nameOf(c) + " --" + f.Name
			e, ok := effects[name]
			if unseen[name] != "" || f.Name == "help" {
				return
			}
			require.True(t, ok, "the flag --%s of %s has no line in effects", f.Name, c.Name())
			require.Contains(t, e.with, "--"+f.Name)
			if _, ok := drawn[name]; !ok {
				return
			}

			if _, seen := without[e.line]; !seen {
				without[e.line] = observe(e.line)
				if !strings.Contains(e.line, "--time") {
					require.Equal(t, without[e.line], observe(e.line), "two runs of %s differ", e.line)
				}
			}
			require.NotEqual(t, without[e.line], observe(e.with), name)
		})
	}
}

// timesAndPlaces matches the parts of the output that differ between two runs of the same command.
var timesAndPlaces = regexp.MustCompile(`\d+:\d\d left|"(tokens_per_s|peak_gib)":[\d.e+-]+|[\d.]+[kM]? tok/s|in [\d.]+ s|127\.0\.0\.1:\d+|=+>? *\]|/tmp/[^ "\n]*/\d+/`)

// absolute returns the absolute path of a file in the package's folder.
func absolute(t *testing.T, path string) string {
	t.Helper()
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), path)
}
