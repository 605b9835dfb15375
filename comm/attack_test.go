package comm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm/internal/channel"
)

// survives attacks a run of two ranks while rank 0 waits for rank 1, which joins only after the attack, and checks
// that both ranks then join and exchange values. joined, unless nil, is called at rank 1 before the exchange.
func survives(t *testing.T, p []Place, attack, joined func()) {
	t.Helper()
	attacked, ended := make(chan struct{}), make(chan []error, 1)
	go func() {
		ended <- everywhere(2, func(r int) error {
			if r == 1 {
				<-attacked
			}

			w, err := Join(t.Context(), p[r], Options{Timeout: patience})
			if err != nil {
				return err
			}

			if r == 1 && joined != nil {
				joined()
			}

			values, err := w.Gather(t.Context(), "x", []byte{byte(r)})
			if err == nil && (len(values) != 2 || values[0][0] != 0 || values[1][0] != 1) {
				err = fmt.Errorf("gathered %v", values)
			}
			return errors.Join(err, w.Close())
		})
	}()

	func() {
		defer close(attacked) // even if the attack ends the test
		attack()
	}()
	require.NoError(t, errors.Join(<-ended...))
}

// reach connects to the first port of the place, waiting until a process listens there.
func reach(t *testing.T, p Place) net.Conn {
	t.Helper()
	for began := time.Now(); time.Since(began) < patience; time.Sleep(time.Millisecond) {
		conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(p.MasterPort)))
		if err == nil {
			t.Cleanup(func() { conn.Close() })
			return conn
		}
	}
	t.Fatal("rank 0 does not listen")
	return nil
}

// TestStrangerTakesNoRank tries to join with full knowledge of the run except for its secret. The
// attempt must fail without revealing anything about the run, and must not affect it.
func TestStrangerTakesNoRank(t *testing.T) {
	p := places(t, 2)
	p[0].Run = "slurm 918273.4"
	p[1].Run = p[0].Run
	survives(t, p, func() {
		reach(t, p[0]).Close()
		for _, secret := range []Secret{NewSecret(), Secret(strings.Repeat(p[0].Run, 3))} {
			q := p[1]
			q.Secret = secret
			err := tryJoin(t, q)
			if !errors.Is(err, channel.ErrStranger) {
				t.Errorf("error for a stranger: %v, want ErrStranger", err)
			}
			for _, told := range []string{p[0].Run, string(p[0].Secret)} {
				if strings.Contains(fmt.Sprint(err), told) {
					t.Errorf("the error for a stranger contains %q", told)
				}
			}
		}
	}, nil)
}

// TestStrangerCannotFailTheRun sends garbage and forged messages to rank 0 while it waits for ranks.
func TestStrangerCannotFailTheRun(t *testing.T) {
	p := places(t, 2)
	frame := func(m message) []byte {
		head, err := json.Marshal(m)
		require.NoError(t, err)
		return append([]byte{0, 0, 0, byte(len(head))}, head...)
	}
	said := [][]byte{
		bytes.Repeat([]byte{0xff}, 1<<16),
		{0xff, 0xff, 0xff, 0xff},
		frame(message{Kind: fail, Text: "bye"}),
		frame(message{Kind: join, Member: member{1, "evil", 1}, Size: 2, Run: p[0].Run,
			Port: p[0].MasterPort}),
		frame(message{Kind: join, Member: member{-5, "", 0}, Size: 2, Run: p[0].Run}),
		frame(message{Kind: join, Member: member{1 << 60, "", 0}, Size: -2}),
		nil,
	}

	survives(t, p, func() {
		for i := range 50 {
			conn := reach(t, p[0])
			_, _ = conn.Write(said[i%len(said)])
			if i%2 == 0 {
				conn.Close()
			}
		}
	}, nil)
}

// TestFloodAtTheRendezvous opens more idle connections than rank 0 keeps.
func TestFloodAtTheRendezvous(t *testing.T) {
	p := places(t, 2)
	survives(t, p, func() {
		for range channel.MaxPending + 100 {
			reach(t, p[0])
		}
	}, nil)
}

