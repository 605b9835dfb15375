package growth

import (
	"encoding/json"
	"flag"
	"fmt"
	"image/png"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
)

func textFolder(t *testing.T) string {
	t.Helper()
	r := rand.New(rand.NewPCG(1, 2))
	var text strings.Builder
	for range 4000 {
		text.WriteString([]string{"func ", "return ", "if err != nil {\n", "}\n",
			"x := y\n"}[r.IntN(5)])
	}

	dir := t.TempDir()
	for i := range 4 {
		path := filepath.Join(dir, fmt.Sprint(i, ".txt"))
		require.NoError(t, os.WriteFile(path, []byte(text.String()[i*4000:][:4000]), 0o666))
	}

	return dir
}

// tiny returns the options of very short runs.
func tiny(t *testing.T, out string, more ...string) []string {
	return append([]string{"-device", "cpu", "-data", textFolder(t), "-out", out, "-time",
		"600ms", "-dim", "16",
		"-heads", "2", "-seq", "8", "-batch", "2", "-epoch", "1", "-heldout", "256", "-lr",
		"0.01,0.02"}, more...)
}

type last struct {
	Seeds      []uint64   `json:"random_seeds"`
	Static     []float64  `json:"static_loss"`
	Grown      []float64  `json:"grown_loss"`
	Parameters int        `json:"static_params"`
	Become     int        `json:"grown_params"`
	Seconds    float64    `json:"seconds"`
	Steps      []int      `json:"grown_steps"`
	Share      []*float64 `json:"share_of_time_to_static_loss"`
}

func lastLine(t *testing.T, stdout string) (l last) {
	t.Helper()
	lines := strings.Split(strings.TrimSpace(stdout), "\n")
	require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &l))
	return l
}

// TestRun checks that the grown model has the blocks of the static one at the end, unless its growth was
// rolled back, and that all files exist. A run that replays the record must produce the same model.
func TestRun(t *testing.T) {
	out := t.TempDir()
	var stdout, stderr strings.Builder
	// a number of tokens instead of a time, because a busy machine might not grow the model in such a
	// short time
	require.NoError(t, Pairs(t.Context(), tiny(t, out, "-runs", "2", "-tokens", "4800"), &stdout,
		&stderr), &stderr)
	l := lastLine(t, stdout.String())
	require.Equal(t, []uint64{1, 2}, l.Seeds)
	growths := strings.Count(stderr.String(), "Stack of size 2, 2 blocks to 4")
	require.Equal(t, 2, growths)
	if !strings.Contains(stderr.String(), "taken back") {
		require.Equal(t, l.Parameters, l.Become)
	}

	require.Len(t, l.Share, 2)
	require.Positive(t, l.Seconds)
	for i := range 2 {
		require.Less(t, l.Static[i], math.Log(256))
		require.Less(t, l.Grown[i], math.Log(256))
		picture, err := os.Open(filepath.Join(out, fmt.Sprintf("growth-%d.png", i+1)))
		require.NoError(t, err)
		defer picture.Close()
		_, err = png.Decode(picture)
		require.NoError(t, err)
	}

	m, err := llm.LoadModel(t.Context(),
		filepath.Join(out, "static-2-"+fmt.Sprint(bestRate(t, out))+".safetensors"))
	require.NoError(t, err)
	require.Equal(t, 4, m.Config.Layers)

	again := t.TempDir()
	record := filepath.Join(out, "grown-1.record.jsonl")
	stdout.Reset()
	args := tiny(t, again, "-runs", "1", "-only", "grown", "-time", "1h", "-replay", record)
	best := fmt.Sprint(bestRate(t, out))
	require.NoError(t, Pairs(t.Context(), append(args, "-lr", best), &stdout, &stderr), &stderr)
	replayed := lastLine(t, stdout.String())
	require.Equal(t, l.Grown[0], replayed.Grown[0])
	require.Equal(t, l.Steps[0], replayed.Steps[0])
}

// TestSites checks that a model grows at every site, with every choice of places.
func TestSites(t *testing.T) {
	for site, where := range randtest.Sample(t, 1, map[string]string{"chunk": "", "weight": "random", "stream": "all",
		"depth,stream": ""}) {
		var stdout, stderr strings.Builder
		out := t.TempDir()
		require.NoError(t, Pairs(t.Context(), tiny(t, out, "-runs", "1", "-only", "grown", "-site",
			site, "-where", where, "-tokens", "1400", "-dim", "32", "-active", "4", "-features", "8", "-rank", "2"),
			&stdout, &stderr), &stderr)
		record, err := os.ReadFile(filepath.Join(out, "grown-1.record.jsonl"))
		require.NoError(t, err)
		require.Contains(t, string(record), `"action":"Germinate"`, where)
		require.Positive(t, lastLine(t, stdout.String()).Grown[0])
	}
}

// bestRate returns the learning rate of the first grown run according to its log.
func bestRate(t *testing.T, out string) float64 {
	t.Helper()
	for _, lr := range []float64{0.01, 0.02} {
		_, err := os.Stat(filepath.Join(out, fmt.Sprintf("static-2-%g.safetensors", lr)))
		if err == nil {
			return lr
		}
	}
	t.Fatal("no static run of the second random seed")
	return 0
}

func TestBadOptions(t *testing.T) {
	for want, args := range map[string][]string{
		"is not an option":          {"x"},
		"-runs is 0":                {"-runs", "0"},
		"-time is 0s":               {"-time", "0"},
		"-from is 4, want 1 to 3":   {"-from", "4"},
		"want a multiple of -from":  {"-from", "3"},
		"-kind is":                  {"-kind", "tall"},
		"-site is":                  {"-site", "depth,roof"},
		"-site chunk needs -tokens": {"-site", "chunk"},
		"Where is":                  {"-where", "here"},
		"-tokens and -flops":        {"-tokens", "9", "-flops", "9"},
		"-grown-share is 2":         {"-grown-share", "2"},
		"-evaluations is 0":         {"-evaluations", "0"},
		"-lr is":                    {"-lr", "0.1,x"},
		"-device is":                {"-device", "tpu"},
		"-only is":                  {"-only", "both"},
		"-only is static":           {"-only", "static", "-replay", "x"},
		"Begin is 0.6 and End is":   {"-begin", "0.6"},
		"flag provided but not de":  {"-fast"},
		"no such file or directory": {"-replay", "nothing.jsonl", "-only", "grown"},
	} {
		args = append(tiny(t, t.TempDir()), args...)
		require.ErrorContains(t, Pairs(t.Context(), args, io.Discard, io.Discard), want, args)
	}

	require.ErrorIs(t, Pairs(t.Context(), []string{"-h"}, io.Discard, io.Discard), flag.ErrHelp)
}
