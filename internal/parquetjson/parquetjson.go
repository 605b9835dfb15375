// Package parquetjson reads the rows of parquet files as JSON objects.
//
// Lists and maps of parquet become lists and objects. Fields of nested objects that are null are left out, because
// tables have all fields in every row, whether an object had them or not. Null elements of lists are kept. Columns
// with the type JSON contain JSON and are read as such.
package parquetjson

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"

	"github.com/parquet-go/parquet-go"
)

// Magic is the start of every parquet file.
const Magic = "PAR1"

// Is reports whether a file is a parquet file, by its start.
func Is(r io.ReaderAt) bool {
	start := make([]byte, len(Magic))
	n, _ := r.ReadAt(start, 0)
	return string(start[:n]) == Magic
}

// readBuffer is the number of bytes of a column that are read at once.
const readBuffer = 64 << 10

// A File is an open parquet file. It is not safe for concurrent use.
type File struct {
	file    *parquet.File
	columns []*node // without columns that have no values
}

// A RowError reports a value that has no form in JSON.
type RowError struct {
	Column string // the name of the column, such as messages.content
	What   string // a description of the value, which continues a sentence that starts with the column
}

func (e *RowError) Error() string { return fmt.Sprintf("the column %q %s", e.Column, e.What) }

// errDamaged reports a file whose columns do not fit together.
var errDamaged = errors.New("the file is damaged: its columns do not have the numbers of values that they should")

// Open reads the description of a file, but none of its rows. size is the number of bytes of the file.
func Open(r io.ReaderAt, size int64) (f *File, err error) {
	defer recoverDamage(&err)
	file, err := parquet.OpenFile(r, size, &parquet.FileConfig{SkipPageIndex: true, SkipBloomFilters: true,
		ReadBufferSize: readBuffer})
	if err != nil {
		return nil, fmt.Errorf("it is not a complete parquet file: %w", err)
	}

	f = &File{file: file}
	for _, c := range file.Root().Columns() {
		if n := newNode(c, c.Name()); n.first != nil {
			f.columns = append(f.columns, n)
		}
	}
	return f, nil
}

// recoverDamage turns a panic into an error. Package parquet checks most of what it reads, but not everything.
func recoverDamage(err *error) {
	if r := recover(); r != nil {
		*err = fmt.Errorf("the file is damaged: %v", r)
	}
}

// Columns returns the names of the columns.
func (f *File) Columns() []string {
	names := make([]string, len(f.columns))
	for i, n := range f.columns {
		names[i] = n.name
	}
	return names
}

// Rows yields the given columns of every row, without those that are null. It reads no other columns, and holds only
// a part of each column in memory. Names of columns that do not exist are ignored.
//
// If a value has no form in JSON, the error is a *[RowError], and Rows continues with the next row. Any other error
// ends the sequence.
func (f *File) Rows(columns ...string) iter.Seq2[map[string]json.RawMessage, error] {
	var all []*node
	for _, n := range f.columns {
		if slices.Contains(columns, n.name) {
			all = append(all, n)
		}
	}

	return func(yield func(map[string]json.RawMessage, error) bool) {
		for _, g := range f.file.RowGroups() {
			r := &groupReader{columns: all}
			more, err := r.read(g, yield)
			stopped := !more && err == nil
			if err = errors.Join(err, r.close()); stopped {
				return // yield must not be called again
			}
			if err != nil {
				yield(nil, err)
				return
			}
		}
	}
}

// A groupReader reads the rows of a row group.
type groupReader struct {
	columns []*node
	leaves  []*leaf
}

// read yields the rows of a row group. It returns false if yield does.
func (r *groupReader) read(g parquet.RowGroup, yield func(map[string]json.RawMessage, error) bool) (more bool,
	err error) {
	if err := r.open(g); err != nil {
		return false, err
	}

	for range g.NumRows() {
		row, err := r.row()
		var unfit *RowError
		if err != nil && !errors.As(err, &unfit) {
			return false, err
		}
		if !yield(row, err) {
			return false, nil
		}
	}

	return true, r.finished()
}

// open starts to read the columns of a row group.
func (r *groupReader) open(g parquet.RowGroup) (err error) {
	defer recoverDamage(&err)
	chunks := g.ColumnChunks()
	for _, n := range r.columns {
		n.eachLeaf(func(n *node) {
			n.leaf = &leaf{pages: chunks[n.column.Index()].Pages()}
			r.leaves = append(r.leaves, n.leaf)
		})
	}
	return nil
}

// row returns the next row.
func (r *groupReader) row() (row map[string]json.RawMessage, err error) {
	defer recoverDamage(&err)
	for _, l := range r.leaves {
		if err := l.nextRow(); err != nil {
			return nil, err
		}
	}

	row = make(map[string]json.RawMessage, len(r.columns))
	var unfit error
	for _, n := range r.columns {
		text, null, err := n.append(nil)
		switch {
		case errors.As(err, new(*RowError)):
			unfit = err
		case err != nil:
			return nil, err
		case !null:
			row[n.name] = text
		}
	}
	if unfit != nil {
		return nil, unfit
	}

	for _, l := range r.leaves {
		if l.at < len(l.row) {
			return nil, errDamaged
		}
	}
	return row, nil
}

// finished returns an error if there are values after the last row.
func (r *groupReader) finished() (err error) {
	defer recoverDamage(&err)
	for _, l := range r.leaves {
		if len(l.unread) > 0 {
			return errDamaged
		}
		if err := l.fill(); err != io.EOF {
			return errors.Join(err, errDamaged)
		}
	}
	return nil
}

func (r *groupReader) close() (err error) {
	for _, l := range r.leaves {
		err = errors.Join(err, l.pages.Close())
	}
	return err
}

// A leaf reads the values of a column without fields.
type leaf struct {
	pages  parquet.Pages
	page   parquet.ValueReader // the rest of the current page, or nil before the next one
	buffer [128]parquet.Value
	unread []parquet.Value // the part of the buffer that belongs to later rows

	row []parquet.Value // the values of the current row
	at  int             // the number of values of the row that have been used
}

// nextRow reads the values of the next row. They may be divided among several pages.
func (l *leaf) nextRow() error {
	l.row, l.at = l.row[:0], 0
	for {
		if len(l.unread) == 0 {
			err := l.fill()
			switch {
			case err == io.EOF && len(l.row) > 0:
				return nil
			case err == io.EOF:
				return errDamaged
			case err != nil:
				return err
			}
		}

		n := 0
		for n < len(l.unread) && (l.unread[n].RepetitionLevel() > 0) == (len(l.row)+n > 0) {
			n++
		}
		l.row = append(l.row, l.unread[:n]...)
		if l.unread = l.unread[n:]; len(l.unread) > 0 {
			if len(l.row) == 0 {
				return errDamaged // the first value of a row repeats another one
			}
			return nil
		}
	}
}

// fill reads values into the empty buffer. Pages are not released, because values of the row may refer to them.
func (l *leaf) fill() error {
	for {
		if l.page == nil {
			page, err := l.pages.ReadPage()
			if err != nil {
				return err
			}
			l.page = page.Values()
		}

		n, err := l.page.ReadValues(l.buffer[:])
		switch {
		case err == io.EOF:
			l.page = nil
		case err != nil:
			return err
		case n == 0:
			return io.ErrNoProgress
		}
		if n > 0 {
			l.unread = l.buffer[:n]
			return nil
		}
	}
}

// peek returns the next value of the row.
func (l *leaf) peek() (parquet.Value, error) {
	if l.at >= len(l.row) {
		return parquet.Value{}, errDamaged
	}
	return l.row[l.at], nil
}
