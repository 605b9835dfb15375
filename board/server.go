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

// Limits for viewers.
const (
	maxViewers         = 64 // simultaneous streams
	maxViewersOfClient = maxViewers * 3 / 4
	maxRequests        = 200 // per second, by all viewers together
	maxHeader          = 1 << 14
)

// Listen serves the board in the background, at an address such as 127.0.0.1:6060, until Close. It
// returns the URL of the page, which includes the token if the board permits steering.
//
// With port 0, the system chooses a port. With an address without a host, such as :6060, other
// computers can also open the page.
func (b *Board) Listen(addr string) (url string, err error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return "", fmt.Errorf("board: Listen: %w; use an address such as 127.0.0.1:6060 that no "+
			"other program uses, or port 0 to let the system choose", err)
	}
	if err := b.serve(newConnections(l)); err != nil {
		return "", err
	}

	url = "http://" + shown(l.Addr().String()) + "/"
	if b.token != "" {
		url += "#token=" + b.token // browsers do not send a fragment
	}
	return url, nil
}

// serve serves the board to the connections in the background, until Close.
func (b *Board) serve(l *connections) error {
	s := &http.Server{Handler: l.tracked(b), ConnContext: l.context,
		ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second,
		IdleTimeout: time.Minute, MaxHeaderBytes: maxHeader}

	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return errors.Join(errors.New("board: Listen: the board is closed"), l.Close())
	}

	b.servers = append(b.servers, s)
	go s.Serve(l)
	return nil
}

// shown returns an address that a browser on this computer can open.
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

// routes returns the handler of all paths.
func (b *Board) routes() http.Handler {
	files, err := fs.Sub(page, "page")
	if err != nil {
		panic(err) // the folder is embedded
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
			refuse(w, http.StatusNotFound, "no such run; /api/v1/runs lists all runs")
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

// lattice answers with the picture of the seeds.
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

// seed answers with the state of a seed.
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
		shortfall, err := t.Model.Kasmina.Lattice(layer).Shortfall(n)
		if err == nil && shortfall.Condition != "" {
			s.WaitsFor = shortfall.String()
		}
	}
	answer(w, s)
}

// number parses a non-negative number. An empty text is 0.
func number(s string) (int, error) {
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(s, 10, 31)
	if err != nil {
		return 0, fmt.Errorf("%.40q is not a non-negative number", s)
	}
	return int(n), nil
}

// answer answers with a value as JSON.
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

// policy permits the page to load only files of the board.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: " +
	"data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// guarded limits the request rate, so that viewers cannot slow a run down, and rejects foreign host
// names.
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
			h.Set("Connection", "close") // otherwise the server waits for the rest of the body
		}

		switch {
		case !requests.take(clientOf(r.RemoteAddr), time.Now()):
			h.Set("Retry-After", "1")
			refuse(w, http.StatusTooManyRequests,
				"too many requests: the board answers a few hundred per second")
		case !ours(r.Host, known):
			refuse(w, http.StatusForbidden, fmt.Sprintf("the host name %.80q is not permitted: "+
				"use the address of the computer, or board.WithHosts", r.Host))
		default:
			next.ServeHTTP(w, r)
		}
	})
}

// ours reports whether the host of a request is an address or one of the names.
func ours(host string, names []string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.Trim(host, "[]")
	return net.ParseIP(host) != nil || slices.ContainsFunc(names, func(name string) bool {
		return strings.EqualFold(name, host)
	})
}
