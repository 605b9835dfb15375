package store

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/board/internal/boardtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/runlog"
	"github.com/kasmina-go/kasmina/state"
)

// replayed returns the run that a log of the events describes.
func replayed(t *testing.T, events []llm.Event) *Run {
	t.Helper()
	r := NewRun("0", "run", nil)
	for _, e := range events {
		for _, record := range runlog.Records(e) {
			line, err := json.Marshal(record)
			require.NoError(t, err)
			var l runlog.Record
			require.NoError(t, json.Unmarshal(line, &l))
			r.Read(l)
		}
	}
	return r
}

// TestLogAgrees checks that a board which watches a trainer and a board or report that reads its log
// contain the same values, in every field, after every event.
func TestLogAgrees(t *testing.T) {
	events := boardtest.Growing()
	live := NewRun("0", "run", nil)
	for i, e := range events {
		live.Take(e)
		got, want := replayed(t, events[:i+1]).Full(), live.Full()
		got.Run.Started, want.Run.Started = time.Time{}, time.Time{}
		if e.Step == 0 { // the log has no seeds before the first epoch
			continue
		}
		a, err := json.Marshal(got)
		require.NoError(t, err)
		b, err := json.Marshal(want)
		require.NoError(t, err)
		require.JSONEq(t, string(b), string(a), "%v at step %d", e.Kind, e.Step)
	}

	s := live.Status()
	require.Equal(t, 4000, s.Params)
	require.EqualValues(t, 0.75, s.Share)
	require.Equal(t, "ended", s.State)
	require.InDelta(t, float64(s.ValLoss), float64(s.BestLoss), 0)
	require.Equal(t, 30, s.BestStep)
	require.InDelta(t, 1024/0.327, float64(s.Speed), 10)
	require.InDelta(t, float64(s.FLOPs)/7e10, float64(s.CeilingShare), 1e-9)
}

// TestForeignLines checks that JSON which does not come from a log is ignored.
func TestForeignLines(t *testing.T) {
	r := NewRun("0", "run", nil)
	params := 99
	r.Read(runlog.Record{Step: 7, Params: &params})
	require.Equal(t, "waiting", r.Status().State)
	require.Zero(t, r.Status().Step)
	require.Zero(t, r.Status().Params)
}

// TestGroups checks that events which differ only in their seed form one group, although the events
// of each seed are recorded together.
func TestGroups(t *testing.T) {
	r := NewRun("0", "run", nil)
	for _, e := range boardtest.Growing() {
		r.Take(e)
	}
	var found []string
	for _, g := range r.Groups(0, 100) {
		if g.Kind == Grown {
			require.Equal(t, 20, g.Step)
			require.Equal(t, "3 blocks become 12", g.To)
			continue
		}
		require.Equal(t, 128, g.Count, g.To)
		require.Len(t, g.Seeds, 4)
		found = append(found, g.To)
	}
	require.Equal(t, []string{"Germinated", "Training", "Grafting", "Stabilization", "Evaluating",
		"FineTuning"}, found)
}

// TestLateViewer checks that a viewer who arrives late receives whole groups, and the growth of the
// model however long ago that was. A group that grows is sent again.
func TestLateViewer(t *testing.T) {
	receive := func(r *Run, c *Cursor, into map[int]api.Group) {
		var b bytes.Buffer
		require.NoError(t, r.News(&b, c))
		for message := range strings.SplitSeq(b.String(), "\n\n") {
			data, ok := strings.CutPrefix(message, "event: groups\ndata: ")
			if !ok {
				continue
			}
			var m groupsMessage
			require.NoError(t, json.Unmarshal([]byte(data), &m))
			for _, g := range m.Groups {
				into[g.Number] = g
			}
		}
	}

	r := NewRun("0", "run", nil)
	var early Cursor
	all := map[int]api.Group{}
	for _, e := range boardtest.Growing() {
		r.Take(e)
		receive(r, &early, all)
	}
	for i := range 2 * recentGroups {
		r.Take(llm.Event{Kind: llm.Noted, Step: 31 + i, Text: "a note"})
		receive(r, &early, all)
	}

	var late Cursor
	some := map[int]api.Group{}
	receive(r, &late, some)
	require.Len(t, all, 7+2*recentGroups)
	require.Len(t, some, 7+recentGroups)
	for number, g := range some {
		require.Equal(t, all[number], g)
	}

	e := llm.Event{Kind: llm.EpochEnd, Step: 900}
	for seed := range 3 {
		e.Reports = []state.Report{{Epoch: 9, Seeds: make([]state.SeedReport, 3)}}
		e.SeedEvents = []state.Event{{Kind: state.StageChanged, Seed: seed, To: state.Culled}}
		e.Reports[0].Seeds[1].Seed, e.Reports[0].Seeds[2].Seed = 1, 2
		r.Take(e)
		receive(r, &late, some)
	}
	last := some[r.groups.next-1]
	require.Equal(t, 3, last.Count)
	require.Equal(t, "Culled", last.To)
}
