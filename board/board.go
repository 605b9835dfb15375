// Package board shows training runs in a browser while they go on: curves, the lattice of seeds,
// samples, and Prometheus' metrics.
//
//	b, err := board.Attach(trainer)
//	...
//	url, err := b.Listen("127.0.0.1:6060")
//	...
//	defer b.Close()
//
// The page works offline: all of it is in the program. A [Board] is an [http.Handler] too, for a
// program that has a server of its own.
//
// A run never waits for its board. The board takes copies of the trainer's events, and what it has
// no room for it drops and counts. Viewers ask a copy of their own, a few times a second; one that
// stalls is disconnected, and one that floods is refused. Package [board/api] has the JSON, under
// /api/v1, and a client.
//
// [board/api]: https://pkg.go.dev/github.com/kasmina-go/kasmina/board/api
package board

//go:generate go run ./internal/vendored

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/board/internal/nvml"
	"github.com/kasmina-go/kasmina/board/internal/store"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// Board shows the runs of the trainers that it watches. Make one with [New] or [Attach]. All
// methods may be called from any goroutine.
type Board struct {
	handler http.Handler
	config  config
	token   string // "" without control

	identity identity
	queue    chan message
	closing  chan struct{}
	drained  chan struct{} // closed when the queue has been taken in, after closing
	viewers  places        // of streams
	cards    cards

	orders   orders
	patience time.Duration // of requests that wait for the end of a step

	mu       sync.Mutex
	closed   bool
	runs     []*store.Run
	trainers []*llm.Trainer // of the runs
	servers  []*http.Server
}

// identity distinguishes a board from another one that listens at the same address later.
type identity struct {
	ID string `json:"id"`
}

// message is an event of a run, on its way from the trainer.
type message struct {
	run   *store.Run
	event llm.Event
}

// queued is how many events may wait, which is seconds of the fastest runs.
const queued = 4096

// Option changes what [New] makes.
type Option func(*config)

type config struct {
	hosts   []string
	control bool
	name    string
}

// WithFolder names the run of [Attach] after its folder, as a board of logs and a report do. Without
// this option the run is called "run".
func WithFolder(folder string) Option {
	return func(c *config) { c.name = runName(folder) }
}

// WithHosts lets browsers reach the board under the given names too, without port. Addresses,
// localhost and the computer's own name are known: any other could be a stranger's page that has
// its name lead here.
func WithHosts(names ...string) Option {
	return func(c *config) { c.hosts = append(c.hosts, names...) }
}

// New returns a board without runs.
func New(opts ...Option) (*Board, error) {
	b := &Board{queue: make(chan message, queued), closing: make(chan struct{}),
		drained:  make(chan struct{}),
		identity: identity{rand.Text()}, cards: cards{open: nvml.Open}, patience: patience}
	for _, opt := range opts {
		if opt == nil {
			return nil, errors.New("board: New: an option is nil")
		}
		opt(&b.config)
	}
	if b.config.control {
		b.token = newToken()
	}
	b.handler = b.guarded(b.routes())
	go b.collect()
	return b, nil
}

// Attach returns a board that watches a trainer. It must be called before the trainer's Run.
func Attach(t *llm.Trainer, opts ...Option) (*Board, error) {
	b, err := New(opts...)
	if err != nil {
		return nil, err
	}
	if err := b.Watch(t, cmp.Or(b.config.name, "run")); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return b, nil
}

// Watch shows the runs of one more trainer, under a name.
func (b *Board) Watch(t *llm.Trainer, name string) error {
	if t == nil || t.Model == nil {
		return errors.New("board: Watch: the trainer is nil or its zero value, want one that " +
			"llm.NewTrainer returns")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.handler == nil:
		return fmt.Errorf("board: Watch: %w", errZero)
	case b.closed:
		return errors.New("board: Watch: the board is closed")
	}
	run := store.NewRun(strconv.Itoa(len(b.runs)), name, settings(t))
	b.runs, b.trainers = append(b.runs, run), append(b.trainers, t)
	f := &feed{board: b, run: run, seeds: t.Model.Kasmina}
	t.On(f.event)
	return nil
}

