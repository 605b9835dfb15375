package api_test

import (
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
