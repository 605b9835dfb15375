package tasks

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"

	"github.com/kasmina-go/kasmina/internal/regular"
)

// maxLog limits the bytes of a log of answers.
const maxLog = 1 << 32

// An answerLog is a JSON Lines file with the answers to items. The first line identifies the model and the
// tasks, and every further line has the responses for one item.
type answerLog struct{ file *os.File }

// logHeader is the first line of a log.
type logHeader struct {
	Evaluation string `json:"evaluation"` // fingerprint
}

// logLine holds the answers to an item.
type logLine struct {
	Task       string             `json:"task"`
	Item       int                `json:"item"`
	Subject    string             `json:"subject,omitempty"`
	Gold       any                `json:"gold"`
	Prediction any                `json:"prediction"`
	Metrics    map[string]float64 `json:"metrics"`
	Responses  []Response         `json:"responses"`
}

// openAnswerLog opens or creates a log, and fills in the answers that it has.
func openAnswerLog(path, fingerprint string, tasks []*Task, answers [][][]Response) (l *answerLog, err error) {
	file, size, err := regular.Append(path)
	if err != nil {
		return nil, err
	}
	l = &answerLog{file}
	defer func() {
		if err != nil {
			err = errors.Join(err, file.Close())
		}
	}()

	if size > maxLog {
		return nil, fmt.Errorf("%s has %d bytes, want at most %d", path, size, maxLog)
	}
	text, err := io.ReadAll(io.NewSectionReader(file, 0, size))
	if err != nil {
		return nil, err
	}

	// A process that was killed may have left a part of a line.
	whole := bytes.LastIndexByte(text, '\n') + 1
	if whole < len(text) {
		if err := file.Truncate(int64(whole)); err != nil {
			return nil, err
		}
	}

	first, rest, _ := bytes.Cut(text[:whole], []byte("\n"))
	if whole == 0 {
		return l, l.writeLines(logHeader{fingerprint})
	}
	var header logHeader
	if err := json.Unmarshal(first, &header); err != nil || header.Evaluation == "" {
		return nil, fmt.Errorf("%s is no log of an evaluation: move it away, or choose another name for the "+
			"results", path)
	}
	if header.Evaluation != fingerprint {
		return nil, fmt.Errorf("%s has the answers of another model, to other tasks or with other options: move it "+
			"away, or choose another name for the results", path)
	}

	line := 1
	for row := range bytes.Lines(rest) {
		line++
		if err := restore(row, tasks, answers); err != nil {
			return nil, fmt.Errorf("%s:%d: %w; remove the line", path, line, err)
		}
	}
	return l, nil
}

// restore fills in the answers of a line.
func restore(row []byte, tasks []*Task, answers [][][]Response) error {
	var l logLine
	if err := json.Unmarshal(row, &l); err != nil {
		return err
	}

	t := slices.IndexFunc(tasks, func(t *Task) bool { return t.Name == l.Task })
	if t < 0 || l.Item < 0 || l.Item >= len(tasks[t].Items) ||
		len(l.Responses) != len(tasks[t].Items[l.Item].Requests) {
		return fmt.Errorf("the tasks have no item %d of %.40q with %d requests", l.Item, l.Task, len(l.Responses))
	}
	answers[t][l.Item] = l.Responses
	return nil
}

// write appends the answers to items.
func (l *answerLog) write(t *Task, items []int, answers [][]Response) error {
	lines := make([]any, len(items))
	for i, n := range items {
		item := t.Items[n]
		v := item.grade(answers[i])
		line := logLine{Task: t.Name, Item: item.Number, Subject: item.Group, Gold: item.gold,
			Prediction: v.prediction, Metrics: map[string]float64{}, Responses: answers[i]}
		for k, m := range t.Metrics {
			if x := v.values[k].x; !math.IsNaN(x) && !math.IsInf(x, 0) {
				line.Metrics[m.Key()] = x
			}
		}
		lines[i] = line
	}
	return l.writeLines(lines...)
}

// writeLines appends lines with a single write, so that after a crash, at most the last line is incomplete.
func (l *answerLog) writeLines(lines ...any) error {
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetEscapeHTML(false)
	for _, line := range lines {
		if err := e.Encode(line); err != nil {
			return fmt.Errorf("writing %s: %w", l.file.Name(), err)
		}
	}
	_, err := l.file.Write(text.Bytes())
	return err
}

// Close closes the file.
func (l *answerLog) Close() error { return l.file.Close() }