// TestSquatter runs a relay on MASTER_PORT before rank 0 starts, so that rank 0 has to use the next
// port. The relay cuts its connections after the ranks have joined. They must be connected directly.
func TestSquatter(t *testing.T) {
	// A rank tries several ports at the same time, and may reach rank 0 before it tries the relay.
	for began := time.Now(); time.Since(began) < patience; {
		if squat(t) > 0 {
			return
		}
	}
	t.Error("no rank tried the relay")
}

// squat performs TestSquatter once, and returns the number of connections to the relay.
func squat(t *testing.T) (came int) {
	p := places(t, 2)
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(p[0].MasterPort)))
	require.NoError(t, err)
	defer l.Close()
	var mu sync.Mutex
	var passed []net.Conn
	direct := net.JoinHostPort("127.0.0.1", strconv.Itoa(p[0].MasterPort+1))
	go func() {
		for {
			a, err := l.Accept()
			if err != nil {
				return
			}

			mu.Lock()
			came++
			mu.Unlock()
			go func() {
				b, err := net.Dial("tcp", direct)
				if err != nil {
					a.Close()
					return
				}
				mu.Lock()
				passed = append(passed, a, b)
				mu.Unlock()
				go func() { _, _ = io.Copy(a, b); a.Close() }()
				_, _ = io.Copy(b, a)
				b.Close()
			}()
		}
	}()

	next := p[0]
	next.MasterPort++
	survives(t, p, func() { reach(t, next).Close() }, func() {
		mu.Lock()
		defer mu.Unlock()
		for _, c := range passed {
			c.Close()
		}
	})

	mu.Lock()
	defer mu.Unlock()
	return came
}

// TestPassedOn reaches rank 0 only through a relay on another port, which must be rejected.
func TestPassedOn(t *testing.T) {
	p := places(t, 2)
	open(t, p[0], 0)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	go func() {
		a, err := l.Accept()
		if err != nil {
			return
		}
		b := reach(t, p[0])
		go func() { _, _ = io.Copy(a, b) }()
		_, _ = io.Copy(b, a)
	}()

	id, err := channel.New(string(p[1].Secret))
	require.NoError(t, err)
	c := caller{place: p[1], id: id, targets: []string{l.Addr().String()}}
	_, _, err = c.attempt(t.Context(), c.targets[0])
	require.ErrorContains(t, err, "relays connections to rank 0 at port "+
		strconv.Itoa(p[0].MasterPort))
}

// TestListeningStops checks that rank 0 stops listening once all ranks have joined.
func TestListeningStops(t *testing.T) {
	all := worlds(t, 2, Options{})
	for _, a := range all[0].store.listener.Addrs() {
		require.Eventually(t, func() bool {
			conn, err := net.Dial("tcp", a.String())
			if err == nil {
				conn.Close()
			}
			return err != nil
		}, patience, time.Millisecond)
	}
}

// TestWhereRankZeroListens checks that rank 0 listens on the loopback address in a run on one host,
// otherwise on the address of MASTER_ADDR, and on all addresses only on request.
func TestWhereRankZeroListens(t *testing.T) {
	p := places(t, 2)[0]
	hosts := func(change func(*Place)) (all []string) {
		q := p
		change(&q)
		id, err := channel.New(string(q.Secret))
		require.NoError(t, err)
		l, err := q.listen(t.Context(), id)
		require.NoError(t, err)
		defer l.Close()
		for _, a := range l.Addrs() {
			all = append(all, a.(*net.TCPAddr).IP.String())
		}
		return all
	}

	name, err := os.Hostname()
	require.NoError(t, err)
	for _, master := range []string{"127.0.0.1", "localhost", name, "gpu07.cluster.example"} {
		require.Equal(t, []string{loopback}, hosts(func(p *Place) { p.MasterAddr = master }), master)
	}

	several := func(p *Place) { p.LocalSize = 1 }
	require.Equal(t, []string{loopback}, hosts(several))
	for _, host := range hosts(func(p *Place) { several(p); p.Listen = "0.0.0.0" }) {
		require.True(t, net.ParseIP(host).IsUnspecified(), host)
	}

	own := func() string {
		addrs, err := net.InterfaceAddrs()
		require.NoError(t, err)
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() && n.IP.To4() != nil {
				return n.IP.String()
			}
		}
		return ""
	}()

	if own == "" {
		t.Skip("this host has only a loopback address")
	}

	require.Equal(t, []string{own}, hosts(func(p *Place) { several(p); p.MasterAddr = own }))
	require.Equal(t, []string{own}, hosts(func(p *Place) {
		several(p)
		p.MasterAddr, p.Listen = "gpu07.cluster.example", own
	}))
}

