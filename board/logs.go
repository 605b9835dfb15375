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
	"strconv"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/board/internal/store"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/runlog"
)

// The files of a run's folder.
const (
	logName   = "log.jsonl"
	runFolder = "run" // in the folder of a model that kasmina train has written
)

// checkpointNames are those of a run's checkpoint, which has its settings.
var checkpointNames = []string{"model.safetensors", "checkpoint.safetensors"}

// Times of logs that are read while they may still be written.
const (
	readEvery   = time.Second
	silentAfter = 2 * time.Minute
)

// Logs returns a board that shows runs by their logs, side by side: runs of other programs,
// finished or still going on. A path is a folder with a log.jsonl, or a log itself.
func Logs(paths []string, opts ...Option) (*Board, error) {
	if len(paths) == 0 {
		return nil,
			errors.New("board: Logs: there is no path, want folders of runs, such as runs/*")
	}
	var logs []*log
	for _, path := range paths {
		l, err := openLog(path, strconv.Itoa(len(logs)))
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

// log is a log that is read.
type log struct {
	path string
	run  *store.Run
	end  int64 // as far as it has been read
}

// openLog reads what a log has by now.
func openLog(path, id string) (*log, error) {
	folder, file := filepath.Split(path)
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		folder, file = path, logName
		if _, err := os.Stat(filepath.Join(path, logName)); err != nil {
			if _, err := os.Stat(filepath.Join(path, runFolder, logName)); err == nil {
				folder = filepath.Join(path, runFolder)
			}
		}
	}
	name := filepath.Base(filepath.Clean(path))
	l := &log{path: filepath.Join(folder, file)}
	if _, err := os.Stat(l.path); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w: want a folder with a %s, or such a log", err, logName)
		}
		return nil, err
	}
	var notes map[string]string
	for _, name := range checkpointNames {
		// there may be none yet
		if n, err := llm.ReadNotes(filepath.Join(folder, name)); err == nil {
			notes = n
		}
	}
	l.run = store.NewRun(id, strings.TrimSuffix(name, ".jsonl"), notes)
	return l, l.read()
}

// read takes in what has been added.
func (l *log) read() error {
	info, err := os.Stat(l.path)
	if err != nil {
		return err
	}
	if info.Size() > l.end || !info.Mode().IsRegular() { // which ReadFrom refuses
		if l.end, err = runlog.ReadFrom(l.path, l.end, l.run.Read); err != nil {
			return err
		}
	}
	l.run.Silent(time.Since(info.ModTime()) > silentAfter)
	return nil
}

// follow reads on until the board is closed.
func (l *log) follow(closing <-chan struct{}) {
	tick := time.NewTicker(readEvery)
	defer tick.Stop()
	for {
		select {
		case <-closing:
			return
		case <-tick.C:
			_ = l.read() // what cannot be read now may be later
		}
	}
}

// Report writes a run, by its folder or its log, as one page of HTML that needs nothing else. It
// shows curves, the lattice over time, settings and samples.
func Report(w io.Writer, path string) error {
	l, err := openLog(path, "0")
	if err != nil {
		return fmt.Errorf("board: Report: %w", err)
	}
	data, err := json.Marshal(map[string]any{"runs": []store.Full{l.run.Full()}})
	if err != nil {
		return fmt.Errorf("board: Report: %w", err)
	}
	text, err := standalone(data)
	if err != nil {
		return fmt.Errorf("board: Report: %w", err)
	}
	if _, err := w.Write(text); err != nil {
		return fmt.Errorf("board: Report: %w", err)
	}
	return nil
}

var (
	stylePattern  = regexp.MustCompile(`<link rel="stylesheet" href="([a-z.]+)">`)
	scriptPattern = regexp.MustCompile(`<script src="([a-z.]+)"></script>`)
	iconPattern   = regexp.MustCompile(`<link rel="icon" href="[a-z.]+">\n`)
)

// standalone returns the page with all that it loads within it, and data, which JSON has made free
// of what HTML would take for tags.
func standalone(data []byte) ([]byte, error) {
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
	html = bytes.Replace(html, []byte("<head>"), []byte("<head>\n"+policy), 1)
	held := `<script type="application/json" id="data">` + string(data) + "</script>\n<script>"
	return bytes.Replace(html, []byte("<script>"), []byte(held), 1), errs
}
