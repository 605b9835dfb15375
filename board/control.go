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
	"unicode"

	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/board/internal/store"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/telemetry"
)

// WithControl permits clients with the board's [Board.Token] to steer its runs. Without this option,
// the board is read-only.
func WithControl() Option { return func(c *config) { c.control = true } }

// Token returns the token that a request needs to steer a run, or "" if the board is read-only. Each
// board creates its own token and includes it in the URL that [Board.Listen] returns.
func (b *Board) Token() string { return b.token }

// Limits of requests to a run.
const (
	maxBody     = 1 << 16
	maxCommands = 1000
	maxWho      = 64
	maxWhy      = 200
	maxOrders   = 20 // per second, including rejected ones
)

// control adds the routes that steer runs.
func (b *Board) control(mux *http.ServeMux) {
	mux.HandleFunc("GET /api/v1/control", func(w http.ResponseWriter, _ *http.Request) {
		c := api.Control{Allowed: b.config.control}
		if runs := b.all(); len(runs) > 0 && c.Allowed {
			c.Kinds = runs[len(runs)-1].Kinds()
		}
		answer(w, c)
	})
	mux.HandleFunc("GET /api/v1/runs/{run}/orders/{order}", b.order)

	orders := &rates{perSecond: maxOrders}
	post := func(path string, read reader) {
		mux.HandleFunc("POST /api/v1/runs/{run}/"+path, b.authorized(orders, read))
	}
	post("commands", readCommands)
	post("telemetry", readTelemetry)
	post("save", readSave)
	post("stop", readStop)
}

// A reader reads an order from a request and passes it to the trainer. The channel receives the
// result. If the order is rejected, the page shows the returned commands.
type reader func(*http.Request, *llm.Trainer) (answer <-chan error, commands []state.Command, err error)

// errRequest is wrapped by errors of malformed requests.
var errRequest = errors.New("invalid request")

// authorized accepts only requests with the token that do not come from another site.
func (b *Board) authorized(orders *rates, read reader) http.HandlerFunc {
	sites := http.NewCrossOriginProtection()
	return func(w http.ResponseWriter, r *http.Request) {
		given, bearer := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		want, got := sha256.Sum256([]byte(b.token)), sha256.Sum256([]byte(given))
		kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))

		switch run, t := b.trainer(r.PathValue("run")); {
		case !b.config.control:
			refuse(w, http.StatusForbidden,
				"this board is read-only: board.WithControl, or --board-control, "+
					"permits steering")
		case !orders.take(clientOf(r.RemoteAddr), time.Now()):
			refuse(w, http.StatusTooManyRequests, "too many requests to steer")
		case sites.Check(r) != nil:
			refuse(w, http.StatusForbidden, "the request comes from another site")
		case !bearer || subtle.ConstantTimeCompare(want[:], got[:]) != 1:
			w.Header().Set("WWW-Authenticate", "Bearer")
			refuse(w, http.StatusUnauthorized,
				"the token is missing or wrong: it is part of the URL that the program printed")
		case err != nil || kind != "application/json":
			refuse(w, http.StatusUnsupportedMediaType, "the body must be application/json")
		case run == nil:
			refuse(w, http.StatusNotFound, "no such run; /api/v1/runs lists all runs")
		case t == nil:
			refuse(w, http.StatusConflict, "the run belongs to another program and can only be watched")
		default:
			r.Body = http.MaxBytesReader(w, r.Body, maxBody)
			b.carryOut(w, r, run, t, read)
		}
	}
}

// trainer returns the run with the given ID and its trainer.
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

// read decodes a request. Unknown fields and data after the JSON value are errors.
func read(r *http.Request, to any) error {
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	err := d.Decode(to)
	if err == nil {
		if _, more := d.Token(); more != io.EOF {
			err = errors.New("there is data after the JSON value")
		}
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errRequest, err)
	}
	return nil
}

// asked describes a request for the log, stating who asked for what, and why.
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

// clean returns s as a line of at most n bytes, without control characters, which a terminal would
// obey.
func clean(s string, n int) string {
	s = strings.Join(strings.Fields(strings.ToValidUTF8(s, "")), " ")
	s = strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return -1
	}, s)
	if len(s) > n {
		s = strings.ToValidUTF8(s[:n], "")
	}
	return s
}

// readCommands reads commands to seeds.
func readCommands(r *http.Request, t *llm.Trainer) (<-chan error, []state.Command, error) {
	var q api.Commands
	if err := read(r, &q); err != nil {
		return nil, nil, err
	}
	if len(q.Commands) == 0 || len(q.Commands) > maxCommands {
		return nil, nil, fmt.Errorf("%w: it has %d commands, want 1 to %d", errRequest,
			len(q.Commands), maxCommands)
	}

	for i := range q.Commands {
		c := &q.Commands[i]
		if c.Action == state.Load {
			return nil, nil, fmt.Errorf("%w: a board cannot load parameters", errRequest)
		}
		why := c.Why
		if why == "" {
			why = q.Why
		}
		c.Why = asked(q.Request, "", why)
	}
	return t.Steer(q.Commands...), q.Commands, nil
}

// readTelemetry reads a request to change the telemetry of all lattices.
func readTelemetry(r *http.Request, t *llm.Trainer) (<-chan error, []state.Command, error) {
	var q api.Telemetry
	if err := read(r, &q); err != nil {
		return nil, nil, err
	}
	mode, err := telemetry.ModeByName(q.Mode)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", errRequest, err)
	}

	note := asked(q.Request, "to measure seeds in mode "+q.Mode, q.Why)
	var commands []state.Command
	for i, l := range t.Model.Kasmina.Lattices() {
		next := l.Telemetry() // requests to a board set only the mode and the interval
		next.Mode, next.Every = mode, q.Every
		if err := next.Check(); err != nil {
			return nil, nil, fmt.Errorf("%w: %w", errRequest, err)
		}
		commands = append(commands, state.Command{Action: state.Measure, Layer: i, Telemetry: next,
			Why: note})
	}
	if len(commands) == 0 {
		return nil, nil, errors.New("the model of the run has no seeds")
	}

	return t.Ask(llm.Request{Commands: commands, Note: note}), commands[:1], nil
}

// readSave reads a request to save.
func readSave(r *http.Request, t *llm.Trainer) (<-chan error, []state.Command, error) {
	var q api.Request
	if err := read(r, &q); err != nil {
		return nil, nil, err
	}
	return t.Ask(llm.Request{Save: true, Note: asked(q, "to save", q.Why)}), nil, nil
}

// readStop reads a request to stop.
func readStop(r *http.Request, t *llm.Trainer) (<-chan error, []state.Command, error) {
	var q api.Request
	if err := read(r, &q); err != nil {
		return nil, nil, err
	}
	answer := make(chan error, 1)
	answer <- t.Stop(asked(q, "to stop", q.Why))
	return answer, nil, nil
}

// newToken returns a token that cannot be guessed.
func newToken() string { return rand.Text() }
