package choose

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/internal/enum"
	"github.com/kasmina-go/kasmina/internal/regular"
)

// Mode says what may be timed.
type Mode uint8

// The modes.
const (
	Default Mode = iota // what the caller takes for best
	Off                 // time nothing, and take what a library or a rule of thumb proposes
	Cached              // take what is stored; time and store what is not
	Full                // time everything anew, and store it
)

var modes = []string{"default", "off", "cached", "full"}

func (m Mode) String() string { return enum.Name(m, "Mode", modes) }

// MarshalText is off, cached, full or default, for flag.TextVar.
func (m Mode) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText is the inverse of MarshalText.
func (m *Mode) UnmarshalText(text []byte) error {
	i := slices.Index(modes, string(text))
	if i < 0 {
		return fmt.Errorf("the tuning is %q, want off, cached, full or default", text)
	}
	*m = Mode(i)
	return nil
}

// variable is the environment variable that overrides a program's mode: off, cached or full.
const variable = "KASMINA_TUNE"

// Complete adds what the environment says. Where neither the program nor the environment says a
// mode it is the usual one, and where there is no path it is kasmina/tune.json in the user's cache
// directory.
func (c *Config) Complete(usual Mode) (err error) {
	if c.Rules, err = c.Rules.WithEnvironment(); err != nil {
		return err
	}

	if c.Mode == Default {
		c.Mode = usual
	}

	if v := os.Getenv(variable); v != "" {
		if err := c.Mode.UnmarshalText([]byte(strings.ToLower(v))); err != nil ||
			c.Mode == Default {
			return fmt.Errorf("the environment variable %s is %q, want off, cached or full",
				variable, v)
		}
	}

	if c.Path == "" && c.Mode != Off {
		dir, err := os.UserCacheDir()
		if err != nil {
			c.Warn(fmt.Sprintf("the choices of tuning cannot be stored: %v", err))
			return nil
		}
		c.Path = filepath.Join(dir, "kasmina", "tune.json")
	}

	return nil
}

// version is that of the file's format.
const version = 1

type file struct {
	Version int     `json:"version"`
	Choices choices `json:"choices"`
}

// store is choices that are remembered on disk, so that a second start of a program times nothing.
// As another variant gives other roundings, it computes the same bits too. A key names everything that
// the choice depends on (card, driver, library, op, shape, types). So entries that were made under
// other circumstances lie beside each other and are simply not asked for. All that a process opens
// for one path are the same, and may be used by several goroutines.
type store struct {
	path string // "" for one that lives in memory only

	mu      sync.Mutex
	choices choices
}

var (
	opened     = map[string]*store{}
	openedLock sync.Mutex
)

// open returns the store of a file, which need not exist. What cannot be read is as good as none:
// the store is empty then, warn is told why, and the next put replaces it.
func open(path string, warn func(string)) *store {
	openedLock.Lock()
	defer openedLock.Unlock()
	if s := opened[path]; s != nil {
		return s
	}

	s := &store{path: path, choices: choices{}}
	opened[path] = s
	if path == "" {
		return s
	}

	found, err := read(path)
	if err != nil {
		warn(fmt.Sprintf("the choices stored in %s are ignored: %v", path, err))
		return s
	}

	s.choices = found
	return s
}

// Limits of a file, a hundred models' worth: a choice has some hundred bytes, and a model some
// dozens of them.
const (
	maxFile    = 16 << 20 // bytes
	maxChoices = 1 << 14
)

// choices are choices by their keys.
type choices map[string]timed

// timed is what is stored for a key: the fastest variant, and what it took with nothing in the cache.
type timed struct {
	Variant string        `json:"variant"`
	Cold    time.Duration `json:"cold_ns"`
}

// UnmarshalJSON implements json.Unmarshaler. It is an error when there are more than a file may
// have.
func (c *choices) UnmarshalJSON(b []byte) error {
	d := json.NewDecoder(bytes.NewReader(b))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return errors.Join(err, errors.New("the choices are no object"))
	}

	*c = choices{}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return err
		}
		if len(*c) == maxChoices {
			return fmt.Errorf("it has more than %d choices", maxChoices)
		}
		var choice timed
		if err := d.Decode(&choice); err != nil {
			return err
		}
		(*c)[key.(string)] = choice
	}

	return nil
}

// read returns a file's choices, none where there is no file.
func read(path string) (choices, error) {
	f := file{Choices: choices{}}
	b, err := regular.Read(path, maxFile, "a file of choices has")
	if errors.Is(err, fs.ErrNotExist) {
		return f.Choices, nil
	}
	if err != nil {
		return nil, err
	}

	if err := json.Unmarshal(b, &f); err != nil {
		return nil, fmt.Errorf("it is damaged: %w", err)
	}

	if f.Version != version {
		return nil, fmt.Errorf("it is of version %d, want %d", f.Version, version)
	}

	return f.Choices, nil
}

// get returns the choice stored for a key, and reports whether there is one.
func (s *store) get(key string) (timed, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, ok := s.choices[key]
	return c, ok
}

// put stores a choice. The file changes at once or, on an error, not at all; what another process
// has stored there meanwhile stays. After an error this process still remembers the choice.
func (s *store) put(key string, c timed) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.choices[key] = c
	if s.path == "" {
		return nil
	}

	if theirs, err := read(s.path); err == nil {
		for key, c := range theirs {
			if _, ok := s.choices[key]; !ok {
				s.choices[key] = c
			}
		}
	}

	if err := s.write(); err != nil {
		return fmt.Errorf("storing choices in %s: %w", s.path, err)
	}

	return nil
}

// write replaces the file by one that is complete.
func (s *store) write() error {
	if len(s.choices) > maxChoices {
		return fmt.Errorf("there are %d, and a file has %d at most: delete it, so that what is "+
			"asked for is timed anew", len(s.choices), maxChoices)
	}

	b, err := json.MarshalIndent(file{version, s.choices}, "", "\t")
	if err != nil {
		return err
	}

	return atomicfile.WriteMkdir(s.path, func(f *os.File) error {
		_, err := f.Write(b)
		return err
	})
}
