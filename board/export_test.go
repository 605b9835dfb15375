package board

import (
	"strconv"
	"time"

	"github.com/kasmina-go/kasmina/board/internal/store"
	"github.com/kasmina-go/kasmina/llm"
)

// Add adds a run without a trainer.
func (b *Board) Add(name string) *store.Run {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := store.NewRun(strconv.Itoa(len(b.runs)), name, nil)
	b.runs, b.trainers = append(b.runs, r), append(b.trainers, nil)
	return r
}

// Feed returns the callback that the board adds to a trainer.
func (b *Board) Feed(t *llm.Trainer) llm.Callback {
	return (&feed{board: b, run: b.Add("fed"), seeds: t.Model.Kasmina}).event
}

// Pending returns the number of orders that wait for the end of a step.
func (b *Board) Pending() (n int) {
	b.orders.mu.Lock()
	defer b.orders.mu.Unlock()
	for _, o := range b.orders.all {
		if !o.isSettled() {
			n++
		}
	}
	return n
}

// SetPatience sets how long requests wait for the end of a step.
func (b *Board) SetPatience(d time.Duration) { b.patience = d }
