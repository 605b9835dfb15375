package board

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/board/internal/store"
	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/internal/regular"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/runlog"
)

// The files of a run's folder.
const (
	logName   = "log.jsonl"
	runFolder = "run" // subfolder of a model that kasmina train has written
)

// checkpointNames lists the possible names of a run's checkpoint, which contains its settings.
var checkpointNames = []string{"model.safetensors", "checkpoint.safetensors"}

// Intervals for reading logs that are still being written.
const (
	readEvery   = time.Second
	silentAfter = 2 * time.Minute
)

// Logs returns a board that shows finished runs or runs in progress side by side, as described by
// their logs. Each path names a directory that contains a log.jsonl, or a log itself.
func Logs(paths []string, opts ...Option) (*Board, error) {
	if len(paths) == 0 {
		return nil,
			errors.New("board: Logs: there are no paths: pass folders of runs, such as runs/*")
	}

	var logs []*log
	for i, name := range runNames(paths) {
		l, err := openLog(paths[i], strconv.Itoa(i), name)
		if err != nil {
			return nil, fmt.Errorf("board: Logs: %w", err)
		}
		logs = append(logs, l)
	}
	b, err := New(opts...)
	if err != nil {
		return nil, err
	}

	b.mu.Lock()
	defer b.mu.Unlock()
	for _, l := range logs {
		b.runs, b.trainers = append(b.runs, l.run), append(b.trainers, nil)
		go l.follow(b.closing)
	}
	return b, nil
}

// A log follows the log of a run.
type log struct {
	folder string
	tail   *runlog.Tail
	run    *store.Run

	changed time.Time // modification time of the file
	heard   time.Time // when changed last changed, by this computer's clock
}

// openLog opens a log and reads its present content.
func openLog(path, id, name string) (*log, error) {
	folder, file := filepath.Split(path)
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		folder, file = path, logName
		if _, err := os.Stat(filepath.Join(path, logName)); err != nil {
			if _, err := os.Stat(filepath.Join(path, runFolder, logName)); err == nil {
				folder = filepath.Join(path, runFolder)
			}
		}
	}
	logPath := filepath.Join(folder, file)
	if _, err := os.Stat(logPath); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w: want a folder with a %s, or such a log", err, logName)
		}
		return nil, err
	}

	l := &log{folder: folder, tail: runlog.NewTail(logPath)}
	l.run = store.NewRun(id, name, l.notes())
	err := l.read()
	l.heard = l.changed
	l.run.Silent(time.Since(l.heard) > silentAfter)
	return l, err
}

// placeOf returns the absolute path that identifies a run, which is its directory or, if the log is
// not called log.jsonl, its log without the suffix.
func placeOf(path string) string {
	if abs, err := filepath.Abs(path); err == nil {
		path = abs
	}
	if filepath.Base(path) == logName {
		path = filepath.Dir(path)
	}
	return strings.TrimSuffix(path, filepath.Ext(logName))
}

// runName returns the name of a run, which is the last part of its path.
func runName(path string) string { return lastParts(placeOf(path), 1) }

// runNames returns distinct names for runs. Runs in folders of the same name are named by the last
// parts of their paths.
func runNames(paths []string) []string {
	places, names := make([]string, len(paths)), make([]string, len(paths))
	for i, path := range paths {
		places[i] = placeOf(path)
	}

	for i, place := range places {
		// As many parts as it takes to differ from all other places.
		for parts := 1; ; parts++ {
			names[i] = lastParts(place, parts)
			alike := slices.ContainsFunc(places, func(other string) bool {
				return other != place && lastParts(other, parts) == names[i]
			})
			if !alike {
				break
			}
		}
	}

	// Number runs that are given more than once.
	for i, name := range names {
		for n := 2; slices.Contains(names[:i], names[i]); n++ {
			names[i] = fmt.Sprintf("%s (%d)", name, n)
		}
	}
	return names
}

// lastParts returns the last n elements of an absolute path, or "run" for a file system's root, which
// has no name.
func lastParts(path string, n int) string {
	separator := string(filepath.Separator)
	path = strings.Trim(strings.TrimPrefix(path, filepath.VolumeName(path)), separator)
	if path == "" {
		return "run"
	}
	parts := strings.Split(path, separator)
	return strings.Join(parts[max(0, len(parts)-n):], "/")
}

// notes returns the settings in the checkpoint of the run, or nil if there is no checkpoint yet.
func (l *log) notes() (notes map[string]string) {
	for _, name := range checkpointNames {
		if n, err := llm.ReadNotes(filepath.Join(l.folder, name)); err == nil {
			notes = n
		}
	}
	return notes
}

// read reads the records that were added to the log.
func (l *log) read() error {
	saved := false
	changed, err := l.tail.Read(func() {
		l.run.Clear(nil) // the checkpoint may still belong to the previous run
	}, func(r runlog.Record) {
		l.run.Read(r)
		saved = saved || r.Event == "saved"
	})

	if saved {
		l.run.Configure(l.notes())
	}
	if err == nil && !changed.Equal(l.changed) {
		l.changed, l.heard = changed, time.Now()
	}
	l.run.Silent(time.Since(l.heard) > silentAfter)
	return err
}

