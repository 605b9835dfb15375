package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/internal/failpoint"
	"github.com/kasmina-go/kasmina/internal/folderlock"
	"github.com/kasmina-go/kasmina/internal/regular"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/hf"
)

// The folder of --out contains the finished model, and its subfolder run contains the state of the run.
const (
	runFolder      = "run"
	manifestName   = "run.json"
	checkpointName = "checkpoint.safetensors"
	logName        = "log.jsonl"
	stagingName    = "model" // the finished model, until its files are moved to --out
	ggufName       = "model.gguf"
	bestName       = "best.safetensors"
	configName     = "config.json"
)

// A runDir is the folder of --out of a training run:
//
//	OUT/config.json, ...                 the finished model
//	OUT/run/run.json                     the manifest: the options of the run, and whether it has finished
//	OUT/run/checkpoint.safetensors, ...  the last checkpoint
//	OUT/run/tokenizer                    the tokenizer that a run from scratch has trained
//	OUT/run/log.jsonl, tensorboard       the log of the run
//	OUT/run/best.safetensors             with --keep-best, the best model so far; best.json has its loss
//	OUT/run/model, model.gguf            the finished model, before it moves to OUT
//
// The manifest is written before anything else, so a folder without one does not belong to a run. It is
// written again when the run finishes. All files are written atomically. After a kill at any moment, the
// folder is therefore in one of the stages below, and the same command can continue from there. While a
// process trains, it has claimed the folder run.
type runDir struct{ out string }

// A manifest describes the run in a folder.
type manifest struct {
	// Options maps the name of every option that affects the result to its value.
	Options map[string]string `json:"options"`
	// Files lists the files of the finished model. It is empty until they are complete.
	Files []string `json:"files,omitempty"`
	// Finished reports that all Files are in the folder of --out.
	Finished bool `json:"finished,omitempty"`
	// Replaces lists the files of the finished model of a run that has been extended. They stay in the
	// folder of --out until the new model replaces them.
	Replaces []string `json:"replaces,omitempty"`
}

// next returns the manifest of a run that continues with the given options. m may be nil.
func (m *manifest) next(options map[string]string) *manifest {
	n := &manifest{Options: options}
	if m != nil {
		if n.Replaces = m.Replaces; m.Finished {
			n.Replaces = m.Files
		}
	}
	return n
}

// A stage is the progress of the run in a folder.
type stage int

const (
	vacant     stage = iota // no run
	begun                   // a manifest but no checkpoint
	saved                   // a checkpoint to resume from
	publishing              // the complete model is being moved to its place
	finished                // nothing left to do
)

// freeOptions are the options that do not affect the result, so a run may continue with other values.
var freeOptions = []string{"out", "resume", "save-every", "eval-every", "board", "board-control",
	"tensorboard", "quiet", "gpus", "deadline", "save-parts", "cache", "monitor", "profile", "help"}

// pathOptions are the options that take a path. Two values are equal if they name the same file.
var pathOptions = []string{"model", "tokenizer", "data"}

// optionsOf returns the options of a command that affect the result.
func optionsOf(c *cobra.Command) map[string]string {
	all := map[string]string{}
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if slices.Contains(freeOptions, f.Name) {
			return
		}
		all[f.Name] = f.Value.String()
		if slices.Contains(pathOptions, f.Name) && all[f.Name] != "" {
			// A later command may have a different working directory.
			if path, err := filepath.Abs(all[f.Name]); err == nil {
				all[f.Name] = path
			}
		}
	})

	return all
}

func (d runDir) in(name string) string { return filepath.Join(d.out, runFolder, name) }

