package sample

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/cpu/sampling"
	"github.com/kasmina-go/kasmina/internal/cpu/sampling/samplingtest"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// TestEncode checks that Decode restores encoded rules.
func TestEncode(t *testing.T) {
	r := randtest.New(t)
	ids := []int64{5, 9}
	for range 2000 {
		want := samplingtest.Rule(r, 40)
		want.Pending = nil
		if r.IntN(2) == 0 {
			want.Pending = []int{9}
		}
		words := make([]int64, RuleWords)
		first := r.IntN(4)
		entries := make([]int64, first*EntryWords)
		for _, e := range want.Entries {
			entries = append(entries, make([]int64, EntryWords)...)
			EncodeEntry(entries[len(entries)-EntryWords:], e)
		}
		Encode(words, &want, first, 1)
		got, ok := Decode(words, entries, ids)
		require.True(t, ok)
		require.Equal(t, want, got)
	}
	words := make([]int64, RuleWords)
	None(words)
	_, ok := Decode(words, nil, nil)
	require.False(t, ok)
}

// TestBlocks checks that the blocks of a launch cover the vocabulary, fit on the GPU and in its shared memory.
func TestBlocks(t *testing.T) {
	for _, resident := range []int{16, 46, 132, 264, 1000} {
		for _, n := range []int{1, 7, 1024, 50257, 128256, 151936, 262144} {
			for rows := 1; rows <= 64; rows++ {
				a := Tokens{Rows: rows, N: n}
				blocks := a.blocks(resident)
				most := a.most(blocks)
				require.LessOrEqual(t, blocks, min(mostBlocks, max(resident, kernel.CeilDiv(n, mostElements))))
				require.GreaterOrEqual(t, blocks*most, n)
				require.LessOrEqual(t, most, mostElements)
			}
		}
	}
}

// drawn is a test of the kernel: logits and rules for several rows.
type drawn struct {
	n      int
	logits []float64
	rules  []sampling.Rule
}

// TestTokens compares the kernel with the CPU, for vocabularies of several models, random rules, ties, biases, and
// logits that are not finite. Some rows have no rule. Launches must leave the state zero.
func TestTokens(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, n := range []int{7, 1, 1000, 50257, 128256, 151936} {
		for _, dt := range kerneltest.StorageTypes {
			for _, rows := range []int{1, 3, 32, 64} {
				if rows > 3 && !g.Some() {
					continue
				}
				g.Scope(fmt.Sprintf("%d/%v/%d", n, dt, rows), func(g *kerneltest.Rig) {
					for range kerneltest.Few(4, 2) {
						compareTokens(g, randomRows(g, n, rows), dt)
					}
				})
			}
		}
	}
}

// randomRows returns random logits and rules.
func randomRows(g *kerneltest.Rig, n, rows int) drawn {
	d := drawn{n: n, logits: make([]float64, rows*n)}
	for row := range rows {
		rule := samplingtest.Rule(g.Rand, n)
		if len(rule.Pending) > 1 {
			rule.Pending = rule.Pending[:1]
		}
		d.rules = append(d.rules, rule)
		samplingtest.Logits(g.Rand, d.logits[row*n:][:n])
	}
	return d
}

