package tasks

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
)

// Options configure how Open reads a task. The zero value selects the defaults.
type Options struct {
	Format string // name of the format; "" finds it from the file's fields
	// FewShot is the number of solved examples before each question, or DefaultFewShot. The number in a
	// CORE bundle cannot be changed.
	FewShot int
	// Examples is a file of the same format, such as the training split, that provides the examples. If it
	// is "", they are other items of the task's file.
	Examples string
	Limit    int // number of items to use, from the start of the file; 0 uses all
	// Chat renders a conversation up to the start of the assistant's next message. If it is set, prompts are
	// conversations: instructions become a system message, and examples become questions and answers.
	Chat func([]chat.Message) (string, error)
}

// DefaultFewShot selects the number of examples that lm-eval uses for the format.
const DefaultFewShot = -1

// fewShotSeed is the seed that lm-eval and nanochat use to draw examples.
const fewShotSeed = 1234

// Open reads the tasks in a file or, if path is a folder or a core.yaml, in a CORE bundle.
func Open(path string, o Options) ([]*Task, error) {
	if bundle, ok := findBundle(path); ok {
		return openBundle(bundle, o)
	}

	t, err := openFile(path, o)
	if err != nil {
		return nil, err
	}
	return []*Task{t}, nil
}

func openFile(path string, o Options) (*Task, error) {
	docs, err := readDocuments(path)
	if err != nil {
		return nil, err
	}

	f, err := findFormat(o.Format, docs[0])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}

	name := filepath.Base(path)
	b := &builder{format: f, chat: o.Chat, path: path,
		task: &Task{Name: strings.TrimSuffix(name, filepath.Ext(name)), Format: f.name, Version: f.version,
			FewShot: o.FewShot, Metrics: f.metrics}}
	if o.FewShot == DefaultFewShot {
		b.task.FewShot = f.shots
	}
	if b.task.FewShot < 0 {
		return nil, fmt.Errorf("%d few-shot examples, want at least 0", o.FewShot)
	}

	if o.Limit > 0 {
		b.docs = docs[:min(o.Limit, len(docs))]
	} else {
		b.docs = docs
	}

	if err := b.readExamples(docs, o.Examples); err != nil {
		return nil, err
	}
	return b.build()
}

// A builder makes a task from documents.
type builder struct {
	format *format
	task   *Task
	path   string
	docs   []*document
	chat   func([]chat.Message) (string, error)

	shots []shot // documents to draw examples from
	own   bool   // whether shots are the task's own documents
	rnd   *pythonRandom
}

// A shot is a document to draw as an example.
type shot struct {
	*document
	example
	path string
}

// readExamples reads the documents to draw examples from.
func (b *builder) readExamples(own []*document, path string) (err error) {
	if b.task.FewShot == 0 {
		return nil
	}
	if len(b.format.metrics) > 0 && b.format.metrics[0] == byWord {
		return fmt.Errorf("%s: items of the format %s have no few-shot examples, want 0", b.path, b.format.name)
	}

	docs, from := own, b.path
	if b.own = path == ""; !b.own {
		from = path
		if docs, err = readDocuments(path); err != nil {
			return err
		}
	}

	for _, d := range docs {
		e, err := b.read(d, from)
		if err != nil {
			return err
		}
		b.shots = append(b.shots, shot{d, e, from})
	}
	b.rnd = newPythonRandom(fewShotSeed)
	return nil
}

// read reads a document of a file.
func (b *builder) read(d *document, path string) (example, error) {
	if !b.format.fits(d) {
		return example{}, fmt.Errorf("%s: the fields are %s, and the format %s needs %s", d.in(path),
			d.names(), b.format.name, quoted(b.format.fields))
	}
	e := b.format.read(d)
	if d.err != nil {
		return e, fmt.Errorf("%s: %w", d.in(path), d.err)
	}
	return e, nil
}

// build makes the items.
func (b *builder) build() (*Task, error) {
	outside := 0
	for n, d := range b.docs {
		e, err := b.read(d, b.path)
		if err != nil {
			return nil, err
		}

		messages, err := b.messages(d, e)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", d.in(b.path), err)
		}

		item := &Item{Number: n, Group: e.group}
		if err := b.ask(item, e, messages); err != nil {
			return nil, fmt.Errorf("%s: %w", d.in(b.path), err)
		}
		if o := e.options(); o != nil && (e.gold < 0 || e.gold >= len(o)) {
			outside++
		}
		b.task.Items = append(b.task.Items, item)
	}

	if outside > 0 {
		b.task.Notes = append(b.task.Notes, fmt.Sprintf("%s: the labels of %d of %d items name none of their "+
			"choices, so all answers to these items count as wrong", b.path, outside, len(b.docs)))
	}
	if b.own {
		b.task.Notes = append(b.task.Notes, fmt.Sprintf("%s: the few-shot examples are other items of the "+
			"same file; for most tasks, lm-eval uses the training split instead", b.path))
	}
	return b.task, nil
}

// A message is a part of a prompt. The delimiter follows it unless the prompt is a conversation.
type message struct{ role, content, delimiter string }

