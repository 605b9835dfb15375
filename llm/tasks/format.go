package tasks

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// A format is the layout of a task's file, with lm-eval's definition of the task.
type format struct {
	name    string
	version int
	fields  []string // required fields; the first format that fits a file is selected
	named   bool     // whether the user has to name the format, because the fields fit several
	shots   int      // few-shot examples if the user gives no number
	metrics []Metric
	until   []string // ends of generated texts

	firstN   bool // whether to use the first examples instead of random ones
	excludes bool // whether to skip examples that equal the item

	read func(*document) example
}

// An example is an item as text.
type example struct {
	description string // instructions before all examples and questions
	group       string
	question    string
	// contexts replaces question if there are several contexts to choose from, each continued by target.
	contexts []string
	choices  []string
	gold     int    // the right choice
	target   string // the right answer, if there are no choices
	source   string // running text, to count words and bytes
}

// answer returns the right answer for a few-shot example.
func (e example) answer() string {
	if e.target != "" || e.contexts != nil || e.choices == nil {
		return e.target
	}
	return e.choices[e.gold]
}

// prompt returns the question for a few-shot example.
func (e example) prompt() string {
	if e.contexts != nil {
		return e.contexts[e.gold]
	}
	return e.question
}

// options returns the texts to choose from.
func (e example) options() []string {
	if e.contexts != nil {
		return e.contexts
	}
	return e.choices
}

// Metrics of the formats.
var (
	accuracy   = Metric{"acc", "none", true, mean}
	normalized = Metric{"acc_norm", "none", true, mean}
	byBytes    = Metric{"acc_bytes", "none", true, mean}
	byWord     = Metric{"word_perplexity", "none", false, weightedPerplexity}
	byByte     = Metric{"byte_perplexity", "none", false, weightedPerplexity}
	bits       = Metric{"bits_per_byte", "none", false, bitsPerByte}
)

var (
	accuracies = []Metric{accuracy, normalized, byBytes}
	running    = []Metric{byWord, byByte, bits}
)

// formats lists the formats. A file has the first one that fits its fields.
var formats = []*format{
	{name: "hellaswag", version: 1, fields: []string{"ctx_a", "ctx_b", "activity_label", "endings"},
		metrics: accuracies, excludes: true, read: readHellaSwag},
	{name: "arc", version: 1, fields: []string{"question", "choices", "answerKey"}, metrics: accuracies,
		read: readARC},
	{name: "arc", version: 1, fields: []string{"question", "answerKey"}, metrics: accuracies, read: readARC},
	{name: "piqa", version: 1, fields: []string{"goal", "sol1", "sol2"}, metrics: accuracies,
		excludes: true, read: readPIQA},
	{name: "winogrande", version: 1, fields: []string{"sentence", "option1", "option2"},
		metrics: []Metric{accuracy}, excludes: true, read: readWinoGrande},
	{name: "boolq", version: 2, fields: []string{"passage", "question"}, metrics: []Metric{accuracy},
		excludes: true, read: readBoolQ},
	{name: "mmlu", version: 1, fields: []string{"question", "choices", "answer"}, metrics: []Metric{accuracy},
		firstN: true, read: readMMLU},
	{name: "gsm8k", version: 3, fields: []string{"question", "answer"}, shots: 5,
		metrics: []Metric{{"exact_match", "strict-match", true, mean},
			{"exact_match", "flexible-extract", true, mean}},
		until: []string{"Question:", "</s>", "<|im_end|>"}, read: readGSM8K},
	{name: "wikitext", version: 2, fields: []string{"page"}, metrics: running, read: readWikiText},
	{name: "lambada", version: 1, fields: []string{"text"}, named: true,
		metrics: []Metric{{"perplexity", "none", false, perplexity}, accuracy}, read: readLAMBADA},
	{name: "perplexity", version: 1, fields: []string{"text"}, named: true, metrics: running,
		read: readText},
}

// Formats returns the names of the formats of files. Open also reads the folders of CORE bundles.
func Formats() (names []string) {
	for _, f := range formats {
		if !slices.Contains(names, f.name) {
			names = append(names, f.name)
		}
	}
	return names
}

