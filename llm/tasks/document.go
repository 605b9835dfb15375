package tasks

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/kasmina-go/kasmina/internal/parquetjson"
	"github.com/kasmina-go/kasmina/internal/regular"
)

const (
	// maxFile limits the bytes of a task's file, because all of its items are held in memory.
	maxFile = 1 << 30
	// maxItems limits the number of items of a task.
	maxItems = 1 << 22
)

// A document is one line of a JSON Lines file, or one row of a parquet file. Its methods read fields; the first failure is
// kept in err.
type document struct {
	line      int
	parquet   bool // whether line is the number of a row
	fields    map[string]any
	canonical string // equal for equal documents
	err       error
}

// unit returns what holds the document: a line or a row.
func (d *document) unit() string {
	if d.parquet {
		return "row"
	}
	return "line"
}

// in returns the location of the document in its file.
func (d *document) in(path string) string {
	if d.parquet {
		return fmt.Sprintf("%s, row %d", path, d.line)
	}
	return fmt.Sprintf("%s:%d", path, d.line)
}

// readDocuments reads a JSON Lines file, without its empty lines, or a parquet file.
func readDocuments(path string) (docs []*document, err error) {
	for d, err := range documents(path) {
		if err != nil {
			return nil, err
		}
		canonical, err := json.Marshal(d.fields) // sorts the keys
		if err != nil {
			return nil, fmt.Errorf("%s: %w", d.in(path), err)
		}
		d.canonical = string(canonical)
		if docs = append(docs, d); len(docs) > maxItems {
			return nil, fmt.Errorf("%s has more than %d items", path, maxItems)
		}
	}

	if len(docs) == 0 {
		return nil, fmt.Errorf("%s has no items", path)
	}
	return docs, nil
}

// documents yields the documents of a file. An error ends them.
func documents(path string) iter.Seq2[*document, error] {
	return func(yield func(*document, error) bool) {
		file, size, err := regular.Open(path)
		if err != nil {
			yield(nil, err)
			return
		}
		defer file.Close()

		if parquetjson.Is(file) {
			readRows(file, size, path, yield)
			return
		}
		text, err := regular.Read(path, maxFile, "a task's file has")
		if err != nil {
			yield(nil, err)
			return
		}
		readLines(text, path, yield)
	}
}

// readLines yields the documents of a JSON Lines file.
func readLines(text []byte, path string, yield func(*document, error) bool) {
	line := 0
	for row := range bytes.Lines(text) {
		line++
		row = bytes.TrimSpace(row)
		if line == 1 {
			row = bytes.TrimPrefix(row, []byte("\ufeff"))
		}
		if len(row) == 0 {
			continue
		}

		d := &document{line: line}
		err := json.Unmarshal(row, &d.fields)
		switch {
		case row[0] == '[':
			err = fmt.Errorf("%s: want one JSON object per line, and this is an array", d.in(path))
		case err != nil:
			err = fmt.Errorf("%s: want one JSON object per line: %w", d.in(path), err)
		case d.fields == nil:
			err = fmt.Errorf("%s: null, want a JSON object", d.in(path))
		}
		if !yield(d, err) || err != nil {
			return
		}
	}
}

// readRows yields the documents of a parquet file.
func readRows(file *os.File, size int64, path string, yield func(*document, error) bool) {
	table, err := parquetjson.Open(file, size)
	if err != nil {
		yield(nil, fmt.Errorf("%s: %w", path, err))
		return
	}

	row := 0
	for members, err := range table.Rows(table.Columns()...) {
		row++
		d := &document{line: row, parquet: true, fields: map[string]any{}}
		for name, value := range members {
			var x any
			if err == nil {
				err = json.Unmarshal(value, &x)
			}
			d.fields[name] = x
		}
		if errors.As(err, new(*parquetjson.RowError)) {
			err = fmt.Errorf("%w: remove the column, or change it, for example to strings", err)
		}
		if err != nil {
			err = fmt.Errorf("%s: %w", d.in(path), err)
		}
		if !yield(d, err) || err != nil {
			return
		}
	}
}

// fail records an error about a field, unless there is an earlier one.
func (d *document) fail(field, format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf("%q "+format, append([]any{field}, args...)...)
	}
}

func (d *document) has(field string) bool { return d.fields[field] != nil }

// text returns a field that is a string.
func (d *document) text(field string) string {
	s, ok := d.fields[field].(string)
	if !ok {
		d.fail(field, "is %s, want a string", described(d.fields[field]))
	}
	return s
}

// texts returns a field that is a list of strings.
func (d *document) texts(field string) []string {
	list, ok := d.fields[field].([]any)
	if !ok {
		d.fail(field, "is %s, want a list of strings", described(d.fields[field]))
		return nil
	}
	all, err := stringsOf(list)
	if err != nil {
		d.fail(field, "%w", err)
	}
	return all
}

// label returns a field that is the number of a choice, from 0. It may be a number, a string of digits, or
// a truth value.
func (d *document) label(field string) int {
	switch x := d.fields[field].(type) {
	case float64:
		if n := int(x); float64(n) == x {
			return n
		}
	case bool:
		if x {
			return 1
		}
		return 0
	case string:
		if n, err := strconv.Atoi(strip(x)); err == nil {
			return n
		}
		if strip(x) == "" {
			d.fail(field, "is empty: the item has no answer, so it cannot be graded; use a split with "+
				"answers")
			return 0
		}
	case nil:
		d.fail(field, "is missing: the item has no answer, so it cannot be graded; use a split with answers")
		return 0
	}

	d.fail(field, "is %s, want the number of a choice", described(d.fields[field]))
	return 0
}

// object returns a field that is an object. Check the err of the returned document, too.
func (d *document) object(field string) *document {
	fields, ok := d.fields[field].(map[string]any)
	if !ok {
		d.fail(field, "is %s, want an object", described(d.fields[field]))
	}
	return &document{line: d.line, parquet: d.parquet, fields: fields}
}

// stringsOf returns the elements of a list, which must all be strings.
func stringsOf(list []any) ([]string, error) {
	all := make([]string, len(list))
	for i, x := range list {
		s, ok := x.(string)
		if !ok {
			return nil, fmt.Errorf("has %s at position %d, want strings only", described(x), i+1)
		}
		all[i] = s
	}

	if len(all) == 0 {
		return nil, errors.New("is empty")
	}
	return all, nil
}

// described names a JSON value for error messages.
func described(x any) string {
	switch x := x.(type) {
	case nil:
		return "missing"
	case string:
		return fmt.Sprintf("the string %.40q", x)
	case float64:
		return strconv.FormatFloat(x, 'g', -1, 64)
	case bool:
		return strconv.FormatBool(x)
	case []any:
		return "a list"
	}
	return "an object"
}

// names returns the fields of a document for error messages.
func (d *document) names() string {
	return quoted(slices.Sorted(maps.Keys(d.fields)))
}

// quoted returns a list of names in quotation marks.
func quoted(names []string) string {
	all := make([]string, len(names))
	for i, name := range names {
		all[i] = strconv.Quote(name)
	}
	return strings.Join(all, ", ")
}
