package board

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/board/internal/store"
	"github.com/kasmina-go/kasmina/llm"
)

// patience limits how long a request waits for the end of a step. A request that waits longer is
// answered with a pending order, which the client can query later.
const patience = 20 * time.Second

// Limits of the orders that a board remembers.
const (
	maxPending = 64
	maxSettled = 1000
)

// orders holds the requests to steer that a board has received.
type orders struct {
	mu   sync.Mutex
	last int // ID of the latest order
	all  []*order
}

// An order is a request to a run.
type order struct {
	id      int
	run     *store.Run
	settled chan struct{} // closed once err is the result
	err     error
}

// isSettled reports whether the order has been carried out or rejected.
func (o *order) isSettled() bool {
	select {
	case <-o.settled:
		return true
	default:
		return false
	}
}

// status returns the state of the order for the API.
func (o *order) status() api.Order {
	switch {
	case !o.isSettled():
		return api.Order{ID: o.id, State: api.Pending}
	case o.err != nil:
		return api.Order{ID: o.id, State: api.Refused, Error: o.err.Error()}
	default:
		return api.Order{ID: o.id, State: api.Done, Done: true}
	}
}

// add stores a new order. answer delivers its result; if that is an error, add calls refused before
// the order is settled.
func (o *orders) add(run *store.Run, answer <-chan error, refused func(error)) *order {
	o.mu.Lock()
	defer o.mu.Unlock()

	// Forget settled orders, the oldest first. There are only a few pending ones, see full.
	for len(o.all) >= maxSettled {
		i := slices.IndexFunc(o.all, (*order).isSettled)
		if i < 0 {
			break
		}
		o.all = slices.Delete(o.all, i, i+1)
	}

	o.last++
	next := &order{id: o.last, run: run, settled: make(chan struct{})}
	o.all = append(o.all, next)
	go func() { // terminates because a run answers every request before it ends
		if next.err = <-answer; next.err != nil {
			refused(next.err)
		}
		close(next.settled)
	}()
	return next
}

// full reports whether the maximum number of orders is pending.
func (o *orders) full() bool {
	o.mu.Lock()
	defer o.mu.Unlock()

	pending := 0
	for _, one := range o.all {
		if !one.isSettled() {
			pending++
		}
	}
	return pending >= maxPending
}

// find returns the order of a run with the given ID, or nil if there is none.
func (o *orders) find(run *store.Run, id int) *order {
	o.mu.Lock()
	defer o.mu.Unlock()
	i := slices.IndexFunc(o.all, func(one *order) bool { return one.id == id && one.run == run })
	if i < 0 {
		return nil
	}
	return o.all[i]
}

// carryOut reads an order, passes it to the trainer, and answers with the result. The page shows
// rejected commands as events.
func (b *Board) carryOut(w http.ResponseWriter, r *http.Request, run *store.Run, t *llm.Trainer,
	read reader) {
	if b.orders.full() {
		refuse(w, http.StatusServiceUnavailable, fmt.Sprintf(
			"%d requests wait for the end of the current step: try again after it", maxPending))
		return
	}

	reply, commands, err := read(r, t)
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		refuse(w, http.StatusRequestEntityTooLarge,
			fmt.Sprintf("the request has more than %d bytes", maxBody))
		return
	case errors.Is(err, errRequest):
		refuse(w, http.StatusBadRequest, err.Error())
		return
	case err != nil:
		refuse(w, http.StatusConflict, err.Error())
		return
	}

	o := b.orders.add(run, reply, func(err error) { run.Refuse(commands, err) })
	select {
	case <-o.settled:
	case <-r.Context().Done(): // the order stays pending; the client may query it later
		return
	case <-time.After(b.patience):
	}

	switch status := o.status(); status.State {
	case api.Refused:
		answerWith(w, http.StatusConflict, status)
	case api.Pending:
		w.Header().Set("Location", fmt.Sprintf("/api/v1/runs/%s/orders/%d", run.ID(), o.id))
		answerWith(w, http.StatusAccepted, status)
	default:
		answerWith(w, http.StatusOK, status)
	}
}

// order answers with the state of an order.
func (b *Board) order(w http.ResponseWriter, r *http.Request) {
	id, err := number(r.PathValue("order"))
	if err != nil {
		refuse(w, http.StatusBadRequest, err.Error())
		return
	}

	run := b.byID(r.PathValue("run"))
	o := b.orders.find(run, id)
	if run == nil || o == nil {
		refuse(w, http.StatusNotFound, fmt.Sprintf(
			"no such order; the board remembers only the last %d", maxSettled))
		return
	}
	answer(w, o.status())
}
