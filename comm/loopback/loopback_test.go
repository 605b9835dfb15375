package loopback

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// patience is much longer than any operation in these tests.
const patience = 100 * time.Second

// rank is one rank with its device and group.
type rank struct {
	*Group
	*Host
	world *comm.World
	t     *testing.T
}

func (r rank) Alloc(bytes int) comm.Ptr {
	p, err := r.Host.Alloc(bytes)
	require.NoError(r.t, err)
	return p
}

// put allocates memory with the given data.
func (r rank) put(data []byte) comm.Ptr {
	p := r.Alloc(len(data) + 1)
	copy(r.get(p, len(data)), data)
	return p
}

func (r rank) get(p comm.Ptr, n int) []byte {
	data, err := r.Bytes(p, n)
	require.NoError(r.t, err)
	return data
}

func everywhere(size int, f func(rank int) error) []error {
	errs := make([]error, size)
	var wg sync.WaitGroup
	for r := range size {
		wg.Go(func() { errs[r] = f(r) })
	}
	wg.Wait()
	return errs
}

// ranks starts the given number of ranks in this process.
func ranks(t *testing.T, size int) []rank {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	require.NoError(t, l.Close())
	secret := comm.NewSecret()
	all := make([]rank, size)
	errs := everywhere(size, func(r int) error {
		w, err := comm.Join(t.Context(), comm.Place{Rank: r, Size: size,
			LocalRank: r, LocalSize: size,
			MasterAddr: "127.0.0.1", MasterPort: port, Run: fmt.Sprint(t.Name(), port), Secret: secret},
			comm.Options{Timeout: patience})
		if err != nil {
			return err
		}
		h := NewHost()
		g, err := New(t.Context(), w, h)
		all[r] = rank{g, h, w, t}
		return err
	})

	require.NoError(t, errors.Join(errs...))
	t.Cleanup(func() {
		everywhere(size, func(r int) error {
			all[r].Abort(errors.New("the test is over"))
			all[r].world.Fail(errors.New("the test is over"))
			return all[r].world.Close()
		})
	})

	return all
}

var sizes = []int{1, 2, 3, 4, 8}

func randomBytes(rng *rand.Rand, n int) []byte {
	data := make([]byte, n)
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	return data
}

// newRand returns a generator with a new seed in each run, and logs the seed.
func newRand(t *testing.T) *rand.Rand {
	return randtest.New(t)
}

// TestCopies checks that all bits arrive unchanged, for every type and for odd lengths including
// zero.
func TestCopies(t *testing.T) {
	rng := newRand(t)
	for _, size := range sizes {
		all := ranks(t, size)
		for range 10 {
			count, typ, root := rng.IntN(300), comm.Type(rng.IntN(8)), rng.IntN(size)
			bytes := count * typ.Size()
			var data [][]byte
			together := []byte{}
			for range size {
				data = append(data, randomBytes(rng, bytes))
				together = append(together, data[len(data)-1]...)
			}

			errs := everywhere(size, func(r int) error {
				const stream = 3
				me, next, last := all[r], (r+1)%size, (r+size-1)%size
				src, gathered, received := me.put(data[r]),
					me.Alloc(size*bytes+1), me.Alloc(bytes+1)
				inPlace, sent := me.put(together), me.put(data[r])
				copy(me.get(inPlace, size*bytes), make([]byte, r*bytes)) // only this rank's part counts
				if err := errors.Join(
					me.AllGather(gathered, src, count, typ, stream),
					me.AllGather(inPlace, inPlace.Offset(r*count, typ), count, typ, stream),
					me.Broadcast(src, count, typ, root, stream),
					me.Batch(func(c comm.Collectives) error {
						if size == 1 {
							return nil
						}
						return errors.Join(c.Send(sent, count, typ, next, stream),
							c.Recv(received, count, typ, last,
								stream))
					}), me.Sync(stream)); err != nil {
					return err
				}

				require.Equal(t, together, append([]byte{}, me.get(gathered, size*bytes)...))
				require.Equal(t, together, append([]byte{}, me.get(inPlace, size*bytes)...))
				require.Equal(t, data[root], append([]byte{}, me.get(src, bytes)...))
				if size > 1 {
					require.Equal(t, data[last], append([]byte{}, me.get(received, bytes)...))
				}
				return nil
			})
			require.NoError(t, errors.Join(errs...))
		}

		errs := everywhere(size, func(r int) error { return all[r].Group.Close() })
		require.NoError(t, errors.Join(errs...))
	}
}

