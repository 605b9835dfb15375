package api_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/board/api"
)

// TestPrintedURL checks that a client accepts the address that a board prints, with the token, as it
// is.
func TestPrintedURL(t *testing.T) {
	var path, token string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path, token = r.URL.Path, r.Header.Get("Authorization")
		if r.Method == http.MethodGet {
			io.WriteString(w, `[{"name":"one"}]`)
			return
		}
		io.WriteString(w, `{"state":"done","done":true}`)
	}))
	defer server.Close()

	for suffix, want := range map[string]string{
		"":                      "",
		"/":                     "",
		"/#token=SECRET":        "SECRET",
		"/#token=a%2Bb":         "a+b",
		"#token=SECRET":         "SECRET",
		"/?x=1#token=SECRET":    "SECRET",
		"/ ":                    "",
		"/board/#token=SECRET":  "SECRET",
		"/board#other&token=ab": "ab",
	} {
		c := &api.Client{URL: server.URL + suffix}
		runs, err := c.Runs(t.Context())
		require.NoError(t, err, suffix)
		require.Len(t, runs, 1)
		require.NoError(t, c.Save(t.Context(), "0"))
		require.Regexp(t, `^(/board)?/api/v1/runs/0/save$`, path)
		require.Equal(t, want, strings.TrimSpace(strings.TrimPrefix(token, "Bearer")))
	}

	c := &api.Client{URL: server.URL + "/#token=one", Token: "two"}
	require.NoError(t, c.Save(t.Context(), "0"))
	require.Equal(t, "Bearer two", token)

	for _, url := range []string{"", "127.0.0.1:6060", "localhost:6060/", "ftp://x/", "://", "http://"} {
		_, err := (&api.Client{URL: url}).Runs(t.Context())
		require.Error(t, err, url)
		require.Contains(t, err.Error(), "board/api: GET runs: ")
	}
}

// TestUnansweredOrder checks that a client that gives up before the board has answered explains what
// may still happen, both when it sends the order and when it asks about it.
func TestUnansweredOrder(t *testing.T) {
	for _, unanswered := range []string{http.MethodPost, http.MethodGet} {
		received := make(chan struct{})
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body) // so that the server notices when the client is gone
			if r.Method == unanswered {
				close(received)
				<-r.Context().Done()
				return
			}
			w.WriteHeader(http.StatusAccepted)
			io.WriteString(w, `{"id":1,"state":"pending"}`)
		}))
		defer server.Close()

		ctx, stop := context.WithCancel(t.Context())
		go func() {
			<-received
			stop()
		}()
		err := (&api.Client{URL: server.URL}).Save(ctx, "0")
		require.ErrorIs(t, err, context.Canceled, unanswered)
		require.ErrorContains(t, err, "may yet take effect", unanswered)
	}
}
