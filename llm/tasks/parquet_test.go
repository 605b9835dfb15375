package tasks

import (
	"bytes"
	"testing"

	"github.com/parquet-go/parquet-go"
	"github.com/stretchr/testify/require"
)

//go:generate python3 testdata/parquet.py

// TestParquet checks that parquet files have the items of the JSON Lines files from which they were made.
func TestParquet(t *testing.T) {
	for _, name := range []string{"arc", "mmlu", "boolq", "gsm8k"} {
		want, err := Open("testdata/"+name+".jsonl", Options{})
		require.NoError(t, err)
		have, err := Open("testdata/"+name+".parquet", Options{})
		require.NoError(t, err)
		require.Equal(t, want[0].digest(), have[0].digest())
		require.Len(t, have[0].Items, len(want[0].Items))
		for i, item := range want[0].Items {
			require.Equal(t, item.gold, have[0].Items[i].gold)
		}
	}

	var file bytes.Buffer
	type row struct {
		Goal  string `parquet:"goal"`
		Sol1  string `parquet:"sol1"`
		Sol2  string `parquet:"sol2"`
		Label *int   `parquet:"label"`
	}
	zero := 0
	require.NoError(t, parquet.Write(&file, []row{{"a", "b", "c", &zero}, {"a", "b", "c", nil}}))
	_, err := Open(write(t, "file.parquet", file.String()), Options{})
	require.ErrorContains(t, err, `file.parquet, row 2: "label" is missing: the item has no answer`)
	_, err = Open(write(t, "file.parquet", file.String()[:file.Len()-9]), Options{})
	require.ErrorContains(t, err, "file.parquet: it is not a complete parquet file")

	file.Reset()
	require.NoError(t, parquet.Write(&file, []row{}))
	_, err = Open(write(t, "file.parquet", file.String()), Options{})
	require.ErrorContains(t, err, "has no items")
}