// settings are what people compare runs by: the program's notes, or else the model's sizes.
func settings(t *llm.Trainer) map[string]string {
	if len(t.Config.Notes) > 0 {
		return maps.Clone(t.Config.Notes)
	}
	m, c := t.Model.Config, t.Config
	s := map[string]string{}
	for name, v := range map[string]int{"layers": m.Layers, "dim": m.Dim,
		"heads": m.Heads, "ff": m.FF,
		"seq": m.Seq, "vocab": m.Vocab, "seeds": m.Seeds, "batch": c.Batch,
		"accumulate": c.Accumulate, "epoch": c.Epoch} {
		s[name] = strconv.Itoa(v)
	}
	return s
}

// feed hands the events of a trainer to the board. It runs on the training goroutine and never
// waits.
type feed struct {
	board *Board
	run   *store.Run
	seeds *state.Network
	left  []state.Event // that the queue had no room for
}

// maxLeft bounds the events of seeds that wait for room.
const maxLeft = 1 << 16

func (f *feed) event(e llm.Event) error {
	switch e.Kind {
	case llm.RunStart:
		e.Reports = f.seeds.Report() // or the picture would be empty for an epoch
	case llm.EpochEnd:
		if len(f.left) > 0 {
			e.SeedEvents = append(f.left, e.SeedEvents...)
		}
	case llm.Profiled, llm.Chosen:
		return nil
	}
	if f.send(e) {
		if e.Kind == llm.EpochEnd {
			f.left = nil
		}
		return nil
	}
	f.run.Drop()
	if e.Kind == llm.EpochEnd && len(e.SeedEvents) <= maxLeft {
		f.left = e.SeedEvents
	}
	return nil
}

// send reports whether there was room. For the end of a run it waits a moment: nothing waits for
// it then.
func (f *feed) send(e llm.Event) bool {
	m := message{f.run, e}
	select {
	case f.board.queue <- m:
		return true
	default:
	}
	if e.Kind != llm.RunEnd {
		return false
	}
	select {
	case f.board.queue <- m:
		return true
	case <-time.After(time.Second):
		return false
	}
}

// collect takes events in until the board is closed and none is left.
func (b *Board) collect() {
	defer close(b.drained)
	for {
		select {
		case m := <-b.queue:
			m.run.Take(m.event)
		case <-b.closing:
			for {
				select {
				case m := <-b.queue:
					m.run.Take(m.event)
				default:
					return
				}
			}
		}
	}
}

// ServeHTTP serves the page, the API and the metrics.
func (b *Board) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if b.handler == nil {
		refuse(w, http.StatusInternalServerError, errZero.Error())
		return
	}
	b.handler.ServeHTTP(w, r)
}

// errZero is the error of a board that nobody has made.
var errZero = errors.New("the board is its zero value, want one that New or Attach returns")

// Close ends the board's servers. Viewers are told what there is to tell first.
func (b *Board) Close() error {
	b.mu.Lock()
	if b.closed || b.handler == nil {
		b.mu.Unlock()
		return nil
	}
	b.closed = true
	servers := b.servers
	b.mu.Unlock()
	close(b.closing)
	<-b.drained
	for deadline := time.Now().Add(partingTime); b.viewers.count() > 0 &&
		time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
	}
	errs := b.cards.close()
	for _, s := range servers {
		errs = errors.Join(errs, s.Close())
	}
	if errs != nil {
		return fmt.Errorf("board: Close: %w", errs)
	}
	return nil
}

// partingTime is how long viewers may take for the end of a run.
const partingTime = time.Second

// trains reports whether some run is of this program, on this computer.
func (b *Board) trains() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.ContainsFunc(b.trainers, func(t *llm.Trainer) bool { return t != nil })
}

// gpus are those that the board's runs may train on: none of a board of logs.
func (b *Board) gpus() []api.Card {
	if !b.trains() {
		return []api.Card{}
	}
	return b.cards.told()
}

// all returns the runs.
func (b *Board) all() []*store.Run {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.runs[:len(b.runs):len(b.runs)]
}

// byID returns a run, nil if there is none.
func (b *Board) byID(id string) *store.Run {
	for _, r := range b.all() {
		if r.ID() == id {
			return r
		}
	}
	return nil
}