// TestAddressOfAnotherHost checks the error for a MASTER_ADDR that rank 0 cannot listen on.
func TestAddressOfAnotherHost(t *testing.T) {
	p := places(t, 2)[0]
	p.LocalSize, p.MasterAddr = 1, "192.0.2.7" // reserved by RFC 5737
	id, err := channel.New(string(p.Secret))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // otherwise rank 0 waits for the name servers to learn its address
	_, err = p.listen(ctx, id)
	require.ErrorContains(t, err,
		"MASTER_ADDR=192.0.2.7 is [192.0.2.7], not an address of this host; set KASMINA_LISTEN")
	p.Listen = "192.0.2.8"
	_, err = p.listen(ctx, id)
	require.ErrorContains(t, err, "KASMINA_LISTEN=192.0.2.8 is [192.0.2.8], not an address of this host")
}

// TestMissingSecret checks that a secret is required, and that the error explains how to create and
// pass one.
func TestMissingSecret(t *testing.T) {
	p := places(t, 2)[0]
	p.Secret = ""
	_, missing := Join(t.Context(), p, Options{})
	_, short := SecretFromEnvironment(func(name string) string {
		return map[string]string{SecretVariable: "password"}[name]
	})
	for want, err := range map[string]error{"no usable secret: the processes of a run must": missing,
		"it has 8 characters, want at least 22": short} {
		require.ErrorIs(t, err, ErrSecret)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "openssl rand -hex 32")
		require.ErrorContains(t, err, SecretVariable)
		require.ErrorContains(t, err, SecretFileVariable)
		require.NotContains(t, err.Error(), "password")
	}

	for file, source := range map[string]string{"torchrun.env": "torchrun", "srun.env": "Slurm",
		"mpirun.env": "Open MPI", "trainer.env": "Kubeflow Trainer"} {
		p, err := FromEnvironment(variables(t, file))
		require.ErrorIs(t, err, ErrSecret)
		require.Equal(t, source, p.Source)
		require.Greater(t, p.Size, 1)
	}

	_, err := Join(t.Context(), Place{Size: 1, LocalSize: 1}, Options{})
	require.NoError(t, err)
}

// TestSecretFile reads the secret from a file, which must not be accessible to other users.
func TestSecretFile(t *testing.T) {
	path, secret := filepath.Join(t.TempDir(), "secret"), NewSecret()
	require.NoError(t, os.WriteFile(path, []byte(string(secret)+"\n"), 0o600))
	getenv := with(variables(t, "torchrun.env"), SecretFileVariable+"="+path)
	p, err := FromEnvironment(getenv)
	require.NoError(t, err)
	require.True(t, p.Secret == secret)

	// The secret itself takes precedence over the file.
	other := NewSecret()
	p, err = FromEnvironment(with(getenv, SecretVariable+"="+string(other)))
	require.NoError(t, err)
	require.True(t, p.Secret == other)
	if runtime.GOOS != "windows" {
		for _, mode := range []os.FileMode{0o640, 0o604, 0o620} {
			require.NoError(t, os.Chmod(path, mode))
			_, err = FromEnvironment(getenv)
			require.ErrorIs(t, err, ErrSecret)
			require.ErrorContains(t, err, "chmod 600 "+path)
		}
		require.NoError(t, os.Chmod(path, 0o600))
	}

	require.NoError(t, os.WriteFile(path, []byte(" \n"), 0o600))
	_, err = FromEnvironment(getenv)
	require.ErrorContains(t, err, "is empty")
	require.NoError(t, os.Remove(path))
	_, err = FromEnvironment(getenv)
	require.ErrorIs(t, err, os.ErrNotExist)
}

