package board

import (
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/board/internal/store"
)

//go:embed page
var page embed.FS

// Limits of what viewers may ask.
const (
	maxViewers         = 64 // streams at a time
	maxViewersOfClient = maxViewers * 3 / 4
	maxRequests        = 200 // a second, of all viewers together
	maxHeader          = 1 << 14
)

// Listen serves the board at an address such as 127.0.0.1:6060, in the background, until Close. It
// returns the page's URL, with the token of a board that has one. With port 0 the system chooses
// one. An address without a host, such as :6060, lets other computers look too.
func (b *Board) Listen(addr string) (url string, err error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return "", fmt.Errorf("board: Listen: %w; want an address such as 127.0.0.1:6060 that no "+
			"other program has, or one with port 0 for any", err)
	}
	places := newConnections(l)
	s := &http.Server{Handler: places.tracked(b), ConnContext: places.context,
		ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second,
		IdleTimeout: time.Minute, MaxHeaderBytes: maxHeader}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.handler == nil {
		return "", errors.Join(fmt.Errorf("board: Listen: %w", errZero), l.Close())
	}
	if b.closed {
		return "", errors.Join(errors.New("board: Listen: the board is closed"), l.Close())
	}
	b.servers = append(b.servers, s)
	go s.Serve(places)
	url = "http://" + shown(l.Addr().String()) + "/"
	if b.token != "" {
		url += "#token=" + b.token // which browsers keep to themselves
	}
	return url, nil
}

// shown is an address as a browser on this computer takes it.
func shown(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return addr
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = "localhost"
	}
	return net.JoinHostPort(host, port)
}

// routes are the board's pages.
func (b *Board) routes() http.Handler {
	files, err := fs.Sub(page, "page")
	if err != nil {
		panic(err) // the folder is in the program
	}
	mux := http.NewServeMux()
	mux.Handle("GET /{$}", http.FileServerFS(files))
	for _, name := range []string{"app.js", "charts.js", "lattice.js", "control.js", "style.css",
		"uplot.js", "uplot.css",
		"uplot.LICENSE", "icon.svg"} {
		mux.Handle("GET /"+name, http.FileServerFS(files))
	}
	mux.HandleFunc("GET /metrics", b.metrics)
	mux.HandleFunc("GET /api/v1/runs", func(w http.ResponseWriter, r *http.Request) {
		runs := []api.Run{}
		for _, run := range b.all() {
			runs = append(runs, run.Status())
		}
		answer(w, runs)
	})
	mux.HandleFunc("GET /api/v1/cards", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, b.gpus())
	})
	get := func(path string, f func(http.ResponseWriter, *http.Request, *store.Run)) {
		mux.HandleFunc("GET /api/v1/runs/{run}"+path, func(w http.ResponseWriter, r *http.Request) {
			if run := b.byID(r.PathValue("run")); run != nil {
				f(w, r, run)
				return
			}
			refuse(w, http.StatusNotFound, "there is no such run; /api/v1/runs lists them")
		})
	}
	get("", func(w http.ResponseWriter, _ *http.Request, run *store.Run) {
		answer(w, run.Status())
	})
	get("/series", func(w http.ResponseWriter, _ *http.Request, run *store.Run) {
		answer(w, run.Series())
	})
	get("/lattice", lattice)
	get("/events", func(w http.ResponseWriter, r *http.Request, run *store.Run) {
		answerFrom(w, r, run.Events)
	})
	get("/groups", func(w http.ResponseWriter, r *http.Request, run *store.Run) {
		answerFrom(w, r, run.Groups)
	})
	get("/history", func(w http.ResponseWriter, _ *http.Request, run *store.Run) {
		answer(w, run.History())
	})
	get("/reports", func(w http.ResponseWriter, _ *http.Request, run *store.Run) {
		answer(w, run.Reports())
	})
	get("/seeds/{layer}/{seed}", b.seed)
	mux.HandleFunc("GET /api/v1/stream", b.stream)
	b.control(mux)
	return mux
}

func lattice(w http.ResponseWriter, _ *http.Request, run *store.Run) {
	text, err := run.Lattice()
	if err != nil {
		refuse(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write(text)
}

// maxAnswered limits the events of one answer.
const maxAnswered = 10_000

// answerFrom answers with the part of a list that starts with the number in the query.
func answerFrom[T any](w http.ResponseWriter, r *http.Request, list func(from, n int) []T) {
	from, err := number(r.FormValue("from"))
	if err != nil {
		refuse(w, http.StatusBadRequest, "from: "+err.Error())
		return
	}
	answer(w, list(from, maxAnswered))
}

func (b *Board) seed(w http.ResponseWriter, r *http.Request, run *store.Run) {
	layer, err1 := number(r.PathValue("layer"))
	n, err2 := number(r.PathValue("seed"))
	if err := errors.Join(err1, err2); err != nil {
		refuse(w, http.StatusBadRequest, err.Error())
		return
	}
	s, ok := run.Seed(layer, n)
	if !ok {
		refuse(w, http.StatusNotFound, fmt.Sprintf("the run has no seed %d in layer %d", n, layer))
		return
	}
	if _, t := b.trainer(run.ID()); t != nil && layer < t.Model.Kasmina.Layers() {
		lacks, err := t.Model.Kasmina.Lattice(layer).Shortfall(n)
		if err == nil && lacks.Condition != "" {
			s.WaitsFor = lacks.String()
		}
	}
	answer(w, s)
}

// number reads a number from 0 on; none is 0.
func number(s string) (int, error) {
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(s, 10, 31)
	if err != nil {
		return 0, fmt.Errorf("%.40q is no number from 0 on", s)
	}
	return int(n), nil
}

func answer(w http.ResponseWriter, v any) { answerWith(w, http.StatusOK, v) }

// answerWith answers with a status and a value as JSON.
func answerWith(w http.ResponseWriter, status int, v any) {
	text, err := json.Marshal(v)
	if err != nil {
		refuse(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(text)
}

// refuse answers with an error.
func refuse(w http.ResponseWriter, status int, why string) {
	text, _ := json.Marshal(map[string]string{"error": why})
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(text)
}

// policy lets the page load what the board serves, and nothing else.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: " +
	"data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// guarded answers only as many requests as cost a run nothing, and only those that were meant for
// the board.
func (b *Board) guarded(next http.Handler) http.Handler {
	requests := &rates{perSecond: maxRequests}
	known := append([]string{"localhost"}, b.config.hosts...)
	if name, err := os.Hostname(); err == nil {
		known = append(known, name)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		if r.Method != http.MethodPost && r.ContentLength != 0 {
			h.Set("Connection", "close") // or the server would wait for a body that nobody reads
		}
		switch {
		case !requests.take(clientOf(r.RemoteAddr), time.Now()):
			h.Set("Retry-After", "1")
			refuse(w, http.StatusTooManyRequests,
				"too many requests: the board answers a few hundred a second")
		case !ours(r.Host, known):
			refuse(w, http.StatusForbidden, fmt.Sprintf("the name %.80q is not known to be this "+
				"board's: use its address, or board.WithHosts", r.Host))
		default:
			next.ServeHTTP(w, r)
		}
	})
}

// ours reports whether a request's host is an address or one of the names.
func ours(host string, names []string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.Trim(host, "[]")
	return net.ParseIP(host) != nil || slices.ContainsFunc(names, func(name string) bool {
		return strings.EqualFold(name, host)
	})
}
