//go:build unix

package parallel_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm/launch"
	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/optim"
)

// kills is the number of processes that TestAimedKills kills: go test ./llm/parallel -run Aimed -kills 50
var kills = flag.Int("kills", 0, "how many ranks are killed, each in the midst of its work (default 2, or 16 in long "+
	"tests)")

// aimVariable holds the rank that kills itself, the phase, and the number of steps before the kill.
const aimVariable = "KASMINA_PARALLEL_AIM"

// aims lists the phases in which a rank is killed. The last five are parts of a save; see watch.
var aims = []string{"forward", "backward", "update", "own", "part", "parts", "main", "tidy"}

// victim is an engine that kills its process during the phase in aim.
type victim struct {
	llm.Parallel
	aim    string
	after  int    // number of steps before the kill
	path   string // path of the checkpoint
	steps  int
	batch  time.Duration // duration of the last batch
	update time.Duration // duration of the last update
}

// aimed wraps the engine of the rank to be killed.
func aimed(rank int, path string, newEngine func(*llm.Model, optim.Optimizer, llm.TrainConfig) (
	llm.Engine, error)) func(*llm.Model, optim.Optimizer, llm.TrainConfig) (llm.Engine, error) {
	v := victim{path: path}
	var own int
	n, err := fmt.Sscan(os.Getenv(aimVariable), &own, &v.aim, &v.after)
	if n != 3 || err != nil || own != rank {
		return newEngine
	}

	return func(m *llm.Model, o optim.Optimizer, c llm.TrainConfig) (llm.Engine, error) {
		e, err := newEngine(m, o, c)
		if err != nil {
			return nil, err
		}
		v.Parallel = e.(llm.Parallel)
		return &v, nil
	}
}

// die kills this process after the given time, as if from outside.
func die(in time.Duration) {
	time.AfterFunc(in, func() { _ = syscall.Kill(os.Getpid(), syscall.SIGKILL) })
}

// share returns a random duration between two fractions of d.
func share(d time.Duration, from, to float64) time.Duration {
	return time.Duration(float64(d) * (from + (to-from)*rand.Float64()))
}

func (v *victim) Batches(n int, next func() (data.Batch, error)) ([]float64, error) {
	v.steps++
	taken, began := 0, time.Now()
	losses, err := v.Parallel.Batches(n, func() (data.Batch, error) {
		b, err := next()
		if taken++; taken == v.Rank()+1 && v.steps > v.after { // the rank computes its first batch next
			switch v.aim {
			case "forward":
				die(share(v.batch, 0, 0.3))
			case "backward":
				die(share(v.batch, 0.4, 1))
			}
		}
		return b, err
	})

	v.batch = time.Since(began) * time.Duration(v.Ranks()) / time.Duration(n)
	return losses, err
}

func (v *victim) Update() (float64, error) {
	if v.aim == "update" && v.steps > v.after {
		die(share(v.update, 0, 1))
	}
	began := time.Now()
	norm, err := v.Parallel.Update()
	v.update = time.Since(began)
	return norm, err
}

// Own is called at the start of a save.
func (v *victim) Own() ([]optim.Part, error) {
	if v.steps > v.after {
		switch v.aim {
		case "own":
			die(0)
		case "part", "parts", "main", "tidy":
			before := v.names()
			go v.watch(before)
		}
	}
	return v.Parallel.Own()
}

// names returns the names in the checkpoint's directory.
func (v *victim) names() map[string]bool {
	names := map[string]bool{}
	entries, _ := os.ReadDir(filepath.Dir(v.path))
	for _, e := range entries {
		names[e.Name()] = true
	}
	return names
}

// watch kills this process at the moment of the save that aim names: while a part, all parts or the main
// file are being written, or when the main file is complete and older parts are being removed.
func (v *victim) watch(before map[string]bool) {
	old, _ := os.Stat(v.path)
	base := filepath.Base(v.path)
	for {
		temporary, complete := 0, 0
		for name := range v.names() {
			switch {
			case before[name]:
			case atomicfile.IsTemporary(name):
				temporary++
			case strings.HasPrefix(name, base+"."):
				complete++
			}
		}
		current, _ := os.Stat(v.path)
		replaced := current != nil && (old == nil || !os.SameFile(old, current))
		if v.aim == "part" && temporary+complete > 0 ||
			v.aim == "parts" && complete == v.Ranks() ||
			v.aim == "main" && complete == v.Ranks() && temporary > 0 || replaced {
			die(0)
			return
		}
	}
}

// TestAimedKills kills a rank in the forward pass, in the backward pass, in the update, or at a
// certain moment of a save that all ranks write together. It checks that all ranks exit and name the
// killed rank, that the set of files is either the old or the new one, and that continuing on another
// number of ranks reproduces an uninterrupted run bit for bit.
func TestAimedKills(t *testing.T) {
	want := faulty(t.TempDir()).file(t, 0)
	r := rand.New(rand.NewPCG(randtest.Seed(t), 2))
	dir := t.TempDir()
	s := faulty(dir)
	finish := func() {
		t.Helper()
		require.True(t, bytes.Equal(want, s.whole(t, s.save)),
			"the killed and resumed run differs from an uninterrupted one")
		require.NoError(t, os.RemoveAll(dir))
		require.NoError(t, os.Mkdir(dir, 0o777))
	}

	most, first := *kills, r.IntN(len(aims))
	if most == 0 {
		most = 2
		if randtest.Long() {
			most = 2 * len(aims)
		}
	}

	for kill := 0; kill < most; {
		size, aim := 2+r.IntN(3), aims[(first+kill)%len(aims)]
		rank := r.IntN(size)
		out, ended := start(t.Context(), t, dir, size, partsVariable+"=1",
			fmt.Sprintf("%s=%d %s %d", aimVariable, rank, aim, r.IntN(4)))
		err := <-ended
		if err == nil { // the run had no steps left
			finish()
			continue
		}
		var e *launch.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, rank, e.Deaths[0].Rank, "killed in %s: %v\n%s", aim, err,
			out.text.String())
		require.Equal(t, os.Signal(syscall.SIGKILL), e.Deaths[0].Signal)
		if _, err := os.Stat(s.save); !errors.Is(err, os.ErrNotExist) {
			_, err := llm.LoadModel(t.Context(), s.save)
			require.NoError(t, err, "the checkpoint after a kill in %s", aim)
		}
		kill++
	}

	_, ended := start(t.Context(), t, dir, 2, partsVariable+"=1")
	require.NoError(t, <-ended)
	finish()
}
