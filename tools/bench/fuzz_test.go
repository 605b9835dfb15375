package main

import (
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/kasmina-go/kasmina/internal/bounded"
)

// FuzzTable checks that -table either rejects a file or prints its table, within limits of time and memory.
func FuzzTable(f *testing.F) {
	f.Add([]byte(`{"bench":"run","peer":"kasmina","card":"C"}` + "\n" +
		`{"bench":"copy_2GiB","peer":"kasmina","us":1,"gbps":4000}` + "\n"))
	f.Add([]byte(`{"bench":"a","peer":"b","tok_s":1e308,"us":-1}` + "\n\n" +
		`{"bench":"a","peer":"kasmina"}`))
	f.Add([]byte("null\n[]\n"))
	path := filepath.Join(f.TempDir(), "results")
	f.Fuzz(func(t *testing.T, content []byte) {
		if err := os.WriteFile(path, content, 0o666); err != nil {
			t.Fatal(err)
		}
		bounded.Run(t, int64(len(content)), func() { _ = printTable(io.Discard, []string{path}) })
	})
}
