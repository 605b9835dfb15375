package serve

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm/sampler"
)

// noLeak fails a test that leaks goroutines. It must be called before anything else registers a cleanup.
func noLeak(t *testing.T) {
	t.Helper()
	http.DefaultClient.CloseIdleConnections()
	before, _ := goroutines()
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		var after int
		var stacks string
		for began := time.Now(); time.Since(began) < patience; time.Sleep(20 * time.Millisecond) {
			if after, stacks = goroutines(); after <= before {
				return
			}
		}
		t.Errorf("there were %d goroutines, and now there are %d:\n%s", before, after, stacks)
	})
}

// goroutines returns the number of goroutines and their stacks. The workers of CPU ops are permanent and do
// not count.
func goroutines() (n int, stacks string) {
	all := make([]byte, 1<<20)
	stacks = string(all[:runtime.Stack(all, true)])
	for _, stack := range strings.Split(stacks, "\n\n") {
		if !strings.Contains(stack, "internal/cpu.help") {
			n++
		}
	}
	return n, stacks
}

// patience is much longer than anything takes, even on a busy machine.
const patience = time.Minute

// await waits until a condition holds.
func await(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for began := time.Now(); !holds(); time.Sleep(time.Millisecond) {
		if time.Since(began) > patience {
			t.Fatalf("%s: not after %v", what, patience)
		}
	}
}

// TestDisconnect checks that a client which disconnects frees its slot before the next token, wherever it does so.
func TestDisconnect(t *testing.T) {
	noLeak(t)

	// The model makes a few tokens. The next one never comes.
	const few = 3
	var tokens atomic.Int64
	f := &fake{answer: says("on and on")[:1], wait: func(ctx context.Context) error {
		if tokens.Add(1) <= few {
			return nil
		}
		<-ctx.Done()
		return context.Cause(ctx)
	}}
	c := serve(t, f, Options{Slots: 1})

	for name, body := range map[string]string{
		"whole":    with(),
		"streamed": with(`"stream":true`),
		"several":  with(`"n":3`, `"stream":true`),
	} {
		tokens.Store(0)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		r, err := http.NewRequestWithContext(ctx, "POST", c.url+chatPath, strings.NewReader(body))
		require.NoError(t, err)
		ended := make(chan error, 1)
		go func() {
			answer, err := http.DefaultClient.Do(r)
			if err == nil {
				_, err = io.Copy(io.Discard, answer.Body)
				answer.Body.Close()
			}
			ended <- err
		}()
		await(t, name, func() bool { return tokens.Load() > few })
		cancel()
		await(t, name, func() bool {
			running, _ := c.server.Running()
			return running == 0 && f.active.Load() == 0
		})
		require.Error(t, <-ended)
	}

	// A waiting request leaves the queue.
	tokens.Store(0)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	first, err := http.NewRequestWithContext(ctx, "POST", c.url+chatPath, strings.NewReader(with(`"stream":true`)))
	require.NoError(t, err)
	answer, err := http.DefaultClient.Do(first)
	require.NoError(t, err)
	defer answer.Body.Close()
	waiting, leave := context.WithCancel(t.Context())
	second, err := http.NewRequestWithContext(waiting, "POST", c.url+chatPath, strings.NewReader(with()))
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() {
		_, err := http.DefaultClient.Do(second)
		ended <- err
	}()
	queued := func() int { _, waiting := c.server.Running(); return waiting }
	await(t, "queued", func() bool { return queued() == 1 })
	leave()
	await(t, "left the queue", func() bool { return queued() == 0 })
	require.EqualValues(t, 1, f.active.Load())
	require.Error(t, <-ended)
}

// TestQueue checks that requests wait for slots in order, and are rejected when too many wait.
func TestQueue(t *testing.T) {
	noLeak(t)
	release := make(chan struct{})
	f := &fake{answer: says("ok"), wait: func(ctx context.Context) error {
		select {
		case <-release:
		case <-ctx.Done():
		}
		return nil
	}}
	c := serve(t, f, Options{Slots: 2, Queue: 3})
	var group sync.WaitGroup
	var served atomic.Int64
	for i := range 5 {
		group.Go(func() {
			if status, _ := c.post(chatPath, with()); status == 200 {
				served.Add(1)
			}
		})
		await(t, "admitted", func() bool {
			running, waiting := c.server.Running()
			return running+waiting == i+1
		})
	}

	answer := c.do("POST", chatPath, with())
	require.Equal(t, 429, answer.StatusCode)
	require.Equal(t, "1", answer.Header.Get("Retry-After"))
	status, e := c.post(messagesPath, `{"max_tokens":5,"messages":[{"role":"user","content":"a"}]}`)
	require.Equal(t, 429, status)
	require.Equal(t, "rate_limit_error", e.at("error.type"))

	close(release)
	group.Wait()
	require.Equal(t, int64(5), served.Load())
	require.LessOrEqual(t, f.most.Load(), int64(2))
	c.ok(chatPath, with())
}

