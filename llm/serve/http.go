package serve

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"
)

// statusClientGone is the status that the metrics report for clients that disconnect.
const statusClientGone = 499

// An apiError is an error that clients see.
type apiError struct {
	status  int
	param   string // name of the parameter at fault, if any
	code    string
	message string
}

func (e *apiError) Error() string { return e.message }

// invalid returns an error about a parameter.
func invalid(param, format string, args ...any) *apiError {
	message := fmt.Sprintf(format, args...)
	if param != "" {
		message = param + ": " + message
	}
	return &apiError{status: http.StatusBadRequest, param: param, message: message}
}

// errorTypes are the types of errors by status, as both APIs name them.
var errorTypes = map[int]string{
	http.StatusBadRequest:            "invalid_request_error",
	http.StatusUnauthorized:          "authentication_error",
	http.StatusForbidden:             "permission_error",
	http.StatusNotFound:              "not_found_error",
	http.StatusMethodNotAllowed:      "invalid_request_error",
	http.StatusRequestTimeout:        "timeout_error",
	http.StatusRequestEntityTooLarge: "request_too_large",
	http.StatusTooManyRequests:       "rate_limit_error",
	http.StatusGatewayTimeout:        "timeout_error",
}

// body returns an error in the shape of the API that a request uses.
func (e *apiError) body(r *http.Request) any {
	kind := errorTypes[e.status]
	if kind == "" {
		kind = "server_error"
	}
	if strings.HasPrefix(r.URL.Path, "/v1/messages") {
		if kind == "server_error" {
			kind = "api_error"
		}
		return map[string]any{"type": "error", "error": map[string]any{"type": kind,
			"message": e.message}}
	}

	null := func(s string) any {
		if s == "" {
			return nil
		}
		return s
	}
	return map[string]any{"error": map[string]any{"message": e.message, "type": kind,
		"param": null(e.param), "code": null(e.code)}}
}

// asAPIError returns an error for clients.
func asAPIError(err error) *apiError {
	var e *apiError
	if !errors.As(err, &e) {
		e = &apiError{status: http.StatusInternalServerError, message: err.Error()}
	}
	return e
}

// refuse answers with an error.
func refuse(w http.ResponseWriter, r *http.Request, err error) {
	e := asAPIError(err)
	switch e.status {
	case http.StatusTooManyRequests:
		w.Header().Set("Retry-After", "1")
	case http.StatusUnauthorized:
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	writeJSON(w, e.status, e.body(r))
}

// encode returns a value as JSON on one line, without a line end.
func encode(v any) []byte {
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		panic(err) // the values are of our own types
	}
	return bytes.TrimSuffix(text.Bytes(), []byte("\n"))
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(append(encode(v), '\n'))
}

// read reads the parameters of a request.
func (s *Server) read(w http.ResponseWriter, r *http.Request) (*params, error) {
	// The deadline must not remain, because it would end requests that take longer to answer.
	control := http.NewResponseController(w)
	control.SetReadDeadline(time.Now().Add(s.options.ClientTimeout))
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, s.options.MaxBody))
	control.SetReadDeadline(time.Time{})

	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, &apiError{status: http.StatusRequestEntityTooLarge,
			message: fmt.Sprintf("the request has more than %d bytes", s.options.MaxBody)}
	case errors.Is(err, os.ErrDeadlineExceeded):
		w.Header().Set("Connection", "close")
		return nil, &apiError{status: http.StatusRequestTimeout,
			message: fmt.Sprintf("the request did not arrive within %v", s.options.ClientTimeout)}
	case err != nil:
		return nil, &apiError{status: http.StatusBadRequest, message: "reading the request: " + err.Error()}
	}

	p := &params{}
	if err := json.Unmarshal(text, &p.all); err != nil || p.all == nil {
		message := "the body of the request must be a JSON object"
		if err != nil {
			message += ": " + err.Error()
		}
		return nil, &apiError{status: http.StatusBadRequest, message: message}
	}
	return p, nil
}

// deadline gives the client time to receive the next part of an answer.
func (s *Server) deadline(w http.ResponseWriter) {
	http.NewResponseController(w).SetWriteDeadline(time.Now().Add(s.options.ClientTimeout))
}

// A format puts answers into the form of an API.
type format interface {
	// whole returns the body of an answer that is not streamed.
	whole([]result) any
	// start, next and finish return the events of a stream.
	start() []event
	next(piece) []event
	finish([]result) []event
}

// An event is a part of a stream. Its data is a value to be encoded as JSON, or raw text.
type event struct {
	name string
	data any
	raw  string
}

