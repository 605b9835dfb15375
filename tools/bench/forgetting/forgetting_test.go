package forgetting

import (
	"bytes"
	"encoding/json"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFrontier checks that a frontier drops points that others beat, and that it interpolates between the rest.
func TestFrontier(t *testing.T) {
	f := newFrontier([]point{{0, 2, 0}, {10, 1.5, 0.4}, {20, 1.6, 0.5}, {10, 1.8, 0.1}, {20, 1.4, 0.9}})
	require.Equal(t, frontier{{0, 2, 0}, {10, 1.8, 0.1}, {10, 1.5, 0.4}, {20, 1.4, 0.9}}, f)
	require.Zero(t, f.at(2))
	require.InDelta(t, 0.05, f.at(1.9), 1e-9)
	require.InDelta(t, 0.25, f.at(1.65), 1e-9)
	require.InDelta(t, 0.9, f.at(1.4), 1e-9)
	require.True(t, math.IsNaN(f.at(1.39)))
}

// TestSummarize checks the comparison with LoRA, and that a method of tuning that does not reach a loss has no ratio.
func TestSummarize(t *testing.T) {
	run := func(name string, seed uint64, points ...point) record {
		return record{Arm: name, Seed: seed, Params: 7, Base: point{0, 2, 1}, Points: points}
	}
	all := summarize([]record{
		run("LoRA r4", 1, point{10, 1, 2}), run("LoRA r16", 2, point{10, 1, 3}),
		run("growing", 1, point{10, 1.2, 1.4}), run("growing", 2, point{10, 1, 2}),
	})
	require.Len(t, all, 3)
	growing := all[2]
	require.Equal(t, "growing", growing.Arm)
	require.InDelta(t, 1.1, growing.Best, 1e-9)
	require.InDelta(t, 0.7, growing.Rise, 1e-9)
	require.InDelta(t, 0.5, *growing.Ratios[0][0], 1e-9)
	require.InDelta(t, 0.5, *growing.Ratios[0][1], 1e-9)
	require.InDelta(t, 0.5, *growing.Ratios[0][2], 1e-9)
	require.Nil(t, growing.Ratios[2][0])
	require.InDelta(t, 1, *all[0].Ratios[2][0], 1e-9)
}

// TestRun checks that the command makes the missing runs only, draws a picture, and ends with a JSON object.
func TestRun(t *testing.T) {
	large := config
	t.Cleanup(func() { config = large })
	config.Dim, config.Layers, config.Heads, config.Seq = 32, 2, 2, 32

	out := t.TempDir()
	args := []string{"-out", out, "-seeds", "1", "-base-steps", "2", "-steps", "2", "-every", "2", "-arms", "chunk",
		"-at-once", "2"}
	var stdout, stderr bytes.Buffer
	require.NoError(t, Run(t.Context(), args, &stdout, &stderr))
	records, err := readRecords(filepath.Join(out, "runs.jsonl"))
	require.NoError(t, err)
	require.Len(t, records, 3)
	for _, r := range records {
		require.Len(t, r.Points, 2, r.Arm)
		require.NotEqual(t, r.Base.New, r.Points[1].New, r.Arm)
		require.Positive(t, r.Params)
	}
	require.FileExists(t, filepath.Join(out, "forgetting.png"))
	lines := strings.Split(strings.TrimSpace(stdout.String()), "\n")
	var result struct{ Runs int }
	require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &result))
	require.Equal(t, 3, result.Runs)

	// A killed process leaves an incomplete line. The run is made again, and no other.
	path := filepath.Join(out, "runs.jsonl")
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	last := bytes.LastIndexByte(bytes.TrimSpace(text), '\n') + 1
	require.NoError(t, os.WriteFile(path, text[:last+20], 0o666))
	stderr.Reset()
	require.NoError(t, Run(t.Context(), args, &stdout, &stderr))
	require.Equal(t, 1, strings.Count(stderr.String(), "seed 1  "))
	again, err := readRecords(path)
	require.NoError(t, err)
	same := slices.IndexFunc(records, func(r record) bool { return r.Rate == again[len(again)-1].Rate })
	require.Equal(t, records[same].Points, again[len(again)-1].Points)
	require.Len(t, again, 3)

	require.ErrorContains(t, Run(t.Context(), []string{"-steps", "0"}, &stdout, &stderr), "must be at least 1")
	require.ErrorContains(t, Run(t.Context(), []string{"-seeds", "1,x"}, &stdout, &stderr), "want positive numbers")
}

// letters is a text that repeats one letter.
type letters struct{ len, letter int }

func (l letters) Len() int64          { return int64(l.len) }
func (l letters) Tokenizer() string   { return "bytes" }
func (l letters) VocabSize() int      { return 256 }
func (l letters) Fingerprint() string { return string(rune(l.letter)) }

func (l letters) ReadTokens(dst []int, offset int64) error {
	for i := range dst {
		if offset+int64(i) >= l.Len() {
			return io.ErrUnexpectedEOF
		}
		dst[i] = l.letter
	}
	return nil
}

// TestMixture checks that a mixture is read across its seam, and that a tenth of it is the old text.
func TestMixture(t *testing.T) {
	m := mixture{letters{90, 'n'}, letters{50, 'o'}}
	require.EqualValues(t, 100, m.Len())
	for _, c := range []struct {
		offset int64
		want   string
	}{{0, "nnnn"}, {86, "nnnn"}, {88, "nnoo"}, {90, "oooo"}, {96, "oooo"}} {
		ids := make([]int, 4)
		require.NoError(t, m.ReadTokens(ids, c.offset))
		got := ""
		for _, id := range ids {
			got += string(rune(id))
		}
		require.Equal(t, c.want, got, c.offset)
	}
}
