package safetensors

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kasmina-go/kasmina/internal/randtest"
)

// saverEnv is the environment variable that makes the test binary save in a loop. It holds the path
// of the file and the first version, on separate lines.
const saverEnv = "SAFETENSORS_TEST_SAVER"

func TestMain(m *testing.M) {
	if path, first, ok := strings.Cut(os.Getenv(saverEnv), "\n"); ok {
		saveForever(path, first)
	}
	os.Exit(m.Run())
}

// saveForever saves version after version, printing the number of each before it starts.
func saveForever(path, first string) {
	v, _ := strconv.ParseUint(first, 10, 64)
	for ; ; v++ {
		fmt.Println(v)
		if err := Save(path, version(v),
			map[string]string{"version": strconv.FormatUint(v, 10)}); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
}

// version returns the tensors of version v: about 300 kB that differ from all other versions.
func version(v uint64) []Tensor {
	r := rand.New(rand.NewPCG(v, 0))
	n := 16_000 + int(v%7)
	return []Tensor{
		{"weights", F64, []int{n}, fill(r, F64, n)},
		{"moments", F32, []int{n, 3}, fill(r, F32, 3*n)},
	}
}

// TestKill kills a process while it saves, and checks that the file is a complete version that is not
// older than the last saved one. It kills at random times, soon after a file has been started, and
// after a save; with random times alone, the disk and other load would determine how often a file is
// half-written.
func TestKill(t *testing.T) {
	r := random(t)
	kills := 30
	if randtest.Long() {
		kills = 100
	}

	path := filepath.Join(t.TempDir(), "checkpoint")
	halfWrittenFiles := func() []string {
		files, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".kasmina-*.tmp"))
		if err != nil {
			t.Fatal(err)
		}
		return files
	}

	var left []string // by the last kill
	start := time.Now()
	mustSave(t, path, version(0), map[string]string{"version": "0"})
	window := min(max(3*time.Since(start), 20*time.Millisecond), 100*time.Millisecond)
	anyTime := func(*saver) { time.Sleep(time.Duration(r.Int64N(int64(window)))) }
	writing := func(*saver) {
		for begin := time.Now(); time.Since(begin) < 10*time.Second; {
			if now := halfWrittenFiles(); len(now) > 0 && !slices.Equal(now, left) {
				return
			}
			time.Sleep(50 * time.Microsecond) // yields the processor to the child
		}
	}

	saved := func(s *saver) { s.next() }
	moments := []func(*saver){anyTime, writing, anyTime, saved}
	next := uint64(1)
	var n, halfWritten, after int
	for ; n < kills || n < 10*kills && halfWritten < kills/10; n++ {
		moment := moments[n%len(moments)]
		if n >= kills {
			moment = writing
		}
		done := killSaver(t, path, next, moment)
		now := halfWrittenFiles()
		if len(now) > 1 {
			t.Fatalf("one killed writer left %v", now)
		}

		if len(now) > 0 && !slices.Equal(now, left) {
			halfWritten++
		}
		left = now
		got := loadVersion(t, path)
		if got < done {
			t.Fatalf("the file holds version %d, but %d had been saved", got, done)
		}
		if got >= next {
			after++
		}
		next = got + 1
	}

	t.Logf("%d kills: %d left a half-written file next to the old one, %d came after a save",
		n, halfWritten, after)
	if halfWritten < kills/10 || after < kills/10 {
		t.Errorf("the kills were not spread over the saves")
	}

	mustSave(t, path, nil, nil)
	if files, err := os.ReadDir(filepath.Dir(path)); err != nil || len(files) != 1 {
		t.Errorf("the last save left %v, %v", files, err)
	}
}

// saver is a process that saves.
type saver struct {
	t       *testing.T
	lines   *bufio.Scanner
	started uint64 // version being saved
}

// next waits until the process starts a version, having saved all previous ones. It returns false
// once the process has ended.
func (s *saver) next() bool {
	if !s.lines.Scan() {
		return false
	}
	v, err := strconv.ParseUint(s.lines.Text(), 10, 64)
	if err != nil {
		s.t.Errorf("the saving process says %q", s.lines.Text())
		return false
	}
	s.started = v
	return true
}

// killSaver starts a process that saves first and the following versions, and kills it some time
// after it has started. It returns the last version that the process is known to have saved.
func killSaver(t *testing.T, path string, first uint64, moment func(*saver)) uint64 {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s\n%d", saverEnv, path, first))
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}

	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}

	s := &saver{t, bufio.NewScanner(stdout), first}
	if s.next() {
		moment(s)
	}

	cmd.Process.Kill()
	for s.next() {
	}
	cmd.Wait() // reports the kill
	return s.started - 1
}

// loadVersion loads the file and checks that it is a complete version.
func loadVersion(t *testing.T, path string) uint64 {
	tensors, metadata, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}

	v, err := strconv.ParseUint(metadata["version"], 10, 64)
	if err != nil {
		t.Fatal(err)
	}

	for i, want := range version(v) {
		if i >= len(tensors) || !same(tensors[i], want) {
			t.Fatalf("tensor %q is not version %d's", want.Name, v)
		}
	}

	return v
}