// compareTokens runs the kernel twice and compares its tokens with the CPU's.
func compareTokens(g *kerneltest.Rig, d drawn, dt gpu.DType) {
	rows := len(d.rules)
	logits, rounded := g.Upload(d.logits, dt, 0)
	ids := make([]int, rows)
	words := make([]int64, rows*RuleWords)
	entries := make([]int64, EntryWords)
	var want []float64
	var drawer sampling.Drawer[float32]
	for row, rule := range d.rules {
		if len(rule.Pending) > 0 {
			ids[row] = rule.Pending[0]
		}
		if row%11 == 10 {
			None(words[row*RuleWords:][:RuleWords])
			want = append(want, -1)
			continue
		}
		Encode(words[row*RuleWords:][:RuleWords], &rule, len(entries)/EntryWords, row)
		for _, e := range rule.Entries {
			entries = append(entries, make([]int64, EntryWords)...)
			EncodeEntry(entries[len(entries)-EntryWords:], e)
		}
		x := make([]float32, d.n)
		for i := range x {
			x[i] = float32(rounded[row*d.n+i])
		}
		id, err := drawer.Draw(x, &rule)
		if err != nil {
			id = -1
		}
		want = append(want, float64(id))
	}

	ints := func(x []int64) []int {
		all := make([]int, len(x))
		for i, v := range x {
			all[i] = int(v)
		}
		return all
	}
	state := g.Alloc(StateBytes(rows)/4, kerneltest.F32, 0)
	g.Must(g.Ctx.Memset8(state.Ptr, 0, state.Bytes(), g.Stream))
	tokens := g.Alloc(2*rows, kerneltest.F32, 0)
	a := Tokens{Tokens: tokens.Ptr, Logits: logits.Ptr, IDs: g.UploadInts(ids), Rules: g.UploadInts(ints(words)),
		Entries: g.UploadInts(ints(entries)), State: state.Ptr, Rows: rows, N: d.n, Type: dt}
	for range 2 {
		g.Must(g.Ctx.Memset8(tokens.Ptr, 0xff, tokens.Bytes(), g.Stream)) // −1 is poison where a token is due
		g.Must(g.Launch(g.Stream, a))
		raw := make([]byte, tokens.Bytes())
		g.Must(g.Ctx.CopyToHost(raw, tokens.Ptr, g.Stream))
		g.Must(g.Ctx.SyncStream(g.Stream))
		for row, got := range gpu.View[int64](raw) {
			if float64(got) != want[row] {
				r := d.rules[row]
				r.Entries = nil
				g.Errorf("row %d of %d: token %d, want %v by %+v", row, rows, got, want[row], r)
			}
		}
	}

	left := make([]byte, state.Bytes())
	g.Must(g.Ctx.CopyToHost(left, state.Ptr, g.Stream))
	g.Must(g.Ctx.SyncStream(g.Stream))
	const size = 8 + 4*4 + mostBlocks*(8+4+4) + histograms*bins*(8+4)
	for i, b := range left {
		if at := i % size; b != 0 && (at < 24 || at >= 24+mostBlocks*16) {
			g.Fatalf("byte %d of the state of row %d is not zero after a launch", at, i/size)
		}
	}
}

// TestFeed checks that only the rows with a source receive a token.
func TestFeed(t *testing.T) {
	g := kerneltest.NewRig(t)
	ids, from, tokens := []int{4, 5, 6, 7, 8}, []int{-1, 2, 0, -1, 1}, []int{10, 11, -1}
	at := g.UploadInts(ids)
	g.Must(g.Launch(g.Stream, Feed{IDs: at, From: g.UploadInts(from), Tokens: g.UploadInts(tokens), Rows: 5}))
	raw := make([]byte, 40)
	g.Must(g.Ctx.CopyToHost(raw, at, g.Stream))
	g.Must(g.Ctx.SyncStream(g.Stream))
	require.Equal(t, []int64{4, 0, 10, 7, 11}, gpu.View[int64](raw))
}

// TestConstants checks that the constants match the source.
func TestConstants(t *testing.T) {
	kerneltest.MatchSource(t, "sample.cu", fmt.Sprintf("kThreads = %d,", threads),
		fmt.Sprintf("kBins = %d, kMostBlocks = %d, kHistograms = %d;", bins, mostBlocks, histograms),
		fmt.Sprintf("kRuleWords = %d, kEntryWords = %d;", RuleWords, EntryWords),
		"kLeast = -41, kBuckets = 16;", "0.0002187005903097338f", "0.001239498692757616f", "0.00968310128987789f",
		"0.05548165297234183f", "0.24023005134917472f", "0.6931469951055382f")
}
