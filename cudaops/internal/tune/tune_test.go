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
	if Open(path, silent(t)) != s {
		t.Error("two stores for one file in a process")
	}
	var got [2]uint64
	if s.Get("a", &got, silent(t)) {
		t.Error("a new store knows a choice")
	}
	require.NoError(t, s.Put(map[string]any{"a": [2]uint64{1, 1<<64 - 1}}))
	other := reopen(t, path, silent(t))
	if !other.Get("a", &got, silent(t)) || got != [2]uint64{1, 1<<64 - 1} {
		t.Errorf("stored %v", got)
	}
	if other.Get("b", &got, silent(t)) {
		t.Error("it has a choice for another key")
	}
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
	if err != nil || len(left) != 1 {
		t.Errorf("left over: %v, %v", left, err)
	}
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
			if len(warnings) != 1 || !strings.Contains(warnings[0], path) {
				t.Errorf("warnings: %q", warnings)
			}
			var v int
			if s.Get("a", &v, silent(t)) {
				t.Error("it has a choice")
			}
			require.NoError(t, s.Put(map[string]any{"a": 5}))
			if !reopen(t, path, silent(t)).Get("a", &v, silent(t)) || v != 5 {
				t.Errorf("stored %d", v)
			}
		})
	}
	path := filepath.Join(t.TempDir(), "tune.json")
	require.NoError(t, os.WriteFile(path, []byte(`{"version":1,"choices":{"a":"text"}}`),
		0o644))
	warned, v := 0, 0
	if Open(path, silent(t)).Get("a", &v, func(string) { warned++ }) || warned != 1 {
		t.Errorf("a choice of another type was taken, or there were %d warnings", warned)
	}
}

// TestUnwritable wants an error, and the choice remembered.
func TestUnwritable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tune.json")
	if err := os.MkdirAll(path, 0o755); err != nil { // a folder in its place
		t.Fatal(err)
	}
	warned := 0
	s := Open(path, func(string) { warned++ })
	if err := s.Put(map[string]any{"a": 5}); err == nil || warned != 1 {
		t.Errorf("error %v, %d warnings", err, warned)
	}
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
	if err != nil || n != 2 {
		t.Errorf("cleared %d, %v, want 2", n, err)
	}
	left := reopen(t, path, silent(t)).All()
	if len(left) != 1 || string(left["two, a"]) != "3" {
		t.Errorf("left: %s", left)
	}
}
