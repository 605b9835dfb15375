// Package serve serves language models over HTTP, through the APIs of OpenAI and Anthropic.
//
//	POST /v1/chat/completions       answers a conversation
//	POST /v1/completions            continues a text
//	POST /v1/embeddings             returns a vector for each text
//	POST /v1/messages               answers a conversation (Anthropic)
//	POST /v1/messages/count_tokens  counts the tokens of a conversation (Anthropic)
//	GET  /v1/models                 lists the models
//	GET  /health                    reports that the server runs
//	GET  /metrics                   reports counters for Prometheus
//	GET  /                          serves a page for chatting with the model
//
// Unknown parameters have no effect. A request with a known but unsupported parameter that would change the answer is
// rejected with an error that names the parameter.
package serve

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"
)

// Options configure a [Server]. Zero values select the defaults.
type Options struct {
	// Keys lists the accepted API keys. If it is empty, requests need no key.
	Keys []string
	// Slots is the maximum number of answers that are generated at the same time. The default is 32.
	Slots int
	// Queue is the maximum number of requests that wait for slots. Further requests are rejected with status 429.
	// The default is 128; with a negative number, no request waits.
	Queue int
	// MaxBody limits the bytes of a request. The default is 8 MiB.
	MaxBody int64
	// Timeout limits the time between the end of a request and the end of its answer. The default is 10 minutes.
	Timeout time.Duration
	// ClientTimeout limits the time that a client takes to send a request or to receive the next part
	// of an answer. The default is 30 seconds.
	ClientTimeout time.Duration
	// Origins lists the web sites, such as "https://example.com", that may use the server from a
	// browser, in addition to its own page; "*" permits all. (Cross-origin resource sharing, CORS.)
	Origins []string
}

// Server is an [http.Handler] that serves models.
type Server struct {
	options Options
	models  []*Model
	keys    [][]byte // hashes

	matchers map[*Model]*matchers
	slots    *slots
	metrics  metrics
	handler  http.Handler
	started  time.Time
}

//go:embed page
var page embed.FS

// New returns a server for models with distinct names. Requests that do not name a model use the first one.
func New(o Options, models ...*Model) (*Server, error) {
	o.Slots, o.Queue, o.MaxBody = cmp.Or(o.Slots, 32), cmp.Or(o.Queue, 128), cmp.Or(o.MaxBody, 8<<20)
	o.Timeout = cmp.Or(o.Timeout, 10*time.Minute)
	o.ClientTimeout = cmp.Or(o.ClientTimeout, 30*time.Second)
	switch {
	case o.Slots < 1:
		return nil, fmt.Errorf("serve: New: Slots is %d, want at least 1", o.Slots)
	case o.MaxBody < 1:
		return nil, fmt.Errorf("serve: New: MaxBody is %d, want at least 1", o.MaxBody)
	case o.Timeout < 0 || o.ClientTimeout < 0:
		return nil, fmt.Errorf("serve: New: Timeout is %v and ClientTimeout %v, want at least 0",
			o.Timeout, o.ClientTimeout)
	case len(models) == 0:
		return nil, errors.New("serve: New: there are no models")
	case slices.Contains(o.Keys, ""):
		return nil, errors.New("serve: New: an API key is empty")
	}

	s := &Server{options: o, slots: newSlots(o.Slots, max(0, o.Queue)), started: time.Now(),
		matchers: map[*Model]*matchers{}}
	for _, m := range models {
		if err := m.check(); err != nil {
			return nil, fmt.Errorf("serve: New: %w", err)
		}
		if s.model(m.Name) != nil {
			return nil, fmt.Errorf("serve: New: two models have the name %q", m.Name)
		}
		s.models, s.matchers[m] = append(s.models, m), &matchers{model: m}
	}

	for _, key := range o.Keys {
		s.keys = append(s.keys, hashOf(key))
	}

	s.handler = s.routes()
	return s, nil
}

// model returns the model with a name, or nil.
func (s *Server) model(name string) *Model {
	for _, m := range s.models {
		if m.Name == name {
			return m
		}
	}
	return nil
}

// ServeHTTP implements [http.Handler].
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.handler.ServeHTTP(w, r) }

// Running returns the number of requests that are being answered and the number of waiting requests.
func (s *Server) Running() (running, waiting int) { return s.slots.counts() }

// policy is the Content-Security-Policy of the chat page, which may load only files of this server.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; " +
	"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// routes returns the handler for all paths.