// stream answers with server-sent events.
func (s *Server) stream(ctx context.Context, w http.ResponseWriter, r *http.Request, j *job, f format) {
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // for nginx
	control := http.NewResponseController(w)
	defer control.SetWriteDeadline(time.Time{}) // the connection can serve more requests

	send := func(events []event) error {
		var text bytes.Buffer
		for _, e := range events {
			if e.name != "" {
				fmt.Fprintf(&text, "event: %s\n", e.name)
			}
			data := []byte(e.raw)
			if e.data != nil {
				data = encode(e.data)
			}
			fmt.Fprintf(&text, "data: %s\n\n", data)
		}

		if text.Len() == 0 {
			return nil
		}
		s.deadline(w)
		if _, err := w.Write(text.Bytes()); err != nil {
			return fmt.Errorf("writing to the client: %w", err)
		}
		return control.Flush()
	}

	results := make([]result, len(j.choices))
	err := send(f.start())
	if err == nil {
		err = s.run(ctx, j, func(p piece) error {
			results[p.choice].add(p)
			return send(f.next(p))
		})
	}
	if err == nil {
		err = send(f.finish(results))
	}
	if err == nil || r.Context().Err() != nil {
		return
	}

	// The status has been sent, so the error is an event.
	e := event{data: asAPIError(s.explain(r, err)).body(r)}
	if strings.HasPrefix(r.URL.Path, "/v1/messages") {
		e.name = "error"
	}
	send([]event{e})
}

func hashOf(key string) []byte {
	sum := sha256.Sum256([]byte(key))
	return sum[:]
}

// keyOf returns the API key of a request, from the header that OpenAI's or Anthropic's API uses.
func keyOf(r *http.Request) string {
	if scheme, key, ok := strings.Cut(r.Header.Get("Authorization"), " "); ok &&
		strings.EqualFold(scheme, "Bearer") {
		return strings.TrimSpace(key)
	}
	return r.Header.Get("X-Api-Key")
}

// guarded refuses requests without a valid API key. Comparing hashes takes the same time for every key.
func (s *Server) guarded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if len(s.keys) == 0 {
			next.ServeHTTP(w, r)
			return
		}

		given, valid := hashOf(keyOf(r)), 0
		for _, key := range s.keys {
			valid |= subtle.ConstantTimeCompare(given, key)
		}
		if valid != 1 {
			w.Header().Set("Connection", "close") // the body is not read
			refuse(w, r, &apiError{status: http.StatusUnauthorized, code: "invalid_api_key",
				message: "the API key is missing or wrong: send it as \"Authorization: Bearer KEY\""})
			return
		}
		next.ServeHTTP(w, r)
	})
}

// crossOrigin answers CORS preflight requests, which browsers send before scripts of other pages may
// use the server.
//
// Browsers send some cross-origin requests without a preflight request. crossOrigin refuses them, so that no
// web site can use a server on the reader's computer. Without API keys, it also refuses unknown host names,
// since a hostile site could let its name resolve to that computer (DNS rebinding).
func (s *Server) crossOrigin(next http.Handler) http.Handler {
	hosts := []string{"localhost"}
	if name, err := os.Hostname(); err == nil {
		hosts = append(hosts, name)
	}

	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h, origin := w.Header(), r.Header.Get("Origin")
		h.Set("X-Content-Type-Options", "nosniff")
		if len(s.options.Origins) > 0 {
			h.Add("Vary", "Origin")
		}

		switch all := slices.Contains(s.options.Origins, "*"); {
		case origin == "":
		case all || slices.Contains(s.options.Origins, origin):
			h.Set("Access-Control-Allow-Origin", origin)
			if r.Method == http.MethodOptions {
				h.Set("Access-Control-Allow-Methods", "GET, POST")
				h.Set("Access-Control-Allow-Headers", allowedHeaders(r))
				h.Set("Access-Control-Max-Age", "600")
				w.WriteHeader(http.StatusNoContent)
				return
			}
		case !sameOrigin(origin, r.Host) || len(s.keys) == 0 && !localName(r.Host, hosts):
			h.Set("Connection", "close")
			refuse(w, r, &apiError{status: http.StatusForbidden, message: fmt.Sprintf("the web page %.100s "+
				"may not use this server: name its origin in the server's options to permit it", origin)})
			return
		}
		next.ServeHTTP(w, r)
	})
}

// allowedHeaders returns the headers that a script may send, which are all headers that the
// preflight request names.
func allowedHeaders(r *http.Request) string {
	if asked := r.Header.Get("Access-Control-Request-Headers"); asked != "" {
		return asked
	}
	return "Authorization, Content-Type, X-Api-Key"
}

// sameOrigin reports whether a page comes from the host that a request was sent to.
func sameOrigin(origin, host string) bool {
	u, err := url.Parse(origin)
	return err == nil && strings.EqualFold(u.Host, host)
}

// localName reports whether the host of a request is an IP address or in names.
func localName(host string, names []string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.Trim(host, "[]")
	return net.ParseIP(host) != nil || slices.ContainsFunc(names, func(name string) bool {
		return strings.EqualFold(name, host)
	})
}
