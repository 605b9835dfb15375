// Command kasmina-tune shows and clears what tuning has stored. For each card, driver, build, op
// and shape that is the fastest way, and what it took.
//
//	go run ./cudaops/cmd/kasmina-tune list              # a line each
//	go run ./cudaops/cmd/kasmina-tune export > a.json   # the store itself, to keep or for another computer with such a card
//	go run ./cudaops/cmd/kasmina-tune import a.json
//	go run ./cudaops/cmd/kasmina-tune clear             # everything, so that it is timed anew
//	go run ./cudaops/cmd/kasmina-tune -match 'RMSNorm' clear
//
// Choices for other cards, drivers or builds lie beside each other and do no harm.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/cudaops/internal/tune"
	"github.com/kasmina-go/kasmina/internal/regular"
)

func main() {
	err := run(os.Args[1:], os.Stdout, os.Stderr)
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "kasmina-tune:", err)
		os.Exit(1)
	}
}

func run(args []string, stdout, stderr io.Writer) error {
	f := flag.NewFlagSet("kasmina-tune", flag.ContinueOnError)
	f.SetOutput(stderr)
	path := f.String("store", "",
		"the store (default: kasmina/tune.json in the user's cache directory)")
	match := f.String("match", "",
		"only choices whose card, driver, build, op or shape has this in it")
	f.Usage = func() {
		fmt.Fprintln(stderr, "usage: kasmina-tune [options] list | export | import FILE | clear")
		f.PrintDefaults()
	}
	if err := f.Parse(args); err != nil {
		return err
	}
	if *path == "" {
		var err error
		if *path, err = tune.DefaultPath(); err != nil {
			return err
		}
	}
	var damaged error
	s := tune.Open(*path, func(why string) { damaged = errors.New(why) })
	matches := func(key string) bool { return strings.Contains(key, *match) }
	switch command := f.Arg(0); {
	case command == "import" && f.NArg() == 2:
		return load(s, f.Arg(1), matches, stdout)
	case command == "import":
		return fmt.Errorf("import takes one FILE, which export has written; got %d", f.NArg()-1)
	case f.NArg() != 1:
		f.Usage()
		return fmt.Errorf("got %q, want one command, behind the options", f.Args())
	case command == "clear":
		n, err := s.Clear(matches)
		fmt.Fprintf(stdout, "%d choices cleared\n", n)
		return err
	case damaged != nil:
		return damaged
	case command == "list":
		return list(s, matches, stdout)
	case command == "export":
		return export(s, matches, stdout)
	default:
		return fmt.Errorf("%q is no command, want list, export, import or clear", command)
	}
}

func list(s *tune.Store, matches func(string) bool, w io.Writer) error {
	all, listed := s.All(), 0
	for _, key := range slices.Sorted(maps.Keys(all)) {
		if !matches(key) {
			continue
		}
		var c tune.Choice
		if json.Unmarshal(all[key], &c) != nil {
			continue
		}
		if _, err := fmt.Fprintf(w, "%-10s cold %8v  warm %8v  %s\n", c.Way, c.Cold,
			c.Warm, key); err != nil {
			return err
		}
		listed++
	}
	switch {
	case listed > 0:
		return nil
	case len(all) > 0:
		_, err := fmt.Fprintf(w, "none of the %d choices that are stored matches\n", len(all))
		return err
	}
	_, err := fmt.Fprintln(w,
		"no choices are stored: a machine that tunes stores them as it meets new shapes")
	return err
}

func export(s *tune.Store, matches func(string) bool, w io.Writer) error {
	all := s.All()
	maps.DeleteFunc(all, func(key string, _ json.RawMessage) bool { return !matches(key) })
	b, err := json.MarshalIndent(all, "", "\t")
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%s\n", b)
	return err
}

// load adds what was exported.
func load(s *tune.Store, path string, matches func(string) bool, w io.Writer) error {
	b, err := regular.Read(path, tune.MaxFile, "a file of choices has")
	if err != nil {
		return err
	}
	var all tune.Choices
	if err := json.Unmarshal(b, &all); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	choices := map[string]any{}
	for key, c := range all {
		if matches(key) {
			choices[key] = c
		}
	}
	if err := s.Put(choices); err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%d choices added\n", len(choices))
	return err
}