// look returns the stage of the run in the folder and its manifest, which is nil for a run of an older
// version without manifests. If the folder does not belong to a run, the error describes the obstacle.
func (d runDir) look() (stage, *manifest, error) {
	m, err := d.readManifest()
	if err != nil {
		return vacant, nil, err
	}

	if m == nil {
		s, err := d.lookWithout()
		return s, nil, err
	}

	staged, err := os.Stat(d.in(stagingName))
	switch {
	case m.Finished:
		return finished, m, d.complete(m)
	case len(m.Files) > 0, err == nil && staged.IsDir():
		return publishing, m, nil
	}

	if len(m.Replaces) == 0 {
		if err := d.holdsOnly(d.out, runFolder); err != nil {
			return vacant, nil, err
		}
	}

	if _, err := os.Stat(d.in(checkpointName)); err == nil {
		return saved, m, nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return vacant, nil, err
	}

	return begun, m, nil
}

// lookWithout implements look for a folder without a manifest.
func (d runDir) lookWithout() (stage, error) {
	if _, err := os.Stat(d.in(checkpointName)); err == nil {
		if _, err := os.Stat(filepath.Join(d.out, configName)); err == nil {
			return finished, nil
		}
		return saved, d.holdsOnly(d.out, runFolder)
	}

	// If a process was killed before it wrote the manifest, there are only the two folders, and perhaps generated text.
	if err := d.holdsOnly(d.out, runFolder); err != nil {
		return vacant, err
	}

	return vacant, d.holdsOnly(filepath.Join(d.out, runFolder), generatedName)
}

// readManifest reads the manifest. It returns nil if the file does not exist.
func (d runDir) readManifest() (*manifest, error) {
	path := d.in(manifestName)
	text, err := regular.Read(path, 1<<20, "the manifest of a run has")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("--out: %w", err)
	}

	var m manifest
	if err := json.Unmarshal(text, &m); err != nil || m.Options == nil {
		return nil, fmt.Errorf("--out: %s is corrupted, and without it the run cannot be identified: "+
			"name another folder", path)
	}

	return &m, nil
}

func (d runDir) writeManifest(m *manifest) error {
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	return atomicfile.Write(d.in(manifestName), func(f *os.File) error {
		_, err := f.Write(append(text, '\n'))
		return err
	})
}

// holdsOnly returns an error if a folder contains anything except the named files, temporary files and
// locks.
func (d runDir) holdsOnly(dir string, names ...string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}

	for _, e := range entries {
		if !slices.Contains(names, e.Name()) && !atomicfile.IsTemporary(e.Name()) &&
			!folderlock.IsLock(e.Name()) {
			return fmt.Errorf("the folder %s is not empty, because it holds %s: name a new folder", d.out,
				filepath.Join(strings.TrimPrefix(dir[len(d.out):], string(filepath.Separator)),
					e.Name()))
		}
	}

	return err
}

// complete returns an error if a file of a finished model is missing.
func (d runDir) complete(m *manifest) error {
	for _, name := range m.Files {
		if _, err := os.Stat(filepath.Join(d.out, name)); err != nil {
			return fmt.Errorf("the run in %s has finished, but a file of its model is gone: %w; to "+
				"train again, name another folder", d.out, err)
		}
	}
	return nil
}

// decide returns the stage at which a run with the given options continues. It returns an error if the
// folder contains foreign files or a different run.
func (d runDir) decide(options map[string]string, resume bool) (stage, *manifest, error) {
	s, m, err := d.look()
	if err != nil {
		return s, m, err
	}

	differ := differences(options, m)

	switch s {
	case vacant:
		if resume {
			err = fmt.Errorf("--resume: there is no run in %s to continue; leave --resume out to start one", d.out)
		}
	case saved:
		switch {
		case resume:
		case m == nil:
			err = fmt.Errorf("%s holds a run of an older version: add --resume to continue it, or name another folder", d.out)
		case len(differ) > 0:
			err = fmt.Errorf("%s holds a run with other options (%s): give the same options to continue "+
				"it, add --resume to continue it with the new ones, or name another folder", d.out, strings.Join(differ, "; "))
		}
	case publishing, finished:
		if s == finished && resume && m != nil && extends(options, m) {
			if _, err := os.Stat(d.in(checkpointName)); err != nil {
				return s, m, fmt.Errorf("the run in %s cannot be extended without its checkpoint: %w", d.out, err)
			}
			return saved, m, nil
		}
		if m == nil || len(differ) > 0 {
			other := ""
			if len(differ) > 0 {
				other = ", with other options (" + strings.Join(differ, "; ") + ")"
			}
			extend := "--resume and more --steps"
			if m != nil && extends(options, m) {
				extend = "--resume"
			}
			next := "--model " + d.out + " and another --out"
			if hf.IsAdapter(d.out) {
				next = "another --out"
			}
			err = fmt.Errorf("the run in %s has already finished%s: add %s to extend it, or start a new run with %s",
				d.out, other, extend, next)
		}
	}

	return s, m, err
}