// findFormat returns the format with the given name. If name is empty, it returns the format that fits a
// document.
func findFormat(name string, d *document) (*format, error) {
	var fits []string
	for _, f := range formats {
		if name != "" && f.name != name || !f.fits(d) {
			continue
		}
		if name != "" || !f.named {
			return f, nil
		}
		fits = append(fits, f.name)
	}

	switch {
	case name != "" && !slices.Contains(Formats(), name):
		return nil, fmt.Errorf("unknown format %q, want one of %s", name, strings.Join(Formats(), ", "))
	case name != "":
		i := slices.IndexFunc(formats, func(f *format) bool { return f.name == name })
		return nil, fmt.Errorf("%s %d has the fields %s, and the format %s needs %s", d.unit(), d.line, d.names(),
			name, quoted(formats[i].fields))
	case len(fits) > 0:
		return nil, fmt.Errorf("the fields %s fit several formats: name the right one, %s", d.names(),
			strings.Join(fits, " or "))
	}

	return nil, fmt.Errorf("%s %d has the fields %s, which match none of the formats %s: name a format to see the fields "+
		"that it needs", d.unit(), d.line, d.names(), strings.Join(Formats(), ", "))
}

// fits reports whether a document has the format's fields.
func (f *format) fits(d *document) bool {
	return !slices.ContainsFunc(f.fields, func(field string) bool { return !d.has(field) })
}

// bracketed matches the artifacts of the WikiHow part of HellaSwag.
var bracketed = regexp.MustCompile(`\[.*?\]`)

// cleanHellaSwag removes artifacts from a text of HellaSwag.
func cleanHellaSwag(text string) string {
	text = strings.ReplaceAll(strip(text), " [title]", ". ")
	return strings.ReplaceAll(bracketed.ReplaceAllString(text, ""), "  ", " ")
}

func readHellaSwag(d *document) example {
	e := example{choices: d.texts("endings"), gold: d.label("label")}
	for i, c := range e.choices {
		e.choices[i] = cleanHellaSwag(c)
	}
	e.question = cleanHellaSwag(d.text("activity_label") + ": " + d.text("ctx_a") + " " +
		capitalize(d.text("ctx_b")))
	return e
}

// readARC reads the data set on the Hugging Face hub, with parallel lists of texts and labels, and the
// original files, with a stem and a list of choices.
func readARC(d *document) example {
	var labels []string
	var e example
	stem := ""
	if _, original := d.fields["question"].(map[string]any); original {
		q := d.object("question")
		stem = q.text("stem")
		list, _ := q.fields["choices"].([]any)
		for _, c := range list {
			fields, _ := c.(map[string]any)
			choice := &document{fields: fields}
			e.choices, labels = append(e.choices, choice.text("text")), append(labels, choice.text("label"))
			d.err = firstError(d.err, choice.err)
		}
		d.err = firstError(d.err, q.err)
	} else {
		stem = d.text("question")
		c := d.object("choices")
		e.choices, labels = c.texts("text"), c.texts("label")
		d.err = firstError(d.err, c.err)
	}

	e.question = "Question: " + stem + "\nAnswer:"
	key := d.text("answerKey")
	if len(labels) != len(e.choices) {
		d.fail("choices", "has %d texts and %d labels, want equal numbers", len(e.choices), len(labels))
	} else if e.gold = slices.Index(labels, key); e.gold < 0 {
		d.fail("answerKey", "is %.40q, want one of the labels %q", key, labels)
	}
	return e
}

func readPIQA(d *document) example {
	return example{question: "Question: " + d.text("goal") + "\nAnswer:",
		choices: []string{d.text("sol1"), d.text("sol2")}, gold: d.label("label")}
}

func readWinoGrande(d *document) example {
	sentence := d.text("sentence")
	before, after, ok := strings.Cut(sentence, "_")
	if !ok {
		d.fail("sentence", "is %.60q, want a blank, \"_\", in it", sentence)
	}

	e := example{contexts: []string{before + d.text("option1"), before + d.text("option2")},
		target: strip(after)}
	switch answer := d.text("answer"); answer {
	case "1", "2":
		e.gold = int(answer[0] - '1')
	case "":
		d.fail("answer", "is empty: the item cannot be graded; use a split with answers")
	default:
		d.fail("answer", "is %.40q, want \"1\" or \"2\"", answer)
	}
	return e
}

