package tasks

import (
	"encoding/csv"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"gopkg.in/yaml.v3"

	"github.com/kasmina-go/kasmina/internal/regular"
)

// Files of a CORE bundle (Li et al., "DataComp-LM: in search of the next generation of training sets for
// language models", 2024), as nanochat publishes it.
const (
	bundleTasks  = "core.yaml"
	bundleChance = "eval_meta_data.csv"
	bundleData   = "eval_data"

	maxBundleFile = 1 << 22
)

// shuffleSeed is the seed that nanochat uses to shuffle the items of each task.
const shuffleSeed = 1337

// A bundleTask is an entry of core.yaml.
type bundleTask struct {
	Label     string  `yaml:"label"`
	Data      string  `yaml:"dataset_uri"`
	Shots     []int   `yaml:"num_fewshot"`
	Kind      string  `yaml:"icl_task_type"`
	Delimiter *string `yaml:"continuation_delimiter"`
}

// findBundle returns the folder of the CORE bundle that a path names.
func findBundle(path string) (folder string, ok bool) {
	if filepath.Base(path) == bundleTasks {
		return filepath.Dir(path), true
	}
	info, err := os.Stat(path)
	return path, err == nil && info.IsDir()
}

// openBundle reads all tasks of a CORE bundle.
func openBundle(folder string, o Options) (tasks []*Task, err error) {
	switch {
	case o.Format != "" && o.Format != "core":
		return nil, fmt.Errorf("%s is a folder, which can only be a CORE bundle, and the format is %s", folder,
			o.Format)
	case o.FewShot != DefaultFewShot || o.Examples != "":
		return nil, fmt.Errorf("%s: a CORE bundle defines its few-shot examples itself: leave the number and "+
			"the file of examples out", folder)
	case o.Chat != nil:
		return nil, fmt.Errorf("%s: the prompts of a CORE bundle are not conversations: leave the chat template out",
			folder)
	}

	path := filepath.Join(folder, bundleTasks)
	text, err := regular.Read(path, maxBundleFile, "the list of a bundle's tasks has")
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%s has no %s: want a CORE bundle, or a file of JSON Lines or parquet", folder, bundleTasks)
	} else if err != nil {
		return nil, err
	}

	var list struct {
		Tasks []bundleTask `yaml:"icl_tasks"`
	}
	if err := yaml.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(list.Tasks) == 0 {
		return nil, fmt.Errorf("%s has no icl_tasks", path)
	}

	chances, err := readChances(filepath.Join(folder, bundleChance))
	if err != nil {
		return nil, err
	}

	for _, entry := range list.Tasks {
		chance, ok := chances[entry.Label]
		if !ok {
			return nil, fmt.Errorf("%s has no row for the task %q", filepath.Join(folder, bundleChance), entry.Label)
		}
		t, err := entry.open(folder, o.Limit)
		if err != nil {
			return nil, err
		}
		t.chance = chance / 100
		tasks = append(tasks, t)
	}
	return tasks, nil
}

// readChances reads the accuracies of random guesses, in percent.
func readChances(path string) (map[string]float64, error) {
	text, err := regular.Read(path, maxBundleFile, "a table of baselines has")
	if err != nil {
		return nil, err
	}

	rows, err := csv.NewReader(strings.NewReader(string(text))).ReadAll()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("%s is empty", path)
	}

	name, chance := slices.Index(rows[0], "Eval Task"), slices.Index(rows[0], "Random baseline")
	if name < 0 || chance < 0 {
		return nil, fmt.Errorf("%s has the columns %q, want \"Eval Task\" and \"Random baseline\"", path, rows[0])
	}

	chances := map[string]float64{}
	for _, row := range rows[1:] {
		x, err := strconv.ParseFloat(row[chance], 64)
		if err != nil || !(x >= 0 && x < 100) {
			return nil, fmt.Errorf("%s: the baseline of %q is %q, want a percentage", path, row[name], row[chance])
		}
		chances[row[name]] = x
	}
	return chances, nil
}

