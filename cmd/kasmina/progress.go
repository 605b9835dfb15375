package main

import (
	"io"
	"os"
	"sync"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

// bar shows on a terminal how far a job is, and shows nothing elsewhere. The function that it
// returns may be called from several goroutines; clear removes the bar.
func bar(w io.Writer, what string, bytes bool) (at func(done, of int64), clear func()) {
	if f, ok := w.(*os.File); !ok || !term.IsTerminal(int(f.Fd())) {
		return func(int64, int64) {}, func() {}
	}
	var lock sync.Mutex
	var b *progressbar.ProgressBar
	return func(done, of int64) {
			lock.Lock()
			defer lock.Unlock()
			if b == nil {
				b = progressbar.NewOptions64(of, progressbar.OptionSetWriter(w),
					progressbar.OptionSetDescription(what), progressbar.OptionShowBytes(bytes),
					progressbar.OptionShowCount(), progressbar.OptionThrottle(1e8),
					progressbar.OptionClearOnFinish())
			}
			_ = b.Set64(done) // a terminal that is gone is no reason to end
		}, func() {
			lock.Lock()
			defer lock.Unlock()
			if b != nil {
				_ = b.Clear()
			}
		}
}
