package parallel

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/comm/loopback"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// counting is a group that counts its operations.
type counting struct {
	comm.Group
	gathers int
}

func (c *counting) AllGather(dst, src comm.Ptr, n int, t comm.Type, s comm.Stream) error {
	c.gathers++
	return c.Group.AllGather(dst, src, n, t, s)
}

// members runs f at every rank of a team.
func members(t testing.TB, size int, f func(team *Team, group *counting) error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	require.NoError(t, l.Close())
	secret := comm.NewSecret()
	var wg sync.WaitGroup
	for r := range size {
		wg.Go(func() {
			w, err := comm.Join(t.Context(), comm.Place{Rank: r, Size: size, LocalRank: r,
				LocalSize: size, MasterAddr: "127.0.0.1", MasterPort: port,
				Run: fmt.Sprint(t.Name(), port), Secret: secret}, comm.Options{Timeout: time.Minute})
			if err != nil {
				t.Error(err)
				return
			}
			host := loopback.NewHost()
			g, err := loopback.New(t.Context(), w, host)
			if err != nil {
				t.Error(err)
				return
			}
			group := &counting{Group: g}
			team := newTeam(w, group, host)
			if err := f(team, group); err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
			if err := team.Close(nil); err != nil {
				t.Error(err)
			}
		})
	}

	wg.Wait()
}

// TestExchange checks that values of any length arrive at all ranks, and that short ones need a single
// operation.
func TestExchange(t *testing.T) {
	const size = 3
	seed := randtest.Seed(t)
	value := func(round, rank int) []byte {
		r := rand.New(rand.NewPCG(seed, uint64(round*size+rank)))
		lengths := []int{0, 1, r.IntN(frameBytes), frameBytes - 8, frameBytes - 7,
			r.IntN(100000)}
		b := make([]byte, lengths[(round+rank*(round%2))%len(lengths)])
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		return b
	}

	members(t, size, func(team *Team, group *counting) error {
		for round := range 24 {
			group.gathers = 0
			all, err := team.Exchange(value(round, team.Rank()))
			if err != nil {
				return err
			}
			long := false
			for r, got := range all {
				want := value(round, r)
				long = long || len(want) > frameBytes-8
				if !bytes.Equal(got, want) {
					return fmt.Errorf("round %d: %d bytes of rank %d, want %d", round, len(got), r,
						len(want))
				}
			}
			if !long && group.gathers != 1 {
				return fmt.Errorf("short values take %d operations", group.gathers)
			}
		}
		return nil
	})
}

// BenchmarkExchange measures the exchange of a short value among four ranks of one host.
func BenchmarkExchange(b *testing.B) {
	members(b, 4, func(team *Team, _ *counting) error {
		for range b.N {
			if _, err := team.Exchange([]byte("a short value")); err != nil {
				return err
			}
		}
		return nil
	})
}
