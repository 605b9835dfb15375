package safetensors

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// saverEnv makes the test binary save in a loop. It holds the file's path and the first version, a line each.
const saverEnv = "SAFETENSORS_TEST_SAVER"

func TestMain(m *testing.M) {
	if path, first, ok := strings.Cut(os.Getenv(saverEnv), "\n"); ok {
		saveForever(path, first)
	}
	os.Exit(m.Run())
}

// saveForever saves version after version and prints the number of each when it begins.
func saveForever(path, first string) {
	v, _ := strconv.ParseUint(first, 10, 64)
	for ; ; v++ {
		fmt.Println(v)
		if err := Save(path, version(v), map[string]string{"version": strconv.FormatUint(v, 10)}); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
}

// version returns the tensors of version v: about 300 kB that no other version has.
func version(v uint64) []Tensor {
	r := rand.New(rand.NewPCG(v, 0))
	n := 16_000 + int(v%7)
	return []Tensor{
		{"weights", F64, []int{n}, fill(r, F64, n)},
		{"moments", F32, []int{n, 3}, fill(r, F32, 3*n)},
	}
}

// TestKill kills a process at random moments while it saves, and looks at what it left: always a complete version, and
// never an older one than had been saved.
func TestKill(t *testing.T) {
	r := random(t)
	kills := 200
	if testing.Short() {
		kills = 20
	}
	path := filepath.Join(t.TempDir(), "checkpoint")
	start := time.Now()
	mustSave(t, path, version(0), map[string]string{"version": "0"})
	window := max(3*time.Since(start), 20*time.Millisecond)
	// How many of the kills meet a half-written file is up to the disk and to what else runs; those that are missing
	// after the planned number of kills are waited for.
	var n, halfWritten, after int
	wanted := func() bool { return halfWritten < kills/10 || after < kills/10 }
	next := uint64(1)
	for ; n < kills || n < 10*kills && wanted(); n++ {
		saved := killSaver(t, path, next, time.Duration(r.Int64N(int64(window))))
		left, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".checkpoint.tmp-*"))
		if err != nil || len(left) > 1 {
			t.Fatalf("one killed writer left %v, %v", left, err)
		}
		halfWritten += len(left)
		got := loadVersion(t, path)
		if got < saved {
			t.Fatalf("the file holds version %d, but %d had been saved", got, saved)
		}
		if got >= next {
			after++
		}
		next = got + 1
	}
	t.Logf("%d kills: %d left a half-written file beside the old one, %d came after a save", n, halfWritten, after)
	if wanted() {
		t.Errorf("the kills were not spread over the saves")
	}
	mustSave(t, path, nil, nil)
	if files, err := os.ReadDir(filepath.Dir(path)); err != nil || len(files) != 1 {
		t.Errorf("the last save left %v, %v", files, err)
	}
}

// killSaver starts a process that saves version first and the following, kills it some time after it has begun, and
// returns the last version that it is known to have saved.
func killSaver(t *testing.T, path string, first uint64, after time.Duration) uint64 {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s\n%d", saverEnv, path, first))
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	begun := first
	lines := bufio.NewScanner(stdout)
	if lines.Scan() {
		time.Sleep(after)
	}
	cmd.Process.Kill()
	for ok := true; ok; ok = lines.Scan() {
		v, err := strconv.ParseUint(lines.Text(), 10, 64)
		if err != nil {
			t.Errorf("the saving process says %q", lines.Text())
			break
		}
		begun = v
	}
	cmd.Wait() // reports the kill
	return begun - 1
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