// readBoolQ reads the files of SuperGLUE, with a label, and the original files, with an answer.
func readBoolQ(d *document) example {
	field := "label"
	if !d.has(field) && d.has("answer") {
		field = "answer"
	}
	return example{question: d.text("passage") + "\nQuestion: " + d.text("question") + "?\nAnswer:",
		choices: []string{"no", "yes"}, gold: d.label(field)}
}

func readMMLU(d *document) example {
	choices := d.texts("choices")
	if len(choices) < 4 && d.err == nil {
		d.fail("choices", "has %d choices, want 4", len(choices))
	}
	if d.err != nil {
		return example{}
	}

	e := example{choices: []string{"A", "B", "C", "D"}}
	e.question = fmt.Sprintf("%s\nA. %s\nB. %s\nC. %s\nD. %s\nAnswer:", strip(d.text("question")), choices[0],
		choices[1], choices[2], choices[3])
	if letter, ok := d.fields["answer"].(string); ok && slices.Contains(e.choices, letter) {
		e.gold = slices.Index(e.choices, letter)
	} else {
		e.gold = d.label("answer")
	}

	if d.has("subject") {
		e.group = d.text("subject")
		e.description = "The following are multiple choice questions (with answers) about " +
			strings.ReplaceAll(e.group, "_", " ") + ".\n\n"
	}
	return e
}

func readGSM8K(d *document) example {
	return example{question: "Question: " + d.text("question") + "\nAnswer:", target: d.text("answer")}
}

func readLAMBADA(d *document) example {
	text := d.text("text")
	at := strings.LastIndexByte(text, ' ')
	return example{question: text[:max(0, at)], target: " " + text[at+1:]}
}

func readText(d *document) example {
	text := d.text("text")
	return example{target: text, source: text}
}

// Rules that turn the tokens of WikiText into ordinary text.
var (
	wikiMarks = []string{" : ", ": ", " ; ", "; ", " . ", ". ", " ! ", "! ", " ? ", "? ", " , ", ", "}
	wikiPairs = []struct {
		pattern *regexp.Regexp
		pair    string
	}{
		{wikiPair(`\(`, `\)`, `)`), "($1)"}, {wikiPair(`\[`, `\]`, `\]`), "[$1]"},
		{wikiPair(`\{`, `\}`, `}`), "{$1}"}, {wikiPair(`"`, `"`, `"`), `"$1"`},
		{wikiPair(`'`, `'`, `'`), `'$1'`},
	}
	wikiRest = []string{"= = = =", "====", "= = =", "===", "= =", "==", " ° ", "°", " \n", "\n", "\n ", "\n",
		" N ", " 1 ", " 's", "'s"}
	wikiDigit = regexp.MustCompile(`/' [0-9]/`)
)

// wikiPair returns an expression that matches two marks, with white space inside, around a text without the
// characters of class.
func wikiPair(open, end, class string) *regexp.Regexp {
	return regexp.MustCompile(open + spaces + `*([^` + class + `]*?)` + spaces + `*` + end)
}

// readWikiText reads a page of WikiText. Its text is detokenized, but its words and bytes are counted as
// they are in the file.
func readWikiText(d *document) example {
	page := d.text("page")
	text := strings.ReplaceAll(page, "s '", "s'")
	text = wikiDigit.ReplaceAllString(text, "/'[0-9]/")
	text = replaceInTurn(text, " @-@ ", "-", " @,@ ", ",", " @.@ ", ".")
	text = replaceInTurn(text, wikiMarks...)
	for _, p := range wikiPairs {
		text = p.pattern.ReplaceAllString(text, p.pair)
	}
	return example{target: replaceInTurn(text, wikiRest...), source: page}
}

// replaceInTurn replaces old strings by new ones, pair after pair.
func replaceInTurn(text string, pairs ...string) string {
	for i := 0; i < len(pairs); i += 2 {
		text = strings.ReplaceAll(text, pairs[i], pairs[i+1])
	}
	return text
}

// firstError returns the first error that is not nil.
func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
