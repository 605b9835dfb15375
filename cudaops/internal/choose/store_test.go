package choose

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// reopen opens a store as another process would.
func reopen(t *testing.T, path string, warn func(string)) *store {
	t.Helper()
	openedLock.Lock()
	delete(opened, path)
	openedLock.Unlock()
	return open(path, warn)
}

func silent(t *testing.T) func(string) {
	return func(s string) { t.Errorf("warning: %s", s) }
}

func TestStore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "tune.json")
	s := open(path, silent(t))
	require.Same(t, s, open(path, silent(t)), "two stores for one file in a process")
	_, ok := s.get("a")
	require.False(t, ok, "a new store knows a choice")
	require.NoError(t, s.put("a", storedChoice{"x", 1<<63 - 1}))
	other := reopen(t, path, silent(t))
	got, ok := other.get("a")
	require.True(t, ok)
	require.Equal(t, storedChoice{"x", 1<<63 - 1}, got)
	_, ok = other.get("b")
	require.False(t, ok, "it has a choice for another key")
	require.NoError(t, other.put("b", storedChoice{Variant: "b"}))
	require.NoError(t, s.put("c", storedChoice{Variant: "c"}), "it has not read b")
	third := reopen(t, path, silent(t))
	for _, key := range []string{"b", "c"} {
		got, _ := third.get(key)
		require.Equal(t, key, got.Variant)
	}

	left, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, left, 1)
}

// TestCorrupted checks that a corrupted file causes a warning and an empty store, and is replaced at the next
// choice.
func TestCorrupted(t *testing.T) {
	for name, content := range map[string]string{"text": "choices",
		"cut": `{"version":1,"choices":{"a":{`, "empty": "", "none": "{}",
		"version": `{"version":2,"choices":{"a":{}}}`, "list": `{"version":1,"choices":[]}`,
		"type": `{"version":1,"choices":{"a":{},"b":"text"}}`} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "tune.json")
			require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
			var warnings []string
			s := open(path, func(s string) { warnings = append(warnings, s) })
			require.Len(t, warnings, 1)
			require.Contains(t, warnings[0], path)
			_, ok := s.get("a")
			require.False(t, ok, "it has a choice")
			require.NoError(t, s.put("a", storedChoice{Cold: 5}))
			got, _ := reopen(t, path, silent(t)).get("a")
			require.Equal(t, storedChoice{Cold: 5}, got)
		})
	}
}

// TestUnwritable checks that put returns an error but remembers the choice.
func TestUnwritable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tune.json")
	require.NoError(t, os.MkdirAll(path, 0o755), "a folder in its place")
	warned := 0
	s := open(path, func(string) { warned++ })
	require.Error(t, s.put("a", storedChoice{Cold: 5}))
	require.Equal(t, 1, warned)
	got, _ := s.get("a")
	require.Equal(t, storedChoice{Cold: 5}, got)
}

func TestConcurrent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tune.json")
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			require.NoError(t, open(path, silent(t)).put(fmt.Sprint(i), storedChoice{Variant: fmt.Sprint(i)}))
		})
	}

	all.Wait()
	s := reopen(t, path, silent(t))
	for i := range 8 {
		got, _ := s.get(fmt.Sprint(i))
		require.Equal(t, fmt.Sprint(i), got.Variant)
	}
}

func TestComplete(t *testing.T) {
	for value, want := range map[string]Mode{"": Cached, "off": Off,
		"FULL": Full, "cached": Cached} {
		t.Setenv(variable, value)
		c := Config{}
		require.NoError(t, c.Complete(Cached))
		require.Equal(t, want, c.Mode)
		require.Equal(t, want == Off, c.Path == "")
	}

	for _, value := range []string{"yes", "default"} {
		t.Setenv(variable, value)
		require.ErrorContains(t, new(Config).Complete(Off), variable)
	}
}