// extends reports whether a command gives a finished run more steps or more time. A run with adapters
// cannot be extended, because they have been merged into the weights.
func extends(options map[string]string, m *manifest) bool {
	if m.Options["adapters"] != "" {
		return false
	}

	was, err := time.ParseDuration(m.Options["time"])
	is, err2 := time.ParseDuration(options["time"])
	if err == nil && err2 == nil && (is > 0 || was > 0) {
		return is > was && was > 0
	}

	before, err := strconv.Atoi(m.Options["steps"])
	after, err2 := strconv.Atoi(options["steps"])
	return err == nil && err2 == nil && after > before
}

// differences describes the options that differ between a command and the run of a manifest. It ignores
// an option with its default value if the version that started the run did not have that option.
func differences(options map[string]string, m *manifest) (all []string) {
	if m == nil {
		return nil
	}

	trains, tunes := newTrain().Flags(), newFinetune().Flags()
	isDefault := func(name, value string) bool {
		for _, flags := range []*pflag.FlagSet{trains, tunes} {
			if f := flags.Lookup(name); f != nil && f.DefValue == value {
				return true
			}
		}
		return false
	}

	names := maps.Clone(options)
	maps.Copy(names, m.Options)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		is, given := options[name]
		was, known := m.Options[name]
		switch {
		case given && known && (is == was || slices.Contains(pathOptions, name) && sameFile(is, was)):
		case given && !known && isDefault(name, is):
		case given && known && openSettings[name] == was && isDefault(name, was):
		case !known:
			all = append(all, fmt.Sprintf("--%s is %q now and did not exist before", name, is))
		case !given:
			all = append(all, fmt.Sprintf("--%s was %q and no longer exists", name, was))
		default:
			all = append(all, fmt.Sprintf("--%s was %q and is %q now", name, was, is))
		}
	}

	return all
}

