package tune

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// reopen is what another process would open.
func reopen(t *testing.T, path string, warn func(string)) *Store {
	t.Helper()
	openedLock.Lock()
	delete(opened, path)
	openedLock.Unlock()
	return Open(path, warn)
}

func silent(t *testing.T) func(string) {
	return func(s string) { t.Errorf("warning: %s", s) }
}

func TestStore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "tune.json")
	s := Open(path, silent(t))
	require.Same(t, s, Open(path, silent(t)), "two stores for one file in a process")
	var got [2]uint64
	require.False(t, s.Get("a", &got, silent(t)), "a new store knows a choice")
	require.NoError(t, s.Put(map[string]any{"a": [2]uint64{1, 1<<64 - 1}}))
	other := reopen(t, path, silent(t))
	require.True(t, other.Get("a", &got, silent(t)))
	require.Equal(t, [2]uint64{1, 1<<64 - 1}, got)
	require.False(t, other.Get("b", &got, silent(t)), "it has a choice for another key")
	require.NoError(t, other.Put(map[string]any{"b": "x"}))
	if err := s.Put(map[string]any{"c": "y"}); err != nil { // which has not read b
		t.Fatal(err)
	}
	third := reopen(t, path, silent(t))
	for _, key := range []string{"b", "c"} {
		if text := ""; !third.Get(key, &text, silent(t)) || text == "" {
			t.Errorf("%s is lost", key)
		}
	}
	left, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, left, 1)
}

// TestDamaged wants a warning, an empty store, and a good one after the next choice.
func TestDamaged(t *testing.T) {
	for name, content := range map[string]string{"text": "choices",
		"cut": `{"version":1,"choices":{"a":[1`, "version": `{"version":2,"choices":{"a":1}}`,
		"empty": ""} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "tune.json")
			require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
			var warnings []string
			s := Open(path, func(s string) { warnings = append(warnings, s) })
			require.Len(t, warnings, 1)
			require.Contains(t, warnings[0], path)
			var v int
			require.False(t, s.Get("a", &v, silent(t)), "it has a choice")
			require.NoError(t, s.Put(map[string]any{"a": 5}))
			require.True(t, reopen(t, path, silent(t)).Get("a", &v, silent(t)))
			require.Equal(t, 5, v)
		})
	}
	path := filepath.Join(t.TempDir(), "tune.json")
	require.NoError(t, os.WriteFile(path, []byte(`{"version":1,"choices":{"a":"text"}}`),
		0o644))
	warned, v := 0, 0
	require.False(t, Open(path, silent(t)).Get("a", &v, func(string) { warned++ }))
	require.Equal(t, 1, warned)
}

// TestUnwritable wants an error, and the choice remembered.
func TestUnwritable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tune.json")
	if err := os.MkdirAll(path, 0o755); err != nil { // a folder in its place
		t.Fatal(err)
	}
	warned := 0
	s := Open(path, func(string) { warned++ })
	require.Error(t, s.Put(map[string]any{"a": 5}))
	require.Equal(t, 1, warned)
	if v := 0; !s.Get("a", &v, silent(t)) || v != 5 {
		t.Errorf("remembered %d", v)
	}
}

func TestConcurrent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tune.json")
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			s := Open(path, silent(t))
			require.NoError(t, s.Put(map[string]any{fmt.Sprint(i): i}))
		})
	}
	all.Wait()
	s := reopen(t, path, silent(t))
	for i := range 8 {
		if v := -1; !s.Get(fmt.Sprint(i), &v, silent(t)) || v != i {
			t.Errorf("choice %d is %d", i, v)
		}
	}
}

func TestOverride(t *testing.T) {
	for value, want := range map[string]Mode{"": Cached, "off": Off,
		"FULL": Full, "cached": Cached} {
		t.Setenv(Variable, value)
		if m, err := Override(Cached); err != nil || m != want {
			t.Errorf("%q gives %v, %v, want %v", value, m, err, want)
		}
	}
	t.Setenv(Variable, "yes")
	if _, err := Override(Off); err == nil || !strings.Contains(err.Error(), Variable) {
		t.Errorf("error %v", err)
	}
}

func TestClear(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tune.json")
	s := Open(path, silent(t))
	require.NoError(t, s.Put(map[string]any{"one, a": 1, "one, b": 2, "two, a": 3}))
	n, err := s.Clear(func(key string) bool { return strings.HasPrefix(key, "one") })
	require.NoError(t, err)
	require.Equal(t, 2, n)
	left := reopen(t, path, silent(t)).All()
	require.Len(t, left, 1)
	require.Equal(t, "3", string(left["two, a"]))
}
