// Package board shows training runs in a browser: curves, seeds, events and samples. It also serves
// metrics for Prometheus.
//
//	b, err := board.Attach(trainer)
//	...
//	url, err := b.Listen("127.0.0.1:6060")
//	...
//	defer b.Close()
//
// The page needs no network: all its files are embedded in the program. A program with a web server
// can use a [Board] as an [http.Handler].
//
// A run never waits for its board. The board receives copies of the trainer's events, and if it
// cannot keep up, it drops events and counts them. Viewers receive updates a few times per second.
// The board disconnects viewers that do not read and rejects excessive requests. Package [board/api]
// documents the JSON interface under /api/v1 and contains a client for it.
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

// A Board shows runs, which it follows either through their trainers or through their logs. Create
// one with [New], [Attach] or [Logs]. All methods may be called from any goroutine.
type Board struct {
	handler http.Handler
	config  config
	token   string // "" without control

	identity identity
	queue    chan message
	closing  chan struct{}
	drained  chan struct{} // closed once the queue is empty after closing
	viewers  places        // limits the streams
	cards    cards

	orders   orders
	patience time.Duration // for requests waiting for the end of a step

	mu       sync.Mutex
	closed   bool
	runs     []*store.Run
	trainers []*llm.Trainer // of the runs, nil for a run that a log describes
	servers  []*http.Server
}

// identity distinguishes a board from later boards at the same address.
type identity struct {
	ID string `json:"id"`
}

// A message is an event of a run in the queue.
type message struct {
	run   *store.Run
	event llm.Event
}

// queued is the capacity of the queue. It suffices for several seconds of the fastest runs.
const queued = 4096

// An Option configures [New], [Attach] and [Logs].
type Option func(*config)

type config struct {
	hosts   []string
	control bool
	name    string
}

// WithFolder names the run of [Attach] after its directory, as boards created by [Logs] and reports
// do. Without this option, the run is called "run".
func WithFolder(folder string) Option {
	return func(c *config) { c.name = runName(folder) }
}

// WithHosts permits requests under additional host names, given without a port. IP addresses,
// localhost and the computer's own name are always permitted. All other names are rejected, because a
// hostile page could use them to reach the board.
func WithHosts(names ...string) Option {
	return func(c *config) { c.hosts = append(c.hosts, names...) }
}

// New returns a board without runs. Use [Board.Watch] to add some.
func New(opts ...Option) (*Board, error) {
	b := &Board{queue: make(chan message, queued), closing: make(chan struct{}),
		drained:  make(chan struct{}),
		identity: identity{rand.Text()}, cards: cards{open: nvml.Open}, patience: patience}
	for _, opt := range opts {
		opt(&b.config)
	}

	if b.config.control {
		b.token = newToken()
	}
	b.handler = b.guarded(b.routes())
	go b.collect()
	return b, nil
}

// Attach returns a board that shows the runs of a trainer. It must be called before the trainer's
// Run.
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

// Watch adds a trainer to the board, which shows its runs under the given name.
func (b *Board) Watch(t *llm.Trainer, name string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.closed:
		return errors.New("board: Watch: the board is closed")
	}

	run := store.NewRun(strconv.Itoa(len(b.runs)), name, settings(t))
	b.runs, b.trainers = append(b.runs, run), append(b.trainers, t)
	f := &feed{board: b, run: run, seeds: t.Model.Kasmina}
	t.On(f.event)
	return nil
}

// settings returns the settings that distinguish runs, which are the program's notes or, if there are
// none, the model's sizes.
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

// A feed passes the events of a trainer to the board. It runs on the training goroutine, so it must
// not wait.
type feed struct {
	board *Board
	run   *store.Run
	seeds *state.Network
	left  []state.Event // seed events that did not fit into the queue
}

// maxLeft limits the seed events waiting for room in the queue.
const maxLeft = 1 << 16

func (f *feed) event(e llm.Event) error {
	switch e.Kind {
	case llm.RunStart:
		e.Reports = f.seeds.Report() // for the picture before the first epoch ends
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

// send adds an event to the queue and reports whether there was room. It waits up to a second to add
// the end of a run, when waiting delays no training.
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

// collect moves events from the queue to their runs until the board is closed and the queue empty.
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
	b.handler.ServeHTTP(w, r)
}

// Close shuts the board's servers down. Before that, it sends the latest updates to the viewers.
func (b *Board) Close() error {
	b.mu.Lock()
	if b.closed {
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

// partingTime limits how long Close waits for viewers to receive the latest updates.
const partingTime = time.Second

// trains reports whether the board watches a trainer, so that a run uses this computer.
func (b *Board) trains() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.ContainsFunc(b.trainers, func(t *llm.Trainer) bool { return t != nil })
}

// gpus returns the GPUs of this computer, or none if the board shows only logs.
func (b *Board) gpus() []api.Card {
	if !b.trains() {
		return []api.Card{}
	}
	return b.cards.state()
}

// all returns all runs.
func (b *Board) all() []*store.Run {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.runs[:len(b.runs):len(b.runs)]
}

// byID returns the run with the given ID, or nil for an unknown ID.
func (b *Board) byID(id string) *store.Run {
	for _, r := range b.all() {
		if r.ID() == id {
			return r
		}
	}
	return nil
}
