package serve

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// metrics counts requests and tokens.
type metrics struct {
	prompts, cached, drawn atomic.Int64 // tokens

	mu       sync.Mutex
	requests map[served]int64
	seconds  map[string]*duration // by path
}

// served describes requests by the pattern of their handler, here called path, and the status of
// their answers.
type served struct {
	path   string
	status int
}

// A duration is the sum of the times of several requests.
type duration struct {
	sum   time.Duration
	count int64
}

func (m *metrics) prompt(tokens int) { m.prompts.Add(int64(tokens)) }
func (m *metrics) token()            { m.drawn.Add(1) }

func (m *metrics) request(path string, status int, took time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.requests == nil {
		m.requests, m.seconds = map[served]int64{}, map[string]*duration{}
	}
	m.requests[served{path, status}]++
	d := m.seconds[path]
	if d == nil {
		d = &duration{}
		m.seconds[path] = d
	}
	d.sum, d.count = d.sum+took, d.count+1
}

// A recorder remembers the status of an answer.
type recorder struct {
	http.ResponseWriter
	status int
}

func (r *recorder) WriteHeader(status int) {
	r.status = cmp.Or(r.status, status)
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(p []byte) (int, error) {
	r.status = cmp.Or(r.status, http.StatusOK)
	return r.ResponseWriter.Write(p)
}

// Unwrap lets [http.ResponseController] find the original ResponseWriter.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

// counted counts requests by handler and by status. There are few handlers, unlike paths.
func (s *Server) counted(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		began, rec := time.Now(), &recorder{ResponseWriter: w}
		next.ServeHTTP(rec, r)
		status := cmp.Or(rec.status, http.StatusOK)
		if r.Context().Err() != nil {
			status = statusClientGone
		}
		s.metrics.request(cmp.Or(r.Pattern, "none"), status, time.Since(began))
	})
}

// serveMetrics answers with the counters in Prometheus' text format.
func (s *Server) serveMetrics(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	single := func(name, kind, help string, value any) {
		fmt.Fprintf(w, "# HELP %s %s\n# TYPE %s %s\n%s %v\n", name, help, name, kind, name, value)
	}
	running, waiting := s.Running()
	single("kasmina_requests_running", "gauge", "Requests that are being answered.", running)
	single("kasmina_requests_waiting", "gauge", "Requests that wait for a slot.", waiting)
	single("kasmina_prompt_tokens_total", "counter", "Tokens of prompts.", s.metrics.prompts.Load())
	single("kasmina_cached_tokens_total", "counter", "Tokens of prompts that an earlier request had computed.",
		s.metrics.cached.Load())
	single("kasmina_generated_tokens_total", "counter", "Tokens of answers.", s.metrics.drawn.Load())

	s.metrics.mu.Lock()
	defer s.metrics.mu.Unlock()
	name := "kasmina_requests_total"
	fmt.Fprintf(w, "# HELP %s Requests by handler and status.\n# TYPE %s counter\n", name, name)
	for _, key := range slices.SortedFunc(maps.Keys(s.metrics.requests), func(a, b served) int {
		return cmp.Or(cmp.Compare(a.path, b.path), cmp.Compare(a.status, b.status))
	}) {
		fmt.Fprintf(w, "%s{handler=%q,status=\"%d\"} %d\n", name, key.path, key.status,
			s.metrics.requests[key])
	}

	name = "kasmina_request_seconds"
	fmt.Fprintf(w, "# HELP %s Time from request to end of answer.\n# TYPE %s summary\n", name, name)
	for _, path := range slices.Sorted(maps.Keys(s.metrics.seconds)) {
		d := s.metrics.seconds[path]
		fmt.Fprintf(w, "%s_sum{handler=%q} %g\n%s_count{handler=%q} %d\n", name, path, d.sum.Seconds(), name,
			path, d.count)
	}
}