// encode encodes small numbers with sums that are exact in every type.
func encode(values []int, t comm.Type) []byte {
	var data []byte
	e := binary.NativeEndian
	for _, v := range values {
		switch t {
		case comm.Uint8:
			data = append(data, byte(v))
		case comm.Int32:
			data = e.AppendUint32(data, uint32(v))
		case comm.Int64, comm.Uint64:
			data = e.AppendUint64(data, uint64(v))
		case comm.Float16:
			data = e.AppendUint16(data, uint16(half.NewFloat16(float64(v))))
		case comm.BFloat16:
			data = e.AppendUint16(data, uint16(half.NewBFloat16(float32(v))))
		case comm.Float32:
			data = e.AppendUint32(data, math.Float32bits(float32(v)))
		case comm.Float64:
			data = e.AppendUint64(data, math.Float64bits(float64(v)))
		}
	}

	return data
}

func TestReductions(t *testing.T) {
	rng := newRand(t)
	for _, size := range sizes {
		all := ranks(t, size)
		for op := range comm.Op(3) {
			for typ := range comm.Type(8) {
				count := rng.IntN(40)
				values, want := make([][]int, size), make([]int, count*size)
				for r := range values {
					for i := range want {
						v := rng.IntN(30)
						if typ != comm.Uint8 && typ != comm.Uint64 {
							v -= 15
						}
						values[r] = append(values[r], v)
						switch {
						case r == 0:
							want[i] = v
						case op == comm.Sum:
							want[i] += v
						case op == comm.Max:
							want[i] = max(want[i], v)
						case op == comm.Min:
							want[i] = min(want[i], v)
						}
					}
				}

				errs := everywhere(size, func(r int) error {
					me, bytes := all[r], count*typ.Size()
					data := encode(values[r], typ)
					full, part, src := me.put(data), me.Alloc(bytes+1), me.put(data)
					if err := errors.Join(me.AllReduce(full, full, size*count, typ, op, 0),
						me.ReduceScatter(part, src, count, typ, op, 0),
						me.ReduceScatter(src.Offset(r*count, typ), src, count, typ, op, 0),
						me.Sync(0)); err != nil {
						return err
					}

					expected := append([]byte{}, encode(want, typ)...)
					require.Equal(t, expected, append([]byte{}, me.get(full, size*bytes)...),
						"%v %v", op, typ)
					mine := append([]byte{}, expected[r*bytes:(r+1)*bytes]...)
					require.Equal(t, mine, append([]byte{}, me.get(part, bytes)...), "%v %v", op,
						typ)
					require.Equal(t, mine,
						append([]byte{}, me.get(src.Offset(r*count, typ), bytes)...))
					return nil
				})
				require.NoError(t, errors.Join(errs...))
			}
		}
	}
}

// TestTwoStreams checks that two streams work concurrently and that their messages are not
// confused.
func TestTwoStreams(t *testing.T) {
	all := ranks(t, 3)
	gate := make(chan struct{})
	errs := everywhere(3, func(r int) error {
		me := all[r]
		var results []comm.Ptr

		// Stream 1 is blocked at rank 0 until stream 2 has finished there.
		err := me.Enqueue(1, func() error {
			if r == 0 {
				<-gate
			}
			return nil
		})

		for i := range 20 {
			src, dst := me.put([]byte{byte(10*i + r)}), me.Alloc(3)
			results = append(results, dst)
			err = errors.Join(err, me.AllGather(dst, src, 1, comm.Uint8, comm.Stream(1+i%2)))
		}

		err = errors.Join(err, me.Sync(2))
		if r == 0 {
			close(gate)
		}

		err = errors.Join(err, me.Sync(1))
		for i, p := range results {
			require.Equal(t, []byte{byte(10 * i), byte(10*i + 1), byte(10*i + 2)}, append([]byte{},
				me.get(p, 3)...))
		}

		return err
	})

	require.NoError(t, errors.Join(errs...))
}

