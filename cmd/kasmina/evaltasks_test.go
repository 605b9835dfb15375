package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const taskFiles = "../../llm/tasks/testdata"

// TestEvalTasks measures a model with a file of each kind, on all devices, and checks the files that the
// command writes.
func TestEvalTasks(t *testing.T) {
	for _, device := range devices(t) {
		out := filepath.Join(t.TempDir(), "results.json")
		args := []string{"eval", "-m", tiny, "--device", device, "--out", out, "--limit", "8", "--answer-tokens",
			"8", "--few-shot", "0", "--tasks", taskFiles + "/hellaswag.jsonl," + taskFiles + "/lambada.jsonl=lambada," +
				taskFiles + "/mmlu.jsonl," + taskFiles + "/gsm8k.jsonl," + taskFiles + "/wikitext.jsonl"}
		text, err := kasmina(t, args...)
		require.NoError(t, err)
		require.Regexp(t, `(?m)^ +strict-match +exact_match|^gsm8k +3 +8 +0 +strict-match +exact_match`, text)

		lines := strings.Split(strings.TrimSpace(text), "\n")
		last := lines[len(lines)-1]
		var report struct{ Results map[string]map[string]any }
		require.NoError(t, json.Unmarshal([]byte(last), &report))
		require.Len(t, report.Results, 5)
		require.Contains(t, report.Results["hellaswag"], "acc_norm_stderr,none")
		require.Equal(t, 8.0, report.Results["wikitext"]["sample_len"])
		written, err := os.ReadFile(out)
		require.NoError(t, err)
		require.Equal(t, last+"\n", string(written))

		// The same command uses the answers that it finds, and another one refuses them.
		log := strings.TrimSuffix(out, ".json") + ".items.jsonl"
		before, err := os.ReadFile(log)
		require.NoError(t, err)
		require.Equal(t, 1+5*8, strings.Count(string(before), "\n"))
		again, err := kasmina(t, args...)
		require.NoError(t, err)
		require.Equal(t, text, again)
		after, err := os.ReadFile(log)
		require.NoError(t, err)
		require.Equal(t, string(before), string(after))
		_, err = kasmina(t, append(args, "--limit", "7")...)
		require.ErrorContains(t, err, "has the answers of another model, to other tasks or with other options")
	}
}

// TestEvalBundle measures a model with a CORE bundle.
func TestEvalBundle(t *testing.T) {
	text, err := kasmina(t, "eval", "-m", tiny, "--device", "cpu", "--tasks", taskFiles+"/core")
	require.NoError(t, err)
	require.Regexp(t, `(?m)^CORE .* core +-?0\.\d{4} +N/A$`, text)
}

// TestEvalTasksRefuses checks the errors for options that make no sense.
func TestEvalTasksRefuses(t *testing.T) {
	piqa := taskFiles + "/piqa.jsonl"
	for line, want := range map[string]string{
		"":                                                 "nothing to measure: give --data or --tasks",
		"--tasks hellaswag":                                "no such file or directory: give a file with the questions, which are not downloaded",
		"--tasks " + piqa + "=piqb":                        `unknown format "piqb", want one of hellaswag, arc`,
		"--tasks " + piqa + " --few-shot -2":               "--few-shot is -2",
		"--tasks " + piqa + " --limit -1":                  "--limit is -1",
		"--tasks " + piqa + " --answer-tokens 0":           "--answer-tokens is 0",
		"--tasks " + piqa + "," + piqa:                     `two tasks are called "piqa"`,
		"--tasks " + piqa + " --few-shot 1 --examples a,b": "--examples has 2 files and --tasks 1",
		"--tasks " + taskFiles + "/gsm8k.jsonl":            "permit fewer answer tokens",
	} {
		_, err := kasmina(t, append([]string{"eval", "-m", tiny, "--device", "cpu"}, strings.Fields(line)...)...)
		require.ErrorContains(t, err, want, line)
	}

	base := filepath.Join(t.TempDir(), "base")
	require.NoError(t, os.CopyFS(base, os.DirFS(tiny)))
	require.NoError(t, os.Remove(filepath.Join(base, "chat_template.jinja")))
	_, err := kasmina(t, "eval", "-m", base, "--device", "cpu", "--tasks", piqa, "--chat")
	require.ErrorContains(t, err, "--chat: the model base has no chat template: leave --chat out")
	_, err = kasmina(t, "generate", "-m", base, "--device", "cpu", "-p", "a", "--chat")
	require.ErrorContains(t, err, "--chat: the model base has no chat template: leave --chat out")
}
