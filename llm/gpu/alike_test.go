package gpu

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/llm/parallel"
	"github.com/kasmina-go/kasmina/optime"
)

// compiled is a fake engine.
type compiled struct{ variants []optime.Choice }

func (c *compiled) Close() error {
	c.variants = nil
	return nil
}

// eachMember runs f at every rank of a team on CPUs.
func eachMember(t *testing.T, size int, f func(team *parallel.Team) error) (errs []error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	require.NoError(t, l.Close())
	secret := comm.NewSecret()
	errs = make([]error, size)
	var wg sync.WaitGroup
	for r := range size {
		wg.Go(func() {
			w, err := comm.Join(t.Context(), comm.Place{Rank: r, Size: size, LocalRank: r,
				LocalSize: size, MasterAddr: "127.0.0.1", MasterPort: port,
				Run: fmt.Sprint(t.Name(), port), Secret: secret}, comm.Options{Timeout: time.Minute})
			if err != nil {
				errs[r] = err
				return
			}
			team, err := parallel.Join(t.Context(), w)
			if err != nil {
				errs[r] = err
				return
			}
			errs[r] = f(team)
			if err := team.Close(nil); err != nil {
				t.Error(err)
			}
		})
	}

	wg.Wait()
	return errs
}

// TestCompileAlike checks that only rank 0 chooses, and that all ranks receive its choices or its
// error.
func TestCompileAlike(t *testing.T) {
	chosen := []optime.Choice{{Op: "RMSNorm", Shape: "6x5", Variant: "wide-1"}}
	for _, variants := range [][]optime.Choice{chosen, nil} {
		for _, err := range eachMember(t, 3, func(team *parallel.Team) error {
			e, err := compileAlike(team, func() (*compiled, []optime.Choice, error) {
				if team.Rank() > 0 {
					return nil, nil, errors.New("chosen at another rank")
				}
				return &compiled{variants}, variants, nil
			}, func(given []optime.Choice) (*compiled, error) {
				if given == nil || team.Rank() == 0 {
					return nil, fmt.Errorf("rank %d is given %v", team.Rank(), given)
				}
				return &compiled{given}, nil
			})
			if err == nil && (len(e.variants) != len(variants) || len(variants) > 0 && (e.variants[0].Variant !=
				variants[0].Variant || e.variants[0].Shape != variants[0].Shape)) {
				err = fmt.Errorf("rank %d has %v", team.Rank(), e.variants)
			}
			return err
		}) {
			require.NoError(t, err)
		}
	}

	for _, err := range eachMember(t, 3, func(team *parallel.Team) error {
		_, err := compileAlike(team, func() (*compiled, []optime.Choice, error) {
			return nil, nil, errors.New("no memory")
		}, func([]optime.Choice) (*compiled, error) {
			t.Error("compiled after rank 0 has failed")
			return nil, nil
		})
		return err
	}) {
		require.ErrorContains(t, err, "no memory")
	}
}