func (s *Server) routes() http.Handler {
	files, err := fs.Sub(page, "page")
	if err != nil {
		panic(err) // the folder is embedded
	}

	mux := http.NewServeMux()
	assets := http.FileServerFS(files)
	for _, name := range []string{"{$}", "chat.js", "style.css"} {
		mux.HandleFunc("GET /"+name, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Security-Policy", policy)
			w.Header().Set("Referrer-Policy", "no-referrer")
			assets.ServeHTTP(w, r)
		})
	}
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
	})

	// Everything else needs a key.
	guarded := func(pattern string, h http.HandlerFunc) { mux.Handle(pattern, s.guarded(h)) }
	guarded("GET /metrics", s.serveMetrics)
	guarded("GET /v1/models", s.listModels)
	guarded("GET /v1/models/{name...}", s.describeModel)
	paths := []string{"/v1/models"}
	for path, h := range map[string]http.HandlerFunc{
		"/v1/chat/completions":      s.answering(s.parseChat),
		"/v1/completions":           s.answering(s.parseText),
		"/v1/embeddings":            s.serveEmbeddings,
		"/v1/messages":              s.answering(s.parseMessages),
		"/v1/messages/count_tokens": s.countTokens,
	} {
		paths = append(paths, path)
		guarded("POST "+path, h)
		guarded(path, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Allow", "POST")
			refuse(w, r, &apiError{status: http.StatusMethodNotAllowed,
				message: fmt.Sprintf("%s takes POST requests, and this one is %s", path, r.Method)})
		})
	}
	guarded("/", func(w http.ResponseWriter, r *http.Request) {
		message := fmt.Sprintf("there is no %s %.100s", r.Method, r.URL.Path)
		switch rest, twice := strings.CutPrefix(r.URL.Path, "/v1/v1"); {
		case twice && slices.Contains(paths, "/v1"+rest):
			message += ": the client adds /v1 itself, so remove it from the client's address of the server"
		case slices.Contains(paths, "/v1"+r.URL.Path):
			message += ": add /v1 to the client's address of the server"
		}
		refuse(w, r, &apiError{status: http.StatusNotFound, message: message})
	})

	return s.counted(s.crossOrigin(mux))
}

// modelObject describes a model as OpenAI's API does.
type modelObject struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
	Context int    `json:"max_model_len"`
	Chat    bool   `json:"chat"` // whether the model has a chat template
}

func (s *Server) describe(m *Model) modelObject {
	return modelObject{ID: m.Name, Object: "model", Created: s.started.Unix(), OwnedBy: "kasmina",
		Context: m.Context, Chat: m.Template != nil}
}

func (s *Server) listModels(w http.ResponseWriter, _ *http.Request) {
	var all []modelObject
	for _, m := range s.models {
		all = append(all, s.describe(m))
	}
	writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": all})
}

func (s *Server) describeModel(w http.ResponseWriter, r *http.Request) {
	m, err := s.find(r.PathValue("name"))
	if err != nil {
		refuse(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, s.describe(m))
}

// find returns the model that a request names.
func (s *Server) find(name string) (*Model, error) {
	if name == "" {
		return s.models[0], nil
	}
	if m := s.model(name); m != nil {
		return m, nil
	}
	return nil, &apiError{status: http.StatusNotFound, param: "model", code: "model_not_found",
		message: fmt.Sprintf("there is no model %.100q; GET /v1/models lists the models", name)}
}

// errDeadline is the cause with which the context of a request ends after Options.Timeout.
var errDeadline = errors.New("the answer took too long")

// answering returns a handler that answers the requests that parse turns into jobs.
func (s *Server) answering(parse func(*params) (*job, format, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		p, err := s.read(w, r)
		if err != nil {
			refuse(w, r, err)
			return
		}

		ctx, cancel := context.WithTimeoutCause(r.Context(), s.options.Timeout, errDeadline)
		defer cancel()
		j, f, err := parse(p)
		if err != nil {
			refuse(w, r, err)
			return
		}

		n := min(len(j.choices), s.options.Slots)
		if err := s.slots.acquire(ctx, n); err != nil {
			refuse(w, r, s.explain(r, err))
			return
		}
		defer s.slots.release(n)

		if j.stream {
			s.stream(ctx, w, r, j, f)
			return
		}

		results, err := s.collect(ctx, j)
		if err != nil {
			refuse(w, r, s.explain(r, err))
			return
		}
		s.deadline(w)
		writeJSON(w, http.StatusOK, f.whole(results))
	}
}

// explain returns the error to report to the client for an error from waiting or generating.
func (s *Server) explain(r *http.Request, err error) error {
	var e *apiError
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(err, errBusy):
		return &apiError{status: http.StatusTooManyRequests, code: "rate_limit_exceeded",
			message: "the server is busy: try again later"}
	case errors.Is(err, errDeadline):
		return &apiError{status: http.StatusGatewayTimeout, code: "timeout",
			message: fmt.Sprintf("the answer took more than %v", s.options.Timeout)}
	case r.Context().Err() != nil:
		return &apiError{status: statusClientGone, message: "the client has disconnected"}
	}
	return &apiError{status: http.StatusInternalServerError, message: err.Error()}
}

// Limits for connections.
const (
	headerTimeout = 10 * time.Second
	idleTimeout   = 2 * time.Minute
	maxHeader     = 1 << 16
)

// Serve answers the requests that arrive at l until ctx is canceled. It then accepts no more requests,
// finishes those in progress, and returns nil.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	h := &http.Server{Handler: s, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout,
		MaxHeaderBytes: maxHeader}
	failed := make(chan error, 1)
	go func() { failed <- h.Serve(l) }()

	select {
	case err := <-failed:
		return fmt.Errorf("serve: Serve: %w", err)
	case <-ctx.Done():
	}

	if err := h.Shutdown(context.Background()); err != nil {
		return fmt.Errorf("serve: Serve: %w", err)
	}
	return nil
}
