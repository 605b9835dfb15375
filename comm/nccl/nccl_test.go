package nccl

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/internal/sharedlib"
)

// fake is a library that records its calls.
type fake struct {
	*api
	notes         func() string
	fail, pending func(r result)
}

// newFake compiles the library, which requires a C compiler, and loads a new copy for each test.
func newFake(t *testing.T) fake {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("there is no C compiler")
	}

	path := filepath.Join(t.TempDir(), "libnccl.so.2")
	out, err := exec.Command(cc, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", path,
		"testdata/fake.c").CombinedOutput()
	require.NoError(t, err, string(out))
	a, err := open(path)
	require.NoError(t, err)
	library, err := sharedlib.Open(path)
	require.NoError(t, err)
	f := fake{api: a}
	for symbol, to := range map[string]any{"fakeNotes": &f.notes, "fakeFail": &f.fail,
		"fakePending": &f.pending} {
		address, err := sharedlib.Lookup(library, symbol)
		require.NoError(t, err)
		purego.RegisterFunc(to, address)
	}

	return f
}

// worlds joins ranks in this process.
func worlds(t *testing.T, size int) []*comm.World {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	require.NoError(t, l.Close())
	secret := comm.NewSecret()
	all, errs := make([]*comm.World, size), make([]error, size)
	var wg sync.WaitGroup
	for r := range size {
		wg.Go(func() {
			all[r], errs[r] = comm.Join(t.Context(), comm.Place{Rank: r, Size: size,
				LocalRank: r, LocalSize: size,
				MasterAddr: "127.0.0.1", MasterPort: port, Run: fmt.Sprint(t.Name(), port), Secret: secret},
				comm.Options{Timeout: time.Minute})
		})
	}

	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	t.Cleanup(func() {
		for _, w := range all {
			w.Fail(errors.New("the test is over"))
			w.Close()
		}
	})

	return all
}

// groups creates the communicators of three ranks on the fake.
func groups(t *testing.T, f fake) []*Group {
	t.Helper()
	w := worlds(t, 3)
	all, errs := make([]*Group, len(w)), make([]error, len(w))
	var wg sync.WaitGroup
	var one sync.Mutex // the fake's record is not safe for concurrent use
	for r := range w {
		wg.Go(func() { all[r], errs[r] = newGroup(t.Context(), w[r], locked{&one}, f.api) })
	}

	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	return all
}

type locked struct{ *sync.Mutex }

func (l locked) Do(f func() error) error {
	l.Lock()
	defer l.Unlock()
	return f()
}

// TestInit checks that all arguments arrive, including the identifier of 128 bytes, which is passed by
// value.
func TestInit(t *testing.T) {
	f := newFake(t)
	all := groups(t, f)
	notes := f.notes()
	for r := range all {
		require.Contains(t, notes,
			fmt.Sprintf("init %d of 3 id 128 size 48 magic cafebeef version 21800 blocking 1 "+
				"ctas -2147483648 net (nil) share -2147483648\n", r))
		require.Equal(t, r, all[r].Rank())
		require.Equal(t, 3, all[r].Size())
	}
}

// TestCalls checks that every collective reaches NCCL with its arguments, inside a group.
func TestCalls(t *testing.T) {
	f := newFake(t)
	g := groups(t, f)[1]
	f.notes()
	for _, c := range []struct {
		call func() error
		want string
	}{
		{func() error {
			return g.AllReduce(0x10, 0x20, 5, comm.Float32, comm.Max, 0x5)
		}, "AllReduce 0x20 0x10 5 7 2 0x600 0x5"},
		{func() error {
			return g.ReduceScatter(0x10, 0x20, 6, comm.BFloat16, comm.Sum, 0x5)
		}, "ReduceScatter 0x20 0x10 6 9 0 0x600 0x5"},
		{func() error {
			return g.AllGather(0x10, 0x20, 1<<33, comm.Uint8, 0x5)
		}, "AllGather 0x20 0x10 8589934592 1 0x600 0x5"},
		{func() error {
			return g.Broadcast(0x10, 8, comm.Float64, 2, 0x5)
		}, "Broadcast 0x10 0x10 8 8 2 0x600 0x5"},
		{func() error {
			return g.Send(0x20, 9, comm.Float16, 2, 0x5)
		}, "Send 0x20 9 6 2 0x600 0x5"},
		{func() error { return g.Recv(0x10, 9, comm.Uint64, 0, 0x5) }, "Recv 0x10 9 5 0 0x600 0x5"},
		{func() error {
			return g.AllReduce(0x10, 0x10, 1, comm.Int64, comm.Min, 0)
		}, "AllReduce 0x10 0x10 1 4 3 0x600 (nil)"},
		{func() error { return g.Recv(0x10, 1, comm.Int32, 0, 0) }, "Recv 0x10 1 2 0 0x600 (nil)"},
	} {
		require.NoError(t, c.call())
		require.Equal(t, "start\n"+c.want+"\nend\n", f.notes())
	}

	require.NoError(t, g.Batch(func(c comm.Collectives) error {
		return errors.Join(c.Send(1, 1, comm.Uint8, 0, 3), c.Recv(2, 1, comm.Uint8, 2, 3))
	}))
	require.Equal(t, "start\nSend 0x1 1 1 0 0x600 0x3\nRecv 0x2 1 1 2 0x600 0x3\nend\n", f.notes())
	p, err := g.Alloc(300)
	require.NoError(t, err)
	require.EqualValues(t, 0x7000, p)
	r, err := g.Register(p, 300)
	require.NoError(t, err)
	require.NoError(t, errors.Join(g.Deregister(r), g.Free(p)))
	require.Equal(t, "alloc 300\nregister 0x600 0x7000 300\nderegister 0x600 0x77\nfree 0x7000\n",
		f.notes())
	require.NoError(t, g.Close())
	require.Equal(t, "destroy 0x600\n", f.notes())
	require.ErrorIs(t, g.AllReduce(1, 1, 1, comm.Uint8, comm.Sum, 0), comm.ErrClosed)
	require.NoError(t, g.Close())
}