// follow reads new records until the board is closed.
func (l *log) follow(closing <-chan struct{}) {
	tick := time.NewTicker(readEvery)
	defer tick.Stop()
	for {
		select {
		case <-closing:
			return
		case <-tick.C:
			_ = l.read() // a log that cannot be read now may be readable later
		}
	}
}

// Report writes a run's page as a single, self-contained HTML file. path names the run's directory or
// its log. The page shows the same figures as a [Board].
func Report(w io.Writer, path string) error {
	l, err := openLog(path, "0", runName(path))
	if err != nil {
		return fmt.Errorf("board: Report: %w", err)
	}
	data, err := json.Marshal(map[string]any{"runs": []store.Full{l.run.Full()}})
	if err != nil {
		return fmt.Errorf("board: Report: %w", err)
	}
	text, err := standalone(data, reportMark(path))
	if err != nil {
		return fmt.Errorf("board: Report: %w", err)
	}
	if _, err := w.Write(text); err != nil {
		return fmt.Errorf("board: Report: %w", err)
	}
	return nil
}

// WriteReport writes the [Report] of a run to a file and returns the path of the file. It creates
// missing directories. If path is empty, the file is written to the current directory and named after
// the run's directory, with the suffix .html.
//
// WriteReport replaces an earlier report of the same run. If any other file exists there, including
// another run's report of the same name, WriteReport leaves it alone and returns an error.
func WriteReport(path, run string) (string, error) {
	if path == "" {
		path = runName(run) + ".html"
	}
	var page bytes.Buffer
	if err := Report(&page, run); err != nil {
		return "", err
	}

	exists, err := replaceable(path, run)
	if err == nil && exists {
		err = atomicfile.Write(path, func(f *os.File) error { return writeAll(f, page.Bytes()) })
	} else if err == nil { // fails if another program creates the file now
		err = atomicfile.CreateMkdir(path, func(f *os.File) error {
			return writeAll(f, page.Bytes())
		})
	}
	if err != nil {
		return "", fmt.Errorf("board: WriteReport: %w", err)
	}
	return path, nil
}

// writeAll writes text to w.
func writeAll(w io.Writer, text []byte) error {
	_, err := w.Write(text)
	return err
}

// replaceable reports whether a file exists at path. A file that is not a report of the run is an
// error.
func replaceable(path, run string) (exists bool, err error) {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	f, _, err := regular.Open(path)
	if err != nil {
		return true, err
	}
	defer f.Close()

	start := make([]byte, 1<<10) // contains the mark of a report
	n, err := io.ReadFull(f, start)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return true, err
	}
	if !bytes.Contains(start[:n], []byte(reportMark(run))) {
		return true, fmt.Errorf("%s exists and is not a report of this run: remove it, or name "+
			"another file (--out)", path)
	}
	return true, nil
}

// reportMark returns an HTML element that identifies the run of a report. It contains a checksum of the
// run's path rather than the path itself, which other people need not see.
func reportMark(run string) string {
	place := placeOf(run)
	if real, err := filepath.EvalSymlinks(place); err == nil {
		place = real
	}
	return fmt.Sprintf("<meta name=\"kasmina-report\" content=\"%x\">",
		sha256.Sum256([]byte(place)))
}

var (
	stylePattern  = regexp.MustCompile(`<link rel="stylesheet" href="([a-z.]+)">`)
	scriptPattern = regexp.MustCompile(`<script src="([a-z.]+)"></script>`)
	iconPattern   = regexp.MustCompile(`<link rel="icon" href="[a-z.]+">\n`)
)

// standalone returns the page with its styles and scripts, a mark, and data, all as a single string.
// The data are JSON, in which encoding/json has escaped the characters of HTML tags.
func standalone(data []byte, mark string) ([]byte, error) {
	html, err := page.ReadFile("page/index.html")
	if err != nil {
		return nil, err
	}

	var errs error
	file := func(match []byte, p *regexp.Regexp) []byte {
		text, err := page.ReadFile("page/" + string(p.FindSubmatch(match)[1]))
		errs = errors.Join(errs, err)
		return text
	}
	html = iconPattern.ReplaceAll(html, nil)
	html = stylePattern.ReplaceAllFunc(html, func(m []byte) []byte {
		return []byte("<style>" + string(file(m, stylePattern)) + "</style>")
	})

	sums := ""
	html = scriptPattern.ReplaceAllFunc(html, func(m []byte) []byte {
		text := file(m, scriptPattern)
		sum := sha256.Sum256(text)
		sums += " 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
		return []byte("<script>" + string(text) + "</script>")
	})

	policy :=
		`<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data: blob:; ` +
			`style-src 'unsafe-inline'; script-src` + sums + `">`
	html = bytes.Replace(html, []byte("<head>"), []byte("<head>\n"+mark+"\n"+policy), 1)

	held := `<script type="application/json" id="data">` + string(data) + "</script>\n<script>"
	return bytes.Replace(html, []byte("<script>"), []byte(held), 1), errs
}