// messages returns the part of a prompt before the question of an item: instructions and examples.
func (b *builder) messages(d *document, e example) (messages []message, err error) {
	if e.description != "" {
		messages = append(messages, message{"system", e.description, ""})
	}

	examples, err := b.draw(d, e)
	for _, s := range examples {
		if o := s.options(); o != nil && (s.gold < 0 || s.gold >= len(o)) {
			return nil, fmt.Errorf("the example in %s has a label that names none of its choices: remove "+
				"the %s", s.in(s.path), s.unit())
		}
		if answer := s.answer(); answer != "" {
			messages = append(messages, message{"user", s.prompt(), " "}, message{"assistant", answer, "\n\n"})
		} else {
			messages = append(messages, message{"user", s.prompt(), ""})
		}
	}
	return messages, err
}

// draw returns the examples for an item.
func (b *builder) draw(d *document, e example) ([]shot, error) {
	n := b.task.FewShot
	if n == 0 {
		return nil, nil
	}

	pool := b.shots
	if e.group != "" {
		pool = slices.DeleteFunc(slices.Clone(pool), func(s shot) bool { return s.group != e.group })
	}
	others := func() []shot {
		return slices.DeleteFunc(slices.Clone(pool), func(s shot) bool { return s.canonical == d.canonical })
	}

	if b.format.firstN {
		if b.own {
			pool = others()
		}
		if len(pool) < n {
			return nil, tooFew(len(pool), n, e.group)
		}
		return pool[:n], nil
	}

	if !b.format.excludes && !b.own {
		if len(pool) < n {
			return nil, tooFew(len(pool), n, e.group)
		}
		return pick(pool, b.rnd.sample(len(pool), n)), nil
	}

	// One more example replaces the item itself if it is drawn.
	if len(pool) < n+1 {
		return nil, tooFew(len(pool), n+1, e.group)
	}
	drawn := slices.DeleteFunc(pick(pool, b.rnd.sample(len(pool), n+1)), func(s shot) bool {
		return s.canonical == d.canonical
	})
	if len(drawn) < n {
		if pool = others(); len(pool) < n {
			return nil, tooFew(len(pool), n, e.group)
		}
		drawn = pick(pool, b.rnd.sample(len(pool), n))
	}
	return drawn[:n], nil
}

// pick returns the shots with the given indices.
func pick(pool []shot, indices []int) []shot {
	drawn := make([]shot, len(indices))
	for i, at := range indices {
		drawn[i] = pool[at]
	}
	return drawn
}

// tooFew returns the error for a file with too few examples.
func tooFew(have, want int, group string) error {
	if group != "" {
		group = " of the subject " + group
	}
	return fmt.Errorf("there are %d examples%s to draw from, want at least %d: give a larger file of examples, "+
		"or fewer few-shot examples", have, group, want)
}

// render returns a prompt that ends with a question.
func (b *builder) render(messages []message, question string) (string, error) {
	messages = append(slices.Clip(messages), message{"user", question, ""})
	if b.chat == nil {
		var text strings.Builder
		for _, m := range messages {
			text.WriteString(m.content + m.delimiter)
		}
		return text.String(), nil
	}

	turns := make([]chat.Message, len(messages))
	for i, m := range messages {
		turns[i] = chat.Message{Role: m.role, Content: m.content}
	}
	text, err := b.chat(turns)
	if err != nil && turns[0].Role == "system" {
		text, err = b.chat(turns[1:]) // some templates refuse a system message
	}
	return text, err
}

// ask adds the requests of an item, and the function that grades the responses.
func (b *builder) ask(item *Item, e example, messages []message) error {
	// A conversation already separates the answer from the question.
	delimiter := " "
	if b.chat != nil {
		delimiter = ""
	}

	if e.contexts != nil {
		for _, c := range e.contexts {
			context, err := b.render(messages, c)
			if err != nil {
				return err
			}
			item.Requests = append(item.Requests, Request{Kind: LogLikelihood, Context: context,
				Continuation: delimiter + e.target})
		}
		item.gold, item.grade = e.gold, gradeChoices(e, b.format.metrics)
		return nil
	}

	if e.source != "" || b.format.metrics[0] == byWord {
		item.Requests = []Request{{Kind: Rolling, Continuation: e.target}}
		item.grade = gradeText(e)
		return nil
	}

	context, err := b.render(messages, e.question)
	switch {
	case err != nil:
		return err
	case b.format.until != nil:
		item.Requests = []Request{{Kind: Generation, Context: context, Until: b.format.until}}
		item.gold, item.grade = e.target, gradeNumbers(e)
	case e.choices == nil:
		item.Requests = []Request{{Kind: LogLikelihood, Context: context, Continuation: e.target}}
		item.gold, item.grade = e.target, gradeWord
	default:
		for _, c := range e.choices {
			item.Requests = append(item.Requests, Request{Kind: LogLikelihood, Context: context,
				Continuation: delimiter + c})
		}
		item.gold, item.grade = e.gold, gradeChoices(e, b.format.metrics)
	}
	return nil
}
