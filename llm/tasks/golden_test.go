package tasks

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
	tokenizers "github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

const models = "../hf/testdata/"

// A golden file has the results of lm-eval for a model.
type golden struct {
	Cases []goldenCase
	Core  map[string][]float64 // whether each item of a CORE task is right
}

type goldenCase struct {
	Task    string
	Shots   int
	Chat    bool
	Subject string
	Items   []struct {
		Responses []json.RawMessage
		Metrics   map[string]float64
	}
	Results map[string]any
}

func (c goldenCase) String() string {
	return fmt.Sprintf("%s %s %d shots, chat %v", c.Task, c.Subject, c.Shots, c.Chat)
}

func readGolden(t *testing.T, name string) (g golden) {
	t.Helper()
	text, err := os.ReadFile("testdata/golden/" + name + ".json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &g))
	return g
}

// folderOf returns the folder of a golden model.
func folderOf(t *testing.T, name string) string {
	t.Helper()
	folder, ok := strings.CutSuffix(name, "-no-begin")
	if !ok {
		return models + folder
	}

	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS(models+folder)))
	path := filepath.Join(dir, "tokenizer_config.json")
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var config map[string]any
	require.NoError(t, json.Unmarshal(text, &config))
	delete(config, "bos_token")
	text, err = json.Marshal(config)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, text, 0o666))
	return dir
}

// testModel returns a model on the CPU and settings to measure it with.
func testModel(t *testing.T, folder string) (*llm.Inference, Settings) {
	t.Helper()
	f, err := hf.Open(folder)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	m, err := f.Load(t.Context())
	require.NoError(t, err)
	tok, err := tokenizers.Load(folder)
	require.NoError(t, err)
	i := &llm.Inference{Model: m}
	t.Cleanup(func() { require.NoError(t, i.Close()) })
	return i, Settings{Tokenizer: tok, Window: f.Config.Seq, Ends: f.Generation.End, Generate: 24}
}

// chatOf returns the rendering of conversations for a model.
func chatOf(t *testing.T, folder string) func([]chat.Message) (string, error) {
	t.Helper()
	template, err := chat.Load(folder)
	require.NoError(t, err)
	return func(m []chat.Message) (string, error) {
		return template.Render(m, chat.Options{AddGenerationPrompt: true})
	}
}

// agreement counts comparisons of items.
type agreement struct{ same, all int }

func (a *agreement) add(same bool) {
	a.all++
	if same {
		a.same++
	}
}

// TestLMEval compares every answer, every item's metrics and all results with lm-eval.
func TestLMEval(t *testing.T) {
	for _, name := range randtest.SampleOf(t, 2, []string{"tiny", "tiny-gpt2", "tiny-olmo2", "tiny-olmo2-no-begin"}) {
		t.Run(name, func(t *testing.T) {
			folder := folderOf(t, name)
			model, settings := testModel(t, folder)
			var items agreement
			worst := 0.0
			for _, c := range readGolden(t, name).Cases {
				if c.Task == "mmlu" && c.Items != nil && len(c.Items) == 0 {
					continue // the group, which the next test compares
				}
				compareCase(t, model, settings, folder, c, &items, &worst)
			}
			t.Logf("%d of %d items agree; the largest difference of a log-likelihood is %.2g", items.same,
				items.all, worst)
			require.GreaterOrEqual(t, float64(items.same), 0.999*float64(items.all))
			require.Less(t, worst, 1e-3)
		})
	}
}

// openCase opens the task of a golden case.
func openCase(t *testing.T, folder string, c goldenCase) *Task {
	t.Helper()
	o := Options{FewShot: c.Shots, Format: c.Task}
	if c.Shots > 0 {
		o.Examples = "testdata/train/" + c.Task + ".jsonl"
	}
	if c.Chat {
		o.Chat = chatOf(t, folder)
	}

	all, err := Open("testdata/"+c.Task+".jsonl", o)
	require.NoError(t, err, c)
	require.Len(t, all, 1)
	if c.Subject == "" {
		return all[0]
	}

	subject := *all[0]
	subject.Items = nil
	for _, item := range all[0].Items {
		if item.Group == c.Subject {
			subject.Items = append(subject.Items, item)
		}
	}
	return &subject
}