// TestSlots checks the accounting of slots with random requests that give up.
func TestSlots(t *testing.T) {
	s := newSlots(5, 100)
	var group sync.WaitGroup
	var used atomic.Int64
	for i := range 200 {
		group.Go(func() {
			n := 1 + i%5
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%7)*time.Millisecond)
			defer cancel()
			if err := s.acquire(ctx, n); err != nil {
				return
			}
			if now := used.Add(int64(n)); now > 5 {
				t.Errorf("%d slots are used", now)
			}
			time.Sleep(time.Millisecond)
			used.Add(int64(-n))
			s.release(n)
		})
	}
	group.Wait()
	running, waiting := s.counts()
	require.Zero(t, running)
	require.Zero(t, waiting)
	require.Equal(t, 5, s.free)

	// When a request gives up, the next, smaller request gets its slots.
	require.NoError(t, s.acquire(t.Context(), 3))
	ctx, cancel := context.WithCancel(t.Context())
	large, small := make(chan error, 1), make(chan error, 1)
	go func() { large <- s.acquire(ctx, 4) }()
	await(t, "large", func() bool { _, waiting := s.counts(); return waiting == 1 })
	go func() { small <- s.acquire(t.Context(), 2) }()
	await(t, "small", func() bool { _, waiting := s.counts(); return waiting == 2 })
	cancel()
	require.Error(t, <-large)
	require.NoError(t, <-small)
}

// TestTimeout checks the errors for answers that take too long.
func TestTimeout(t *testing.T) {
	noLeak(t)
	c := serve(t, &fake{answer: says("x")[:1], wait: func(ctx context.Context) error { // forever
		<-ctx.Done()
		return context.Cause(ctx)
	}}, Options{Timeout: 100 * time.Millisecond})
	status, e := c.post(chatPath, with())
	require.Equal(t, 504, status)
	require.Equal(t, "timeout", e.at("error.code"))

	// On a busy machine, the time may be over before the stream begins.
	stream := func(path, body string) []serverEvent {
		for {
			if answer := c.do("POST", path, body); answer.StatusCode != 504 {
				return c.events(answer)
			}
		}
	}
	events := stream(chatPath, with(`"stream":true`))
	require.Equal(t, "timeout", events[len(events)-1].at("error.code"))
	events = stream(messagesPath, `{"max_tokens":100,"stream":true,"messages":[{"role":"user","content":"a"}]}`)
	require.Equal(t, "error", events[len(events)-1].name)
	require.Equal(t, "timeout_error", events[len(events)-1].at("error.type"))
}

// failing is a generator that fails, or panics.
type failing struct {
	after int
	fault any
}

func (f failing) Generate(_ context.Context, _ []int, n int, s *sampler.Sampler) iter.Seq2[int, error] {
	return func(yield func(int, error) bool) {
		for range f.after {
			if !yield(says("x")[0], nil) {
				return
			}
		}
		if err, ok := f.fault.(error); ok {
			yield(0, err)
			return
		}
		panic(f.fault)
	}
}

// TestGeneratorFails checks that a faulty generator ends a request with an error, and not the server.
func TestGeneratorFails(t *testing.T) {
	noLeak(t)
	for _, fault := range []any{errors.New("out of memory"), "index out of range"} {
		for _, after := range []int{0, 3} {
			c := serve(t, failing{after, fault}, Options{})
			status, e := c.post(chatPath, with(`"n":4`))
			require.Equal(t, 500, status)
			require.Contains(t, e.at("error.message"), fmt.Sprint(fault))
			require.Equal(t, "server_error", e.at("error.type"))

			events := c.stream(chatPath, with(`"stream":true`))
			require.Contains(t, events[len(events)-1].at("error.message"), fmt.Sprint(fault))
			running, _ := c.server.Running()
			require.Zero(t, running)
		}
	}
}

