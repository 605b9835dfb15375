package board

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/board/internal/store"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// WithControl lets whoever has the board's [Board.Token] steer its runs. Without it a board can
// only be looked at.
func WithControl() Option { return func(c *config) { c.control = true } }

// Token returns what a request must have to steer a run, "" if none may. It is a new one for each
// board, and part of the URL that Listen returns.
func (b *Board) Token() string { return b.token }

// Limits of what is asked of a run.
const (
	maxBody     = 1 << 16
	maxCommands = 1000
	maxWho      = 64
	maxWhy      = 200
	maxOrders   = 20 // requests a second, refused ones included
)

// patience is how long a command waits for the end of a step. It stays valid after that.
const patience = 30 * time.Second

// control adds what steers runs to the routes.
func (b *Board) control(mux *http.ServeMux) {
	mux.HandleFunc("GET /api/v1/control", func(w http.ResponseWriter, _ *http.Request) {
		c := api.Control{Allowed: b.config.control}
		if runs := b.all(); len(runs) > 0 && c.Allowed {
			c.Kinds = runs[len(runs)-1].Kinds()
		}
		answer(w, c)
	})
	post := func(path string, f order) {
		mux.HandleFunc("POST /api/v1/runs/{run}/"+path, b.authorised(f))
	}
	post("commands", steer)
	post("telemetry", telemetry)
	post("save", func(r *http.Request, _ *store.Run, t *llm.Trainer) error {
		var q api.Request
		if err := read(r, &q); err != nil {
			return err
		}
		if err := t.SaveSoon(); err != nil {
			return err
		}
		t.Note(asked(q, "to save", q.Why))
		return nil
	})
	post("stop", func(r *http.Request, _ *store.Run, t *llm.Trainer) error {
		var q api.Request
		if err := read(r, &q); err != nil {
			return err
		}
		t.Stop(asked(q, "to stop", q.Why))
		return nil
	})
}

// order does what a request asks of a run.
type order func(*http.Request, *store.Run, *llm.Trainer) error

// errRequest is wrapped by what is wrong with a request itself.
var errRequest = errors.New("the request")

// authorised lets requests through that carry the token and come from no other site.
func (b *Board) authorised(f order) http.HandlerFunc {
	rate := &bucket{perSecond: maxOrders, most: 2 * maxOrders}
	sites := http.NewCrossOriginProtection()
	return func(w http.ResponseWriter, r *http.Request) {
		given, bearer := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		want, got := sha256.Sum256([]byte(b.token)), sha256.Sum256([]byte(given))
		kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
		switch run, t := b.trainer(r.PathValue("run")); {
		case !b.config.control:
			refuse(w, http.StatusForbidden,
				"this board can only be looked at: board.WithControl, or -board-control, lets a "+
					"run be steered")
		case !rate.take(time.Now()):
			refuse(w, http.StatusTooManyRequests, "too many commands")
		case sites.Check(r) != nil:
			refuse(w, http.StatusForbidden, "the request comes from another site")
		case !bearer || subtle.ConstantTimeCompare(want[:], got[:]) != 1:
			w.Header().Set("WWW-Authenticate", "Bearer")
			refuse(w, http.StatusUnauthorized,
				"the token is missing or wrong: the program printed it, with the board's URL")
		case err != nil || kind != "application/json":
			refuse(w, http.StatusUnsupportedMediaType, "the body must be application/json")
		case run == nil:
			refuse(w, http.StatusNotFound, "there is no such run; /api/v1/runs lists them")
		case t == nil:
			refuse(w, http.StatusConflict, "the run is of another program or has ended")
		default:
			r.Body = http.MaxBytesReader(w, r.Body, maxBody)
			settle(w, f(r, run, t))
		}
	}
}

// settle answers a request that has been tried.
func settle(w http.ResponseWriter, err error) {
	var large *http.MaxBytesError
	switch {
	case err == nil:
		answer(w, map[string]bool{"done": true})
	case errors.As(err, &large):
		refuse(w, http.StatusRequestEntityTooLarge,
			fmt.Sprintf("the request has more than %d bytes", maxBody))
	case errors.Is(err, errRequest):
		refuse(w, http.StatusBadRequest, err.Error())
	default:
		refuse(w, http.StatusConflict, err.Error())
	}
}

// trainer returns a run, and its trainer.
func (b *Board) trainer(id string) (*store.Run, *llm.Trainer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, r := range b.runs {
		if r.ID() == id {
			return r, b.trainers[i]
		}
	}
	return nil, nil
}

// read reads a request as JSON without fields that are not known, or anything behind it.
func read(r *http.Request, to any) error {
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	err := d.Decode(to)
	if err == nil {
		if _, more := d.Token(); more != io.EOF {
			err = errors.New("there is more behind the JSON")
		}
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errRequest, err)
	}
	return nil
}

// asked says who has asked for what, and why, for the record.
func asked(q api.Request, what, why string) string {
	who := clean(q.Who, maxWho)
	if who == "" {
		who = "somebody"
	}
	text := strings.TrimSpace(who + " asked on the board " + what)
	if why = clean(why, maxWhy); why != "" {
		text += ": " + why
	}
	return text
}

// clean is a line of text of at most n bytes.
func clean(s string, n int) string {
	s = strings.Join(strings.Fields(strings.ToValidUTF8(s, "")), " ")
	if len(s) > n {
		s = strings.ToValidUTF8(s[:n], "")
	}
	return s
}

// steer gives commands to seeds and waits for the end of the step. Those that are refused are shown
// among what has happened.
func steer(r *http.Request, run *store.Run, t *llm.Trainer) error {
	var q api.Commands
	if err := read(r, &q); err != nil {
		return err
	}
	if len(q.Commands) == 0 || len(q.Commands) > maxCommands {
		return fmt.Errorf("%w: there are %d commands, want 1 to %d", errRequest,
			len(q.Commands), maxCommands)
	}
	for i := range q.Commands {
		c := &q.Commands[i]
		if c.Action == state.Load {
			return fmt.Errorf("%w: parameters are not loaded through a board", errRequest)
		}
		why := c.Why
		if why == "" {
			why = q.Why
		}
		c.Why = asked(q.Request, "", why)
	}
	select {
	case err := <-t.Steer(q.Commands...):
		if err != nil {
			run.Refuse(q.Commands, err)
		}
		return err
	case <-r.Context().Done():
		return r.Context().Err()
	case <-time.After(patience):
		return errors.New("the step takes long: the commands wait for its end, and the page will " +
			"show what comes of them")
	}
}

// telemetry changes what all lattices measure.
func telemetry(r *http.Request, _ *store.Run, t *llm.Trainer) error {
	var q api.Telemetry
	if err := read(r, &q); err != nil {
		return err
	}
	mode := state.Production
	for ; mode.String() != q.Mode; mode++ {
		if mode > state.Off {
			return fmt.Errorf("%w: the mode is %.40q, want Production, Sampling, Debug or Off",
				errRequest, q.Mode)
		}
	}
	for _, l := range t.Model.Kasmina.Lattices() {
		now := l.Telemetry()
		now.Mode, now.Every = mode, q.Every
		if err := l.SetTelemetry(now); err != nil {
			return fmt.Errorf("%w: %w", errRequest, err)
		}
	}
	t.Note(asked(q.Request, "to measure seeds in mode "+q.Mode, q.Why))
	return nil
}

// newToken returns one that nobody can guess.
func newToken() string { return rand.Text() }
