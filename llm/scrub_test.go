package llm

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/seedtest"
	"github.com/kasmina-go/kasmina/state"
)

// TestScrub wants what is damaged before a run and during it to be told while it goes on, once for
// each place.
func TestScrub(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1 << 20})
	tr.Config.Epoch = 1 << 20 // whose end would find it too
	seedtest.FlipAlpha(t, tr.Model.Kasmina.Lattice(0), 2)
	ctx, cancel := context.WithCancel(t.Context())
	var out strings.Builder
	var events []Event
	tr.On(Scrub(tr, &out, time.Millisecond), func(e Event) error {
		switch {
		case e.Kind == Corrupted:
			events = append(events, e)
			if len(events) == 2 {
				cancel()
			}
		case e.Kind == StepEnd && e.Step == 3:
			seedtest.FlipAlpha(t, tr.Model.Kasmina.Lattice(1), 1)
		}
		return nil
	})
	require.ErrorIs(t, tr.Run(ctx), context.Canceled)
	require.Len(t, events, 2)
	require.Equal(t, 1, events[0].Step)
	require.GreaterOrEqual(t, events[1].Step, 4)
	for i, want := range []string{
		"layer 0: seed state is corrupt: seed 2 does not match its checksum: bit 3 of alpha has flipped",
		"layer 1: seed state is corrupt: seed 1 does not match its checksum: bit 3 of alpha has flipped",
	} {
		require.ErrorIs(t, events[i].Err, state.ErrCorrupt)
		require.ErrorContains(t, events[i].Err, want)
		require.Equal(t, 1, strings.Count(out.String(), "corrupt   "+want), out.String())
	}
	require.Equal(t, 2, strings.Count(out.String(), "\n"))
}

// TestScrubOfAFailedRun wants what was found to be told also when the run fails before a step's end.
func TestScrubOfAFailedRun(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 2})
	tr.Config.Epoch = 1
	seedtest.FlipAlpha(t, tr.Model.Kasmina.Lattice(0), 2)
	var told []error
	tr.On(Scrub(tr, io.Discard, time.Hour), func(e Event) error {
		if e.Kind == Corrupted {
			told = append(told, e.Err)
		}
		return nil
	})
	require.ErrorIs(t, tr.Run(t.Context()), state.ErrCorrupt)
	require.Len(t, told, 1)
}

func TestScrubRefuses(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
	for want, c := range map[string]Callback{
		"the trainer is nil":       Scrub(nil, io.Discard, time.Second),
		"the writer is nil":        Scrub(tr, nil, time.Second),
		"the period is 0s, want":   Scrub(tr, io.Discard, 0),
		"the period is -1ns, want": Scrub(tr, io.Discard, -1),
	} {
		require.ErrorContains(t, c(Event{Kind: RunStart}), want)
	}
	full := errors.New("no space left")
	seedtest.FlipAlpha(t, tr.Model.Kasmina.Lattice(0), 2)
	tr.On(Scrub(tr, failingWriter{full}, time.Second))
	require.ErrorIs(t, tr.Run(t.Context()), full)
}

type failingWriter struct{ err error }

func (w failingWriter) Write([]byte) (int, error) { return 0, w.err }
