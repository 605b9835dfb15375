package main

import (
	"io"
	"os"
	"sync"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

// wide is the number of columns needed for a bar with all figures.
const wide = 80

// bar shows the progress of a job on a terminal, and nothing elsewhere. The function at sets the progress
// and may be called from several goroutines; erase removes the bar.
func bar(w io.Writer, what string, bytes bool) (at func(done, of int64), erase func()) {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return func(int64, int64) {}, func() {}
	}

	options := []progressbar.Option{progressbar.OptionSetWriter(w), progressbar.OptionSetDescription(what),
		progressbar.OptionThrottle(1e8), progressbar.OptionClearOnFinish()}
	if columns, _, err := term.GetSize(int(f.Fd())); err == nil && columns < wide {
		// A bar that the terminal wraps cannot be redrawn in place.
		options = append(options, progressbar.OptionSetPredictTime(false),
			progressbar.OptionSetElapsedTime(false),
			progressbar.OptionSetWidth(max(1, columns-len(what)-len("  100% ||   ")-1)), progressbar.OptionUseANSICodes(true))
	} else {
		options = append(options, progressbar.OptionShowBytes(bytes), progressbar.OptionShowCount())
	}

	var lock sync.Mutex
	var b *progressbar.ProgressBar
	at = func(done, of int64) {
		lock.Lock()
		defer lock.Unlock()
		if b == nil {
			b = progressbar.NewOptions64(of, options...)
		}
		_ = b.Set64(done) // a lost terminal does not end the job
	}

	return at, func() {
		lock.Lock()
		defer lock.Unlock()
		if b != nil {
			_ = b.Clear()
		}
	}
}
