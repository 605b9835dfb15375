package chatdata

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"

	"github.com/kasmina-go/kasmina/internal/parquetjson"
)

// ReadFile yields the examples of a file of JSON Lines, like [Read], or of a parquet file, like [ReadParquet]. It
// recognizes parquet files by their contents.
//
// Unless progress is nil, it is called with the number of bytes that have been read, and the size of the file. Columns of
// a parquet file that are not needed are not read.
func ReadFile(path string, progress func(done, size int64)) iter.Seq2[Example, error] {
	return func(yield func(Example, error) bool) {
		file, err := os.Open(path)
		if err != nil {
			yield(Example{}, err)
			return
		}
		defer file.Close()

		info, err := file.Stat()
		if err == nil && info.IsDir() {
			err = fmt.Errorf("%s is a folder: name a file of JSON Lines or a parquet file", path)
		}
		if err != nil {
			yield(Example{}, err)
			return
		}

		counted := &countingFile{File: file, size: info.Size(), progress: progress}
		examples := Read(counted, path)
		if parquetjson.Is(file) {
			examples = ReadParquet(counted, info.Size(), path)
		}
		examples(yield)
	}
}

// A countingFile counts the bytes that are read.
type countingFile struct {
	*os.File
	done, size int64
	progress   func(done, size int64)
}

func (f *countingFile) Read(p []byte) (int, error) {
	n, err := f.File.Read(p)
	f.count(n)
	return n, err
}

// ReadAt implements io.ReaderAt.
func (f *countingFile) ReadAt(p []byte, at int64) (int, error) {
	n, err := f.File.ReadAt(p, at)
	f.count(n)
	return n, err
}

func (f *countingFile) count(n int) {
	f.done += int64(n)
	if f.progress != nil {
		f.progress(min(f.done, f.size), f.size) // some parts of a parquet file may be read twice
	}
}

// exampleColumns are the columns of a parquet file that examples consist of.
var exampleColumns = []string{"messages", "prompt", "completion", "text", "chosen", "rejected", "tools",
	"chat_template_kwargs"}

// ReadParquet yields the examples of a parquet file with size bytes. Its columns are the members of the objects that a
// file of JSON Lines has: for example, messages is a list of structs with the fields role and content. A null means
// that the row, or the message, does not have the member. Columns that are not part of any format are not read.
//
// A row that is not a valid example yields a *[Problem], and reading continues with the next row. If the file does not
// have the columns of any format, ReadParquet yields a single *[Problem]. Any other error ends the sequence. Problems
// refer to the file by name.
func ReadParquet(r io.ReaderAt, size int64, name string) iter.Seq2[Example, error] {
	return func(yield func(Example, error) bool) {
		file, err := parquetjson.Open(r, size)
		if err != nil {
			yield(Example{}, fmt.Errorf("chatdata: reading %s: %w", name, err))
			return
		}

		x := Example{File: name, Parquet: true}
		members := map[string]json.RawMessage{}
		for _, column := range file.Columns() {
			members[column] = nil
		}
		if formatOf(members) == 0 {
			yield(Example{}, x.unknown(members))
			return
		}

		for row, err := range file.Rows(exampleColumns...) {
			x.Line++
			example := x
			var unfit *parquetjson.RowError
			switch {
			case errors.As(err, &unfit):
				err = x.problem("change the column, for example to strings", "%v", unfit)
			case err != nil:
				yield(Example{}, fmt.Errorf("chatdata: reading row %d of %s: %w", x.Line, name, err))
				return
			default:
				if p := example.parse(row); p != nil {
					err = p
				}
			}
			if err != nil {
				example = Example{}
			}
			if !yield(example, err) {
				return
			}
		}
	}
}