func sameFile(a, b string) bool {
	x, err := os.Stat(a)
	if err != nil {
		return false
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

// claimWait limits the time that claim waits for another process. The system may need a moment to remove
// a process that has just been killed.
var claimWait = 5 * time.Second

// claim creates the folder and reserves it for this process until release is called. If there is no
// manifest by then, release removes the folders that claim has created.
func (d runDir) claim(stderr io.Writer) (release func() error, err error) {
	_, noOut := os.Stat(d.out)
	run := filepath.Join(d.out, runFolder)
	_, noRun := os.Stat(run)
	if err := os.MkdirAll(run, 0o777); err != nil {
		return nil, fmt.Errorf("--out: %w", err)
	}

	unlock, err := llm.ClaimFolder(run)
	for start := time.Now(); errors.Is(err, llm.ErrFolderInUse) && time.Since(start) < claimWait; {
		time.Sleep(20 * time.Millisecond)
		unlock, err = llm.ClaimFolder(run)
	}

	if errors.Is(err, errors.ErrUnsupported) {
		fmt.Fprintf(stderr, "folder    %s cannot be locked, so another program could write to it at the same time: %v\n", run, err)
		unlock, err = func() error { return nil }, nil
	}
	if err != nil {
		return nil, fmt.Errorf("--out: %w", err)
	}

	return func() error {
		// Removing a folder fails unless the folder is empty.
		if noRun != nil {
			_ = os.Remove(run)
		}
		if noOut != nil {
			_ = os.Remove(d.out)
		}
		return unlock()
	}, nil
}

// clean removes the temporary files of killed processes. The folder must be claimed.
func (d runDir) clean() {
	atomicfile.CleanFolder(filepath.Join(d.out, runFolder))
	atomicfile.Clean(filepath.Join(d.out, configName)) // created by writable
}

// writable returns an error if the finished model could not be written or moved to its place.
func (d runDir) writable() error {
	if err := atomicfile.Writable(filepath.Join(d.out, configName)); err != nil {
		return fmt.Errorf("--out: %w", err)
	}

	// Temporary files in the temporary folder of the model have the longest paths.
	longest := filepath.Join(d.in(atomicfile.LongestTemporary), atomicfile.LongestTemporary)
	if _, err := os.Lstat(longest); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("--out: %w", err)
	}
	return nil
}

// nextManifest returns the manifest of the run in the folder, updated with the options of the command.
func (d runDir) nextManifest(c *cobra.Command) (*manifest, error) {
	m, err := d.readManifest()
	if err != nil {
		return nil, err
	}
	return m.next(optionsOf(c)), nil
}

// publish moves the files of the finished model from the staging folder to their place, config.json last.
// It never replaces foreign files: such a file is an error, and the same command publishes the rest once
// the file is gone.
func (d runDir) publish(m *manifest) error {
	staging := d.in(stagingName)
	if len(m.Files) == 0 {
		// The GGUF file was written outside the staging folder, which is created in one step.
		if _, err := os.Lstat(d.in(ggufName)); err == nil {
			if err := atomicfile.Move(d.in(ggufName), filepath.Join(staging, ggufName)); err != nil {
				return err
			}
		}
		entries, err := os.ReadDir(staging)
		if err != nil {
			return err
		}
		for _, e := range entries {
			m.Files = append(m.Files, e.Name())
		}
		last := func(name string) int { return map[bool]int{true: 1}[name == configName] }
		slices.SortStableFunc(m.Files, func(a, b string) int { return last(a) - last(b) })
		if err := d.writeManifest(m); err != nil {
			return err
		}
	}

	for _, name := range m.Files {
		failpoint.Reach("publish", name)
		replace := slices.Contains(m.Replaces, name)
		err := d.publishFile(filepath.Join(staging, name), filepath.Join(d.out, name), replace)
		if err != nil {
			return err
		}
	}

	for _, name := range m.Replaces {
		if !slices.Contains(m.Files, name) {
			_ = os.Remove(filepath.Join(d.out, name)) // a folder stays if the user has put files there
		}
	}

	failpoint.Reach("published", d.out)
	m.Finished, m.Replaces = true, nil
	if err := d.writeManifest(m); err != nil {
		return err
	}

	return d.removeStaging()
}

// publishFile moves a file to its place, unless it has been moved before. It replaces an existing file
// only if replace is set.
func (d runDir) publishFile(from, to string, replace bool) error {
	staged, err := os.Lstat(from)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(to); err != nil {
			return fmt.Errorf("a file of the finished model is gone: %w", err)
		}
		return nil
	}
	if err != nil {
		return err
	}

	if replace {
		return replaceFile(staged, from, to)
	}

	err = atomicfile.Move(from, to)
	if !errors.Is(err, fs.ErrExist) {
		return err
	}

	// Some file systems move a file by means of a second link. After a kill in between, both exist.
	if moved, err := os.Lstat(to); err == nil && os.SameFile(staged, moved) {
		return os.Remove(from)
	}

	return fmt.Errorf("another program has written %s in the meantime: move the file away, and give the same "+
		"command again to finish the run", to)
}

// replaceFile moves a file, or all files of a folder, to its place.
func replaceFile(staged fs.FileInfo, from, to string) error {
	if !staged.IsDir() {
		return os.Rename(from, to)
	}

	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}

	if err := os.MkdirAll(to, 0o777); err != nil {
		return err
	}

	for _, e := range entries {
		if err := os.Rename(filepath.Join(from, e.Name()), filepath.Join(to, e.Name())); err != nil {
			return err
		}
	}

	return os.Remove(from)
}

// removeStaging removes the folder that publish has emptied.
func (d runDir) removeStaging() error {
	err := os.Remove(d.in(stagingName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
