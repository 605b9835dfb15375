package parallel_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
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
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/parallel"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/state"
)

// TestBoardSteersAllRanks checks that requests on rank 0's board to grow a blueprint, save a checkpoint
// and stop the run take effect at all ranks between the same two steps.
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
			germinated := false
			tr.On(func(e llm.Event) error {
				switch {
				case e.Kind == llm.StepEnd && !germinated:
					stage := tr.Model.Kasmina.Lattice(0).Report().Seeds[3].Stage
					if germinated = stage == state.Germinated; germinated {
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
		require.ErrorIs(t, err, llm.ErrStopped)
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

// steerAsPerson germinates a seed, saves, and stops the run after the checkpoint has appeared.
func steerAsPerson(ctx context.Context, c *api.Client, path string) error {
	ctx, stop := context.WithTimeout(ctx, patience)
	defer stop()
	for { // until the run has started
		err := c.Do(ctx, "0", state.Command{Action: state.Germinate, Seed: 3, Why: "it is hungry",
			Request: state.GerminationRequest{Slot: 1, Kind: blueprints.ChunkMLP}})
		if err == nil {
			break
		}
		if !strings.Contains(err.Error(), "no run is in progress") {
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

// TestBoardMeasuresAllRanks checks that a change of telemetry on rank 0's board takes effect at all
// ranks between the same two steps, repeatedly, and that replaying rank 0's record reproduces the run
// in a single process.
func TestBoardMeasuresAllRanks(t *testing.T) {
	const size, steps = 2, 60
	text, err := data.NewEvaluation(texttest.Words(9, 120), tokenizer.Bytes{}, 2, small().Seq)
	require.NoError(t, err)
	s := setup{config: small(), steps: steps, accumulate: 4, save: filepath.Join(t.TempDir(), "run")}

	var mu sync.Mutex
	var record bytes.Buffer
	changed := map[int][]string{}
	errs := on(t, size, comm.Options{}, func(rank int, team *parallel.Team) error {
		own := s
		var person sync.WaitGroup
		own.more = func(tr *llm.Trainer) {
			g := llm.Growth{Controller: passive{}, Validation: text}
			if rank == 0 {
				g.Record = &record
			}
			require.NoError(t, tr.Grow(g))
			last := tr.Model.Kasmina.Lattice(0).Telemetry()
			tr.On(func(e llm.Event) error {
				if now := tr.Model.Kasmina.Lattice(0).Telemetry(); now != last {
					last = now
					mu.Lock()
					defer mu.Unlock()
					changed[rank] = append(changed[rank], fmt.Sprint(e.Step, " ", now.Mode, now.Every))
				}
				return nil
			})
			if rank != 0 {
				return
			}

			b, err := board.Attach(tr, board.WithControl())
			require.NoError(t, err)
			server := httptest.NewServer(b)
			asked := 0
			tr.On(func(e llm.Event) error { // each request arrives in the middle of a step, or at its end
				if e.Kind == llm.StepEnd {
					awaitOrder(b, asked)
				}
				if e.Kind == llm.StepEnd && e.Step%10 == 5 && asked < 4 {
					body := []string{`{"mode":"Off"}`, `{"mode":"Sampling","every":3}`,
						`{"mode":"Debug"}`, `{"mode":"Production"}`}[asked]
					asked++
					person.Go(func() {
						if status := post(server.URL+"/api/v1/runs/0/telemetry", b.Token(),
							body); status != 200 {
							t.Errorf("%s is answered with %d", body, status)
						}
					})
				}
				if e.Kind == llm.StepEnd && e.Step == steps {
					person.Wait() // all requests must be answered while steps are still running
					server.Close()
					return b.Close()
				}
				return nil
			})
		}
		return own.train(t.Context(), rank, size, team.Engine)
	})

	for _, err := range errs {
		require.NoError(t, err)
	}

	require.Len(t, changed[0], 4)
	require.Equal(t, changed[0], changed[1])

	want, _, err := safetensors.Load(s.save) // without the metadata, which name the record
	require.NoError(t, err)
	read, err := llm.ReadRecord(&record)
	require.NoError(t, err)
	for _, ranks := range []int{0, 3} {
		again := setup{config: small(), steps: steps, accumulate: 4, more: func(tr *llm.Trainer) {
			require.NoError(t, tr.Grow(llm.Growth{Validation: text, Replay: read}))
			refused := false
			tr.On(func(e llm.Event) error {
				if e.Kind == llm.StepEnd && e.Step == 7 {
					answer := tr.Steer(state.Command{Action: state.Measure})
					tr.On(func(e llm.Event) error {
						if e.Kind == llm.StepEnd && !refused {
							refused = true
							require.ErrorContains(t, <-answer, "follows a record")
						}
						return nil
					})
				}
				return nil
			})
		}}
		again.save = filepath.Join(t.TempDir(), "again")
		require.NoError(t, again.run(t, ranks))
		got, _, err := safetensors.Load(again.save)
		require.NoError(t, err)
		require.Len(t, got, len(want))
		for i, x := range want {
			require.Equal(t, x.Name, got[i].Name)
			require.True(t, bytes.Equal(safetensors.Memory(x.Data), safetensors.Memory(got[i].Data)),
				"%s on %d ranks", x.Name, ranks)
		}
	}
}

// awaitOrder waits until a board has received the given number of orders.
func awaitOrder(b *board.Board, n int) {
	for n > 0 {
		w := httptest.NewRecorder()
		b.ServeHTTP(w, httptest.NewRequest("GET", fmt.Sprint("http://127.0.0.1/api/v1/runs/0/orders/", n), nil))
		if w.Code == http.StatusOK {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// passive is a controller that never issues commands.
type passive struct{}

func (passive) Decide([]state.Report) []state.Command { return nil }

// post sends JSON with a token and returns the status of the response, or 0.
func post(url, token, body string) int {
	r, err := http.NewRequest("POST", url, strings.NewReader(body))
	if err != nil {
		return 0
	}

	r.Header.Set("Authorization", "Bearer "+token)
	r.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0
	}

	response.Body.Close()
	return response.StatusCode
}
