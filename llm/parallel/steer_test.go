package parallel_test

import (
	"bytes"
	"context"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/board"
	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/parallel"
	"github.com/kasmina-go/kasmina/state"
)

// TestBoardSteersAllRanks: what a person asks for on rank 0's board takes effect at all ranks
// between the same two steps. It is a blueprint, a checkpoint, and the end of the run.
func TestBoardSteersAllRanks(t *testing.T) {
	const size = 3
	s := setup{config: small(), steps: 1 << 20, accumulate: 3,
		save: filepath.Join(t.TempDir(), "run.safetensors")}
	var mu sync.Mutex
	grown, saved, ended := map[int][]int{}, map[int][]int{}, map[int]int{}
	errs := on(t, size, comm.Options{}, func(rank int, team *parallel.Team) error {
		own := s
		var person sync.WaitGroup
		own.more = func(tr *llm.Trainer) {
			note := func(m map[int][]int, step int) {
				mu.Lock()
				defer mu.Unlock()
				m[rank] = append(m[rank], step)
			}
			there := false
			tr.On(func(e llm.Event) error {
				switch {
				case e.Kind == llm.StepEnd && !there:
					stage := tr.Model.Kasmina.Lattice(0).Report().Seeds[3].Stage
					if there = stage == state.Germinated; there {
						note(grown, e.Step)
					}
				case e.Kind == llm.Saved:
					note(saved, e.Step)
				case e.Kind == llm.RunEnd:
					mu.Lock()
					defer mu.Unlock()
					ended[rank] = e.Step
				}
				return nil
			})
			if rank == 0 {
				b, err := board.Attach(tr, board.WithControl())
				require.NoError(t, err)
				server := httptest.NewServer(b)
				person.Go(func() {
					defer b.Close()
					defer server.Close()
					c := &api.Client{URL: server.URL, Token: b.Token(), Who: "a person"}
					if err := steerAsPerson(t.Context(), c, s.save); err != nil {
						t.Error(err)
						tr.Stop("the test has failed")
					}
				})
			}
		}
		err := own.train(t.Context(), rank, size, team.Engine)
		person.Wait()
		return err
	})
	for _, err := range errs {
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorContains(t, err, "a person asked on the board")
	}
	require.Len(t, grown[0], 1)
	require.GreaterOrEqual(t, len(saved[0]), 2, "the person's, and that of the end")
	for r := 1; r < size; r++ {
		require.Equal(t, grown[0], grown[r])
		require.Equal(t, ended[0], ended[r])
	}
	plain := setup{config: small(), accumulate: 3, steps: 1 << 20, resume: s.save, stop: ended[0] + 1,
		save: filepath.Join(t.TempDir(), "on.safetensors")}
	require.ErrorIs(t, plain.run(t, 0), errStop)
	one, err := os.ReadFile(plain.save)
	require.NoError(t, err)
	plain.save = filepath.Join(t.TempDir(), "on.safetensors")
	require.ErrorIs(t, plain.run(t, 2), errStop)
	two, err := os.ReadFile(plain.save)
	require.NoError(t, err)
	require.True(t, bytes.Equal(one, two))
}

// steerAsPerson germinates a seed, saves, and stops the run once the checkpoint is there.
func steerAsPerson(ctx context.Context, c *api.Client, path string) error {
	ctx, stop := context.WithTimeout(ctx, patience/2)
	defer stop()
	for { // until the run has begun
		err := c.Do(ctx, "0", state.Command{Action: state.Germinate, Seed: 3, Why: "it is hungry",
			Request: state.GerminationRequest{Slot: 1, Kind: blueprints.ChunkMLP}})
		if err == nil {
			break
		}
		if !strings.Contains(err.Error(), "no run goes on") {
			return err
		}
		time.Sleep(time.Millisecond)
	}
	if err := c.Save(ctx, "0"); err != nil {
		return err
	}
	for ctx.Err() == nil {
		if _, err := os.Stat(path); err == nil {
			return c.Stop(ctx, "0", "enough")
		}
		time.Sleep(time.Millisecond)
	}
	return ctx.Err()
}