// TestSlowClients checks that clients which send or receive too slowly are given up.
func TestSlowClients(t *testing.T) {
	noLeak(t)
	f := &fake{answer: says("x")[:1]}
	m := newModel(t, f, chatTemplate)
	m.Context = 1 << 30
	c := serveModel(t, m, Options{ClientTimeout: 150 * time.Millisecond})
	dial := func(c *client, body string, length int) net.Conn {
		conn, err := net.Dial("tcp", strings.TrimPrefix(c.url, "http://"))
		require.NoError(t, err)
		require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
		_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s", chatPath,
			length, body)
		require.NoError(t, err)
		return conn
	}

	// The body never ends.
	conn := dial(c, `{"messages":`, 1000)
	defer conn.Close()
	answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	require.Equal(t, 408, answer.StatusCode)
	answer.Body.Close()

	// The client does not read.
	body := with(`"stream":true`, `"logprobs":true`, `"top_logprobs":20`)
	stuck := dial(c, body, len(body))
	defer stuck.Close()
	await(t, "the answer begins", func() bool { return f.most.Load() == 1 })
	await(t, "the client is given up", func() bool {
		running, _ := c.server.Running()
		return running == 0 && f.active.Load() == 0
	})

	// The body is shorter than announced, and the connection ends.
	short := dial(serveModel(t, m, Options{ClientTimeout: patience}), `{"messages"`, 500)
	require.NoError(t, short.(*net.TCPConn).CloseWrite())
	answer, err = http.ReadResponse(bufio.NewReader(short), nil)
	require.NoError(t, err)
	require.Equal(t, 400, answer.StatusCode)
	answer.Body.Close()
	short.Close()

	// A long answer to a client that reads is not ended by the limit for a request's body.
	f.wait = slow(300 * time.Millisecond)
	c = serveModel(t, m, Options{ClientTimeout: time.Second})
	text, reason := joined(t, c.stream(chatPath, with(`"stream":true`, `"max_tokens":5`)), 0)
	require.Equal(t, "xxxxx", text)
	require.Equal(t, "length", reason)
}

// TestShutdown checks that Serve finishes the answers in progress and accepts no more.
func TestShutdown(t *testing.T) {
	noLeak(t)
	f := &fake{answer: says("a long answer"), wait: slow(30 * time.Millisecond)}
	s, err := New(Options{Slots: 1}, newModel(t, f, chatTemplate))
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx, l) }()

	// One request runs and another waits.
	c := &client{t: t, server: s, url: "http://" + l.Addr().String()}
	texts := make(chan string, 2)
	for range 2 {
		go func() {
			text, _ := joined(t, c.stream(chatPath, with(`"stream":true`)), 0)
			texts <- text
		}()
	}
	await(t, "two requests", func() bool {
		running, waiting := s.Running()
		return running+waiting == 2
	})
	cancel()
	require.Equal(t, "a long answer", <-texts)
	require.Equal(t, "a long answer", <-texts)
	require.NoError(t, <-ended)
	_, err = http.Get(c.url + "/health")
	require.Error(t, err)
}

// FuzzRequests sends random and mutilated requests. The server must answer each with a status other
// than 500.
func FuzzRequests(f *testing.F) {
	for _, body := range []string{with(), with(tools, `"stream":true`), `{"prompt":["a",[1,2]],"logprobs":1}`,
		`{"messages":[{"role":"user","content":[{"type":"text","text":"\ud800"}]}]}`,
		`{"prompt":"\u0000","stop":["\u0000"]}`, `{"prompt":"a","n":2,"logit_bias":{"1":-100}}`,
		`{"max_tokens":3,"messages":[{"role":"assistant","content":[{"type":"tool_use","input":[]}]}]}`} {
		f.Add(0, body)
		f.Add(1, body)
		f.Add(2, body)
	}
	f.Add(4, `{"input":["a",[1,2]],"encoding_format":"base64"}`)
	s, err := New(Options{}, newModel(f, embeddingFake{&fake{answer: bytewise("é<tool_call>{}</tool_call>")}}, toolTemplate))
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, path int, body string) {
		paths := []string{chatPath, textPath, messagesPath, messagesPath + "/count_tokens", embeddingsPath}
		r, err := http.NewRequest("POST", paths[uint(path)%5], strings.NewReader(body))
		require.NoError(t, err)
		w := &memory{header: http.Header{}}
		s.ServeHTTP(w, r)
		require.NotEqual(t, 500, w.status, "%q: %s", body, w.text.String())
		if w.header.Get("Content-Type") == "application/json" {
			require.True(t, json.Valid([]byte(w.text.String())))
		}
	})
}

// memory is a ResponseWriter.
type memory struct {
	header http.Header
	status int
	text   strings.Builder
}

func (m *memory) Header() http.Header         { return m.header }
func (m *memory) WriteHeader(status int)      { m.status = status }
func (m *memory) Write(p []byte) (int, error) { return m.text.Write(p) }
func (m *memory) Flush()                      {}