// open reads the items of a task, and shuffles them as nanochat does before it limits their number.
func (b bundleTask) open(folder string, limit int) (*Task, error) {
	ask := map[string]func(bundleItem, []bundleItem, string) *Item{"multiple_choice": askChoice,
		"schema": askSchema, "language_modeling": askEnding}[b.Kind]
	if ask == nil {
		return nil, fmt.Errorf("the task %q has the icl_task_type %q, want multiple_choice, schema or "+
			"language_modeling", b.Label, b.Kind)
	}
	if len(b.Shots) == 0 || b.Shots[0] < 0 {
		return nil, fmt.Errorf("the task %q has the num_fewshot %v, want a list with one number", b.Label, b.Shots)
	}
	if !filepath.IsLocal(filepath.FromSlash(b.Data)) {
		return nil, fmt.Errorf("the task %q has the dataset_uri %q, want a file below %s", b.Label, b.Data, bundleData)
	}

	path := filepath.Join(folder, bundleData, filepath.FromSlash(b.Data))
	docs, err := readDocuments(path)
	if err != nil {
		return nil, err
	}

	shuffled := make([]bundleItem, len(docs))
	for i, at := range newPythonRandom(shuffleSeed).shuffled(len(docs)) {
		if shuffled[i], err = b.read(docs[at]); err != nil {
			return nil, fmt.Errorf("%s: %w", docs[at].in(path), err)
		}
	}
	if limit > 0 {
		shuffled = shuffled[:min(limit, len(shuffled))]
	}

	delimiter, shots := " ", b.Shots[0]
	if b.Delimiter != nil {
		delimiter = *b.Delimiter
	}
	if shots > 0 && shots > len(shuffled)-1 {
		return nil, fmt.Errorf("%s: %w", path, tooFew(len(shuffled)-1, shots, ""))
	}

	t := &Task{Name: b.Label, Format: "core", FewShot: shots, Metrics: []Metric{accuracy}, core: true}
	for n, item := range shuffled {
		var examples []bundleItem
		if shots > 0 {
			for _, at := range newPythonRandom(uint32(fewShotSeed+n)).sample(len(shuffled)-1, shots) {
				if at >= n { // skip the item itself
					at++
				}
				examples = append(examples, shuffled[at])
			}
		}
		asked := ask(item, examples, delimiter)
		asked.Number = n
		t.Items = append(t.Items, asked)
	}
	return t, nil
}

// A bundleItem is an item of a CORE task.
type bundleItem struct {
	text         string   // query or context
	options      []string // choices, or contexts of the same continuation
	continuation string
	gold         int
}

// read reads a document as an item of the task.
func (b bundleTask) read(d *document) (item bundleItem, err error) {
	switch b.Kind {
	case "multiple_choice":
		item = bundleItem{text: d.text("query"), options: d.texts("choices"), gold: d.label("gold")}
	case "schema":
		item = bundleItem{options: d.texts("context_options"), continuation: d.text("continuation"),
			gold: d.label("gold")}
	default:
		item = bundleItem{text: d.text("context"), continuation: d.text("continuation")}
	}
	if d.err == nil && item.options != nil && (item.gold < 0 || item.gold >= len(item.options)) {
		d.fail("gold", "is %d, want 0 to %d", item.gold, len(item.options)-1)
	}
	return item, d.err
}

// askChoice makes an item with several choices of a continuation.
func askChoice(item bundleItem, examples []bundleItem, delimiter string) *Item {
	var before strings.Builder
	for _, e := range examples {
		before.WriteString(e.text + delimiter + e.options[e.gold] + "\n\n")
	}

	asked := &Item{gold: item.gold, grade: gradeMeans(item.gold)}
	for _, choice := range item.options {
		asked.Requests = append(asked.Requests, Request{Kind: Choice,
			Context: before.String() + item.text + delimiter, Continuation: choice})
	}
	return asked
}

// askSchema makes an item with several contexts of the same continuation.
func askSchema(item bundleItem, examples []bundleItem, delimiter string) *Item {
	var before strings.Builder
	for _, e := range examples {
		before.WriteString(e.options[e.gold] + delimiter + e.continuation + "\n\n")
	}

	asked := &Item{gold: item.gold, grade: gradeMeans(item.gold)}
	for _, context := range item.options {
		asked.Requests = append(asked.Requests, Request{Kind: Ending,
			Context: before.String() + context + delimiter, Continuation: item.continuation})
	}
	return asked
}

// askEnding makes an item with a single continuation, which is right if the model would write it.
func askEnding(item bundleItem, examples []bundleItem, delimiter string) *Item {
	var before strings.Builder
	for _, e := range examples {
		before.WriteString(strip(e.text) + delimiter + e.continuation + "\n\n")
	}

	// The continuation includes the white space before it, as in nanochat.
	prompt := before.String() + strip(item.text) + delimiter
	context := strings.TrimRightFunc(prompt, isSpace)
	return &Item{Requests: []Request{{Kind: Choice, Context: context,
		Continuation: strings.TrimPrefix(prompt, context) + item.continuation}},
		gold: item.continuation, grade: func(r []Response) verdict {
			return verdict{prediction: r[0].Greedy, values: []value{{x: truth(r[0].Greedy)}}}
		}}
}

// gradeMeans returns a function that selects the request with the largest mean log-likelihood per token and
// compares it with gold.
func gradeMeans(gold int) func([]Response) verdict {
	return func(responses []Response) verdict {
		best := 0
		for i, r := range responses {
			if r.LogProb/float64(r.Tokens) > responses[best].LogProb/float64(responses[best].Tokens) {
				best = i
			}
		}
		return verdict{prediction: best, values: []value{{x: truth(best == gold)}}}
	}
}