// TestSecretIsNotPrinted formats, logs and encodes a place in many ways, none of which may reveal the
// secret.
func TestSecretIsNotPrinted(t *testing.T) {
	secret := NewSecret()
	p := Place{Rank: 1, Size: 2, Secret: secret}
	var printed bytes.Buffer
	for _, verb := range "vsqxXdTtgebo" {
		for _, flag := range []string{"", "+", "#", "50"} {
			format := "%" + flag + string(verb)
			fmt.Fprintf(&printed, format+format+format, secret, p, &p)
			fmt.Fprintf(&printed, format, []any{p, secret, map[Secret]Secret{secret: secret}})
		}
	}

	for _, handler := range []slog.Handler{slog.NewTextHandler(&printed, nil),
		slog.NewJSONHandler(&printed, nil)} {
		slog.New(handler).Info("here", "place", p, "secret", secret)
	}

	require.NoError(t, json.NewEncoder(&printed).Encode([]any{p, secret}))
	require.Contains(t, printed.String(), redacted)
	hexed := fmt.Sprintf("%x", string(secret))
	for _, shown := range []string{string(secret), hexed, strings.ToUpper(hexed), string(secret)[:8]} {
		require.False(t, strings.Contains(printed.String(), shown), "the secret is printed")
	}

	require.NotEqual(t, secret, NewSecret())
	require.NoError(t, NewSecret().check())
}

// TestGatherLarge gathers values that are larger than the former message limit of 64 MiB.
func TestGatherLarge(t *testing.T) {
	all := worlds(t, 2, Options{})
	big := bytes.Repeat([]byte{1, 2, 3, 4, 5}, 40<<20/5)
	errs := everywhere(2, func(r int) error {
		own := big[r:]
		values, err := all[r].Gather(t.Context(), "big", own)
		if err == nil && (len(values) != 2 || !bytes.Equal(values[0], big) ||
			!bytes.Equal(values[1], big[1:])) {
			err = errors.New("the values differ")
		}
		return err
	})

	require.NoError(t, errors.Join(errs...))
}

// TestGatherTooLarge checks that oversized values fail on every rank without delay, even before the
// last rank has contributed, and that the run can continue.
func TestGatherTooLarge(t *testing.T) {
	all := worlds(t, 3, Options{})
	all[0].store.mu.Lock()
	all[0].store.maxBytes = 1000
	all[0].store.mu.Unlock()
	for _, c := range []struct {
		sizes [3]int
		want  string
	}{
		{[3]int{400, 400, 400}, "the values of 3 ranks have 1200 bytes together, want at most 1000"},
		{[3]int{0, 1001, 0}, "have 1001 bytes together"},
		{[3]int{MaxGather + 1, 0, 0}, "have 1073741825 bytes together"},
	} {
		errs := everywhere(3, func(r int) error {
			if r == 2 {
				time.Sleep(100 * time.Millisecond)
			}
			_, err := all[r].Gather(t.Context(), "large", make([]byte, c.sizes[r]))
			return err
		})
		for r, err := range errs {
			require.ErrorContains(t, err, `gathering "large": the values of `, r)
			require.ErrorContains(t, err, c.want, r)
		}
	}

	errs := everywhere(3, func(r int) error {
		values, err := all[r].Gather(t.Context(), "large", make([]byte, 300))
		if err == nil && len(values) != 3 {
			err = errors.New("values are missing")
		}
		return err
	})

	require.NoError(t, errors.Join(errs...))
}

// TestGatherWithoutOne checks that a gathering fails after a rank has left.
func TestGatherWithoutOne(t *testing.T) {
	all := worlds(t, 3, Options{})
	errs := everywhere(3, func(r int) error {
		switch r {
		case 1:
			time.Sleep(50 * time.Millisecond)
			all[1].wire.post(message{Kind: leave})
			return nil
		case 2:
			time.Sleep(100 * time.Millisecond)
		}
		_, err := all[r].Gather(t.Context(), "x", nil)
		return err
	})

	require.ErrorContains(t, errs[0], "rank 1")
	require.ErrorContains(t, errs[0], "has left")
	require.ErrorContains(t, errs[2], "has left")
}