// TestReplay checks that work rerun by a graph exchanges data again.
func TestReplay(t *testing.T) {
	all := ranks(t, 2)
	errs := everywhere(2, func(r int) error {
		graph := &recorder{Host: all[r].Host}
		me := all[r]
		me.device = graph
		src, dst := me.put([]byte{0}), me.Alloc(2)
		if err := me.AllGather(dst, src, 1, comm.Uint8, 0); err != nil {
			return err
		}

		for i := range byte(5) {
			me.get(src, 1)[0] = 10*i + byte(r)
			for _, work := range graph.work {
				if err := work(); err != nil {
					return err
				}
			}
			require.Equal(t, []byte{10 * i, 10*i + 1}, append([]byte{}, me.get(dst, 2)...))
		}

		return nil
	})

	require.NoError(t, errors.Join(errs...))
}

// recorder is a device that records work, as a capture does.
type recorder struct {
	*Host
	work []func() error
}

func (r *recorder) Enqueue(_ comm.Stream, work func() error) error {
	r.work = append(r.work, work)
	return nil
}

// TestDifferentCalls checks that mismatched calls, which would make NCCL hang, cause an error that
// names them.
func TestDifferentCalls(t *testing.T) {
	for name, calls := range map[string][2]func(me rank, p comm.Ptr) error{
		"AllGather of 1 uint8": {
			func(me rank, p comm.Ptr) error {
				return me.AllReduce(p, p, 1, comm.Uint8, comm.Sum, 0)
			},
			func(me rank, p comm.Ptr) error {
				return me.AllGather(p.Offset(8, comm.Uint8), p, 1, comm.Uint8, 0)
			}},
		"AllReduce by sum of 2 int32": {
			func(me rank, p comm.Ptr) error {
				return me.AllReduce(p, p, 1, comm.Int32, comm.Sum, 0)
			},
			func(me rank, p comm.Ptr) error {
				return me.AllReduce(p, p, 2, comm.Int32, comm.Sum, 0)
			}},
		"AllReduce by max": {
			func(me rank, p comm.Ptr) error {
				return me.AllReduce(p, p, 1, comm.Int32, comm.Sum, 0)
			},
			func(me rank, p comm.Ptr) error {
				return me.AllReduce(p, p, 1, comm.Int32, comm.Max, 0)
			}},
	} {
		all := ranks(t, 2)
		errs := everywhere(2, func(r int) error {
			return errors.Join(calls[r](all[r], all[r].Alloc(64)), all[r].Sync(0))
		})
		require.ErrorContains(t, errors.Join(errs...), name)
		require.ErrorContains(t, errors.Join(errs...), "all ranks must call the same")
	}
}

func TestBadArguments(t *testing.T) {
	me := ranks(t, 2)[0]
	for want, err := range map[string]error{
		"AllReduce of -1 elements":    me.AllReduce(1, 1, -1, comm.Float32, comm.Sum, 0),
		"AllGather of Type(200)":      me.AllGather(1, 1, 1, 200, 0),
		"ReduceScatter with Op(9)":    me.ReduceScatter(1, 1, 1, comm.Float32, 9, 0),
		"Broadcast with rank 2":       me.Broadcast(1, 1, comm.Float32, 2, 0),
		"Send with rank -1":           me.Send(1, 1, comm.Float32, -1, 0),
		"Recv with this rank itself":  me.Recv(1, 1, comm.Float32, 0, 0),
		"nothing is registered as 5":  me.Deregister(5),
		"nothing was allocated at 0x": me.Host.Free(3),
		"at least 1":                  second(me.Host.Alloc(0)),
		"a batch on streams 0 and 1": me.Batch(func(c comm.Collectives) error {
			return errors.Join(c.Send(1, 1, comm.Uint8, 1, 0), c.Recv(1, 1, comm.Uint8, 1, 1))
		}),
	} {
		require.ErrorContains(t, err, want)
	}

	require.NoError(t, me.Err(), "nothing of it was enqueued")
	p := me.Alloc(8)
	r, err := me.Register(p, 8)
	require.NoError(t, err)
	require.NoError(t, me.Deregister(r))
	require.Error(t, second(me.Register(p, 9)))
	require.NoError(t, me.Send(p, 9, comm.Uint8, 1, 0))
	require.ErrorContains(t, me.Sync(0), "9 bytes at")
	require.ErrorContains(t, me.Err(), "9 bytes at")
}

func second[T any](_ T, err error) error { return err }
