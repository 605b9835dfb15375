//go:build unix

package gpu_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm/launch"
)

// sign collects the output of ranks, and closes started as soon as a rank has printed "under way".
type sign struct {
	mu      sync.Mutex
	text    bytes.Buffer
	started chan struct{}
}

func (s *sign) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	had := bytes.Contains(s.text.Bytes(), []byte("under way"))
	n, err := s.text.Write(b)
	if !had && bytes.Contains(s.text.Bytes(), []byte("under way")) {
		close(s.started)
	}
	return n, err
}

// TestRanksEnd checks that when a rank on a GPU is killed in the middle of its work, all processes
// exit within two minutes and name the rank, and that they exit no later after the deadline when a
// rank is suspended instead.
func TestRanksEnd(t *testing.T) {
	gpus(t)
	self, err := os.Executable()
	require.NoError(t, err)
	for name, c := range map[string]struct {
		signal syscall.Signal
		within time.Duration
		want   string
	}{
		"killed":  {syscall.SIGKILL, 2 * time.Minute, "rank 1"},
		"stopped": {syscall.SIGSTOP, rankSilence + 2*time.Minute, "hangs: no message"},
	} {
		t.Run(name, func(t *testing.T) {
			dir, out, ended := t.TempDir(), &sign{started: make(chan struct{})}, make(chan error, 1)
			go func() {
				ended <- launch.Run(t.Context(), launch.Job{Path: self, PerNode: 2,
					Stdout: out, Stderr: out,
					Env: append(os.Environ(), roleVariable+"=long:"+dir)})
			}()
			select {
			case <-out.started:
			case err := <-ended:
				t.Fatal(err)
			}
			require.NoError(t, syscall.Kill(pidOf(t, dir, 1), c.signal))
			from := time.Now()
			err := <-ended
			t.Logf("all have ended %v after the signal: %v", time.Since(from), err)
			require.Error(t, err)
			require.Less(t, time.Since(from), c.within)
			out.mu.Lock()
			defer out.mu.Unlock()
			require.Contains(t, out.text.String()+err.Error(), c.want)
		})
	}
}

// pidOf returns the process id of a rank that was started with a folder.
func pidOf(t *testing.T, dir string, rank int) int {
	t.Helper()
	entries, err := filepath.Glob("/proc/[0-9]*/environ")
	require.NoError(t, err)
	for _, path := range entries {
		environ, err := os.ReadFile(path)
		if err == nil && bytes.Contains(environ, []byte(":"+dir+"\x00")) &&
			bytes.Contains(environ, []byte(fmt.Sprintf("\x00RANK=%d\x00", rank))) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			require.NoError(t, err)
			return pid
		}
	}

	t.Fatalf("rank %d is not running", rank)
	return 0
}
