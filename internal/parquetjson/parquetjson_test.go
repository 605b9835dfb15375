package parquetjson_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/parquet-go/parquet-go"
	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/parquetjson"
)

// TestRepeatedFields reads columns in forms that old programs write: repeated columns without lists, and required ones.
func TestRepeatedFields(t *testing.T) {
	type part struct {
		Name  string
		Words []string
		Size  *int32
	}
	type row struct {
		Parts []part
		Tags  map[int32]string
		Flag  bool
		Level uint8
	}
	two := int32(2)
	var file bytes.Buffer
	require.NoError(t, parquet.Write(&file, []row{
		{Parts: []part{{"a", []string{"x", "y"}, nil}, {"b", nil, &two}}, Tags: map[int32]string{3: "c"}, Flag: true, Level: 250},
		{},
		{Parts: []part{{"", []string{""}, nil}}},
	}))

	f, err := parquetjson.Open(bytes.NewReader(file.Bytes()), int64(file.Len()))
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"Parts", "Tags", "Flag", "Level"}, f.Columns())
	var rows []string
	for r, err := range f.Rows(f.Columns()...) {
		require.NoError(t, err)
		text, err := json.Marshal(r)
		require.NoError(t, err)
		rows = append(rows, string(text))
	}
	require.Equal(t, []string{
		`{"Flag":true,"Level":250,"Parts":[{"Name":"a","Words":["x","y"]},{"Name":"b","Words":[],"Size":2}],"Tags":{"3":"c"}}`,
		`{"Flag":false,"Level":0,"Parts":[],"Tags":{}}`,
		`{"Flag":false,"Level":0,"Parts":[{"Name":"","Words":[""]}],"Tags":{}}`}, rows)
}

// countingReader counts the bytes that are read.
type countingReader struct {
	*bytes.Reader
	n int
}

func (c *countingReader) ReadAt(p []byte, at int64) (int, error) {
	n, err := c.Reader.ReadAt(p, at)
	c.n += n
	return n, err
}

// TestRowsReadsOnDemand checks that the first rows of a long file are there before the others have been read, and that
// columns that are not asked for are not read.
func TestRowsReadsOnDemand(t *testing.T) {
	type row struct{ Text, Other string }
	var file bytes.Buffer
	w := parquet.NewGenericWriter[row](&file, parquet.PageBufferSize(1<<12), parquet.MaxRowsPerRowGroup(500))
	for i := range 2000 {
		_, err := w.Write([]row{{fmt.Sprint(i, strings.Repeat(" text", 100)), fmt.Sprint(i, strings.Repeat("other ", 1000))}})
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())

	r := &countingReader{Reader: bytes.NewReader(file.Bytes())}
	f, err := parquetjson.Open(r, int64(file.Len()))
	require.NoError(t, err)
	first, rows := 0, 0
	for row, err := range f.Rows("Text", "Nothing") {
		require.NoError(t, err)
		require.True(t, strings.HasPrefix(string(row["Text"]), fmt.Sprintf(`"%d text`, rows)))
		require.Len(t, row, 1)
		if rows++; rows == 1 {
			first = r.n
		}
	}
	require.Equal(t, 2000, rows)
	require.Less(t, first, 200<<10)
	require.Less(t, r.n, 2<<20) // the column Text has a megabyte, and Other twelve
	require.Greater(t, file.Len(), 12<<20)
}