func compareCase(t *testing.T, model Model, settings Settings, folder string, c goldenCase, items *agreement,
	worst *float64) {
	t.Helper()
	task := openCase(t, folder, c)
	e := &evaluation{model: model, Settings: settings, tasks: []*Task{task}}
	results, err := e.run(t.Context())
	require.NoError(t, err, c)
	require.Len(t, c.Items, len(task.Items), c)

	for n, want := range c.Items {
		got := e.answers[0][n]
		require.Len(t, got, len(want.Responses), "%v, item %d", c, n)
		same := true
		for i, r := range want.Responses {
			off, agrees := difference(t, got[i], r)
			*worst, same = max(*worst, off), same && agrees
		}
		v := task.Items[n].grade(got)
		for k, m := range task.Metrics {
			w, ok := want.Metrics[m.Key()]
			require.True(t, ok, "%v: %s", c, m.Key())
			same = same && math.Abs(v.values[k].x-w) < 1e-3
		}
		if !same {
			t.Logf("%v, item %d: got %+v, want %s", c, n, got, want.Responses)
		}
		items.add(same)
	}
	requireResults(t, c, results[0])

	// From lm-eval's own answers, the results must equal lm-eval's in every digit that it prints.
	if !task.ratesText() {
		return
	}
	for n, item := range c.Items {
		e.answers[0][n] = []Response{responseOf(t, item.Responses[0])}
	}
	results, err = e.results(t.Context())
	require.NoError(t, err)
	for _, m := range results[0].Metrics {
		require.Equal(t, decimals(c.Results[m.Key()].(float64)), decimals(m.Value), c)
		if x, ok := c.Results[m.Name+"_stderr,"+m.Filter].(float64); ok {
			require.InDelta(t, x, m.Deviation, 1e-12*max(1, x))
		}
	}
}

// ratesText reports whether the task's metrics are computed from log-likelihoods.
func (t *Task) ratesText() bool {
	kind := t.Items[0].Requests[0].Kind
	return kind == Rolling || kind == LogLikelihood && len(t.Items[0].Requests) == 1
}

// responseOf returns an answer of lm-eval.
func responseOf(t *testing.T, text json.RawMessage) (r Response) {
	t.Helper()
	var x any
	require.NoError(t, json.Unmarshal(text, &x))
	if pair, ok := x.([]any); ok {
		return Response{LogProb: pair[0].(float64), Greedy: pair[1] == 1.0}
	}
	return Response{LogProb: x.(float64)}
}

// difference compares an answer with lm-eval's: a text, a log-likelihood, or a log-likelihood and whether
// the continuation is greedy.
func difference(t *testing.T, got Response, want json.RawMessage) (off float64, same bool) {
	t.Helper()
	var x any
	require.NoError(t, json.Unmarshal(want, &x))
	switch x := x.(type) {
	case string:
		return 0, got.Text == x
	case float64:
		return math.Abs(got.LogProb - x), true
	case []any:
		return math.Abs(got.LogProb - x[0].(float64)), truth(got.Greedy) == x[1]
	}
	t.Fatalf("unknown answer %s", want)
	return 0, false
}

// requireResults checks that the results of a task equal lm-eval's. They must agree in the four decimals
// that lm-eval prints. A perplexity above 100 must agree in five digits, because it is the exponential of
// log-likelihoods in float32, which determine no more.
func requireResults(t *testing.T, c goldenCase, got Result) {
	t.Helper()
	require.Len(t, c.Results, 2*len(got.Metrics), c)
	for _, m := range got.Metrics {
		for key, x := range map[string]float64{m.Key(): m.Value, m.Name + "_stderr," + m.Filter: m.Deviation} {
			want, ok := c.Results[key].(float64)
			switch {
			case !ok:
				require.Equal(t, c.Results[key], number(x), "%v: %s", c, key)
			case want < 100:
				require.Equal(t, decimals(want), decimals(x), "%v: %s", c, key)
			default:
				require.InEpsilon(t, want, x, 1e-5, "%v: %s", c, key)
			}
		}
	}
}

// TestGroups compares the result for all subjects of a file with the result of lm-eval's group mmlu.
func TestGroups(t *testing.T) {
	model, settings := testModel(t, models+"tiny")
	for _, c := range readGolden(t, "tiny").Cases {
		if c.Task != "mmlu" || len(c.Items) > 0 {
			continue
		}
		task := openCase(t, models+"tiny", c)
		results, err := Evaluate(t.Context(), []*Task{task}, model, settings)
		require.NoError(t, err)
		require.Len(t, results[0].Groups, 2)
		requireResults(t, c, results[0])
	}
}

// TestCore compares the items of a CORE bundle with nanochat, and checks the CORE metric.
func TestCore(t *testing.T) {
	for _, name := range []string{"tiny", "tiny-gpt2", "tiny-olmo2", "tiny-olmo2-no-begin"} {
		folder := folderOf(t, name)
		model, settings := testModel(t, folder)
		all, err := Open("testdata/core", Options{FewShot: DefaultFewShot})
		require.NoError(t, err)
		e := &evaluation{model: model, Settings: settings, tasks: all}
		results, err := e.run(t.Context())
		require.NoError(t, err)

		want := readGolden(t, name).Core
		require.Len(t, all, len(want))
		metric := 0.0
		for i, task := range all {
			right, sum := make([]float64, len(task.Items)), 0.0
			for n, item := range task.Items {
				right[n] = item.grade(e.answers[i][n]).values[0].x
				sum += right[n]
			}
			require.Equal(t, want[task.Name], right, "%s: %s", name, task.Name)
			accuracy, chance := sum/float64(len(right)), []float64{0.33, 0.5, 0}[i]
			metric += (accuracy - chance) / (1 - chance) / 3
			require.InDelta(t, accuracy, results[i].Metrics[0].Value, 1e-12)
		}
		require.Equal(t, "CORE", results[3].Task)
		require.InDelta(t, metric, results[3].Metrics[0].Value, 1e-12)
	}
}
