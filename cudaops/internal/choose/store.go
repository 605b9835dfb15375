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

// Mode determines when variants are timed.
type Mode uint8

// The tuning modes.
const (
	Default Mode = iota // use the caller's default
	Off                 // never time; use the choice of the library or of a rule of thumb
	Cached              // use stored choices, and time and store the remaining ones
	Full                // time all variants again, and store the choices
)

var modes = []string{"default", "off", "cached", "full"}

func (m Mode) String() string { return enum.Name(m, "Mode", modes) }

// MarshalText implements encoding.TextMarshaler, for use with flag.TextVar.
func (m Mode) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler. The text is off, cached, full or default.
func (m *Mode) UnmarshalText(text []byte) error {
	i := slices.Index(modes, string(text))
	if i < 0 {
		return fmt.Errorf("the tuning is %q, want off, cached, full or default", text)
	}
	*m = Mode(i)
	return nil
}

// variable names the environment variable that overrides a program's mode with off, cached or full.
const variable = "KASMINA_TUNE"

// Complete fills in settings from the environment and defaults. If neither the program nor the
// environment specifies a mode, Complete sets the usual mode. If no path is set, it sets
// kasmina/tune.json in the user's cache directory.
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

// version is the version of the file format.
const version = 1

type file struct {
	Version int     `json:"version"`
	Choices choices `json:"choices"`
}

// store holds choices that are saved to disk, so that a restarted program times nothing. Restarts also
// reproduce results bit for bit, because variants round differently.
//
// A key includes everything that determines the choice: card, driver, library, op, shape and types.
// Entries made under different circumstances therefore coexist in the file and are simply never looked
// up.
//
// Within a process, all stores opened for one path are the same store. A store is safe for concurrent
// use.
type store struct {
	path string // "" if the choices exist only in memory

	mu      sync.Mutex
	choices choices
}

var (
	opened     = map[string]*store{}
	openedLock sync.Mutex
)

// open returns the store of a file, which need not exist. If the file cannot be read, open warns and
// returns an empty store, and the next put replaces the file.
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

// Limits of a file. They allow for a hundred models, with dozens of choices each and some hundred bytes
// per choice.
const (
	maxFile    = 16 << 20 // bytes
	maxChoices = 1 << 14
)

// choices maps keys to choices.
type choices map[string]storedChoice

// storedChoice is the stored choice for a key: the fastest variant, and its time with a cold cache.
type storedChoice struct {
	Variant string        `json:"variant"`
	Cold    time.Duration `json:"cold_ns"`
}

// UnmarshalJSON implements json.Unmarshaler. It returns an error if there are more choices than a file
// may contain.
func (c *choices) UnmarshalJSON(b []byte) error {
	d := json.NewDecoder(bytes.NewReader(b))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return errors.Join(err, errors.New("the choices are not an object"))
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
		var choice storedChoice
		if err := d.Decode(&choice); err != nil {
			return err
		}
		(*c)[key.(string)] = choice
	}

	return nil
}

// read returns the choices in a file, or an empty map if the file doesn't exist.
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
		return nil, fmt.Errorf("it is corrupted: %w", err)
	}

	if f.Version != version {
		return nil, fmt.Errorf("it is of version %d, want %d", f.Version, version)
	}

	return f.Choices, nil
}

// get returns the choice stored for a key, and reports whether it exists.
func (s *store) get(key string) (storedChoice, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, ok := s.choices[key]
	return c, ok
}

// put stores a choice. The file is replaced atomically, preserving choices that other processes have
// stored in it. If put fails, this process still remembers the choice.
func (s *store) put(key string, c storedChoice) error {
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

// write atomically replaces the file with the current choices.
func (s *store) write() error {
	if len(s.choices) > maxChoices {
		return fmt.Errorf("there are %d, and a file can hold at most %d: delete it, so that the "+
			"variants in use are timed again", len(s.choices), maxChoices)
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