// TestRefusedBatch checks that a batch with an invalid call enqueues nothing.
func TestRefusedBatch(t *testing.T) {
	f := newFake(t)
	g := groups(t, f)[0]
	f.notes()
	require.ErrorContains(t, g.Batch(func(c comm.Collectives) error {
		if err := c.Send(1, 1, comm.Uint8, 1, 0); err != nil {
			return err
		}
		return c.Recv(1, 1, comm.Uint8, 3, 0)
	}), "Recv with rank 3")

	_, err := g.Alloc(0)
	require.ErrorContains(t, err, "0 bytes")
	require.NoError(t, g.Batch(func(comm.Collectives) error { return nil }))
	f.fail(0)
	require.NoError(t, g.AllGather(1, 1, 1, comm.Uint8, 0))
	require.Equal(t, "start\nAllGather 0x1 0x1 1 1 0x600 (nil)\nend\n", f.notes())
}

// TestFailures checks that errors contain the call's name and NCCL's description, that they wrap
// ErrPeer if another rank is to blame, and that everything fails with the cause after an abort.
func TestFailures(t *testing.T) {
	f := newFake(t)
	g := groups(t, f)[0]
	f.fail(3)
	require.EqualError(t, g.AllGather(1, 1, 1, comm.Uint8, 0),
		"nccl: ncclGroupStart: internal error: the cable is out")
	require.NoError(t, g.Err())
	f.pending(inProgress)
	require.NoError(t, g.Err())
	f.pending(remoteError)
	require.ErrorIs(t, g.Err(), comm.ErrPeer)
	require.ErrorContains(t, g.Err(), "remote error: the cable is out")
	f.notes()
	cause := errors.New("rank 2 died")
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() { g.Abort(cause) })
	}

	wg.Wait()
	g.Abort(errors.New("later"))
	require.Equal(t, "abort 0x600\n", f.notes())
	require.ErrorIs(t, g.Err(), cause)
	require.ErrorIs(t, g.AllGather(1, 1, 1, comm.Uint8, 0), cause)
	_, err := g.Register(1, 1)
	require.ErrorIs(t, err, cause)
	require.ErrorIs(t, g.Close(), cause)
	require.Empty(t, f.notes())
}

// TestMissingLibrary checks that the error lists the searched locations and explains how to install
// the library.
func TestMissingLibrary(t *testing.T) {
	f := sharedlib.Host()
	f.GOOS = "linux"
	f.Getenv = func(name string) string {
		return map[string]string{"VIRTUAL_ENV": "/nowhere", "LD_LIBRARY_PATH": "/lib/nowhere"}[name]
	}
	var asked []string
	for _, p := range places(f) {
		asked = append(asked, string(p))
	}

	all := strings.Join(asked, " ")
	for _, want := range []string{"/lib/nowhere/libnccl.so.2", " libnccl.so.2 ",
		"/nowhere/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2"} {
		require.Contains(t, all, want)
	}

	f.GOOS = "windows"
	require.Empty(t, places(f))
	t.Setenv(Variable, t.TempDir())
	loaded.Lock()
	was := loaded.api
	loaded.api = nil
	loaded.Unlock()
	t.Cleanup(func() { loaded.api = was })
	_, err := Version()
	var missing *sharedlib.NotFoundError
	require.ErrorAs(t, err, &missing)
	require.ErrorContains(t, err, "pip install nvidia-nccl-cu13")
	empty := filepath.Join(t.TempDir(), "libnccl.so.2")
	require.NoError(t, os.WriteFile(empty, []byte("no library"), 0o666))
	_, err = open(empty)
	require.Error(t, err)
}

// TestRealLibrary loads NCCL, if it is installed, and creates an identifier, which needs no GPU.
func TestRealLibrary(t *testing.T) {
	a, err := load()
	if err != nil {
		t.Skip(err)
	}

	version, err := Version()
	require.NoError(t, err)
	require.Regexp(t, `^2\.\d+\.\d+$`, version)
	var one, two uniqueID
	require.NoError(t, a.check("ncclGetUniqueId", 0, a.GetUniqueID(&one)))
	require.NoError(t, a.check("ncclGetUniqueId", 0, a.GetUniqueID(&two)))
	require.NotEqual(t, one, two)
}
