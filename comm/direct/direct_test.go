package direct

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
)

// host is the memory of all GPUs of a host, with their streams. The work of one stream is executed
// in order, and the work of different streams in any order.
type host struct {
	mu     sync.Mutex
	change *sync.Cond
	next   comm.Ptr
	blocks map[comm.Ptr][]byte
}

func newHost() *host {
	h := &host{next: 1 << 20, blocks: map[comm.Ptr][]byte{}}
	h.change = sync.NewCond(&h.mu)
	return h
}

// elsewhere is the base of addresses that are valid only in another process.
const elsewhere = comm.Ptr(1) << 44

// device is one of the GPUs, as seen by a process.
type device struct {
	*host
	imports map[comm.Ptr]int
	streams map[comm.Stream]chan func()
	refuse  error
}

func (h *host) device() *device {
	return &device{host: h, imports: map[comm.Ptr]int{}, streams: map[comm.Stream]chan func(){}}
}

func (d *device) Do(f func() error) error { return f() }

// at returns n bytes of memory.
func (d *device) at(p comm.Ptr, n int) []byte {
	p &^= elsewhere
	for _, base := range slices.Sorted(maps.Keys(d.blocks)) {
		b := d.blocks[base]
		if p >= base && int(p-base)+n <= len(b) {
			return b[p-base:][:n]
		}
	}
	panic(fmt.Sprintf("%d bytes at %#x are not in one allocation", n, uint64(p)))
}

func (d *device) Alloc(bytes int) (comm.Ptr, error) {
	d.mu.Lock()
	defer d.mu.Unlock()

	p := d.next
	d.next += comm.Ptr(bytes+511) &^ 255
	d.blocks[p] = make([]byte, bytes)
	return p, nil
}

func (d *device) Free(p comm.Ptr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.blocks, p)
	return nil
}

func (d *device) Fill(p comm.Ptr, words []uint32) error {
	d.mu.Lock()
	defer d.mu.Unlock()

	for i, w := range words {
		d.at(p+comm.Ptr(4*i), 1)[0] = byte(w)
	}
	d.change.Broadcast()
	return nil
}

func (d *device) Allocation(p comm.Ptr) (comm.Ptr, error) {
	d.mu.Lock()
	defer d.mu.Unlock()

	for _, base := range slices.Sorted(maps.Keys(d.blocks)) {
		if p >= base && int(p-base) < len(d.blocks[base]) {
			return base, nil
		}
	}
	return 0, errors.New("no such memory")
}

func (d *device) Export(base comm.Ptr) (string, error) { return fmt.Sprint(uint64(base)), d.refuse }

func (d *device) Import(handle string) (comm.Ptr, error) {
	var base comm.Ptr
	_, err := fmt.Sscan(handle, &base)
	d.imports[base|elsewhere]++
	return base | elsewhere, err
}

func (d *device) Forget(base comm.Ptr) error {
	if d.imports[base] != 1 {
		return fmt.Errorf("%#x is not imported once", uint64(base))
	}
	delete(d.imports, base)
	return nil
}

// enqueue adds work to a stream.
func (d *device) enqueue(s comm.Stream, work func()) {
	if d.streams[s] == nil {
		queue := make(chan func(), 1<<16)
		d.streams[s] = queue
		go func() {
			for f := range queue {
				time.Sleep(time.Duration(rand.IntN(200)) * time.Microsecond)
				f()
			}
		}()
	}

	d.streams[s] <- work
}

// sync waits for a stream.
func (d *device) sync(s comm.Stream) {
	done := make(chan struct{})
	d.enqueue(s, func() { close(done) })
	<-done
}

func (d *device) locked(s comm.Stream, f func()) error {
	d.enqueue(s, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		f()
		d.change.Broadcast()
	})
	return nil
}

func (d *device) Copy(to, from comm.Ptr, bytes int, s comm.Stream) error {
	if to < elsewhere || from >= elsewhere {
		return fmt.Errorf("the copy to %#x from %#x is not a copy to another rank", uint64(to),
			uint64(from))
	}
	return d.locked(s, func() { copy(d.at(to, bytes), d.at(from, bytes)) })
}

func (d *device) Write(word comm.Ptr, v uint32, s comm.Stream) error {
	return d.locked(s, func() { d.at(word, 1)[0] = byte(v) })
}

func (d *device) Wait(word comm.Ptr, v uint32, s comm.Stream) error {
	return d.locked(s, func() {
		for d.at(word, 1)[0] != byte(v) {
			d.change.Wait()
		}
	})
}

// plain is a group without routes.
type plain struct {
	comm.Group
	world *comm.World
	mu    sync.Mutex
	cause error
}

func (p *plain) Rank() int    { return p.world.Rank() }
func (p *plain) Size() int    { return p.world.Size() }
func (p *plain) Close() error { return nil }
func (p *plain) Err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cause
}
func (p *plain) Abort(cause error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cause = cause
}

// each runs f at size ranks of one host.
func each(t *testing.T, size int, refuse error, f func(d *device, g comm.Group, why error)) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	require.NoError(t, l.Close())
	secret := comm.NewSecret()
	h := newHost()
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

			passed := false
			defer func() {
				if !passed {
					w.Fail(errors.New("the test has failed"))
				}
			}()
			d := h.device()
			if r == 1 {
				d.refuse = refuse
			}

			g, why, err := newGroup(t.Context(), w, d, &plain{world: w}, d, nil)
			if err != nil {
				t.Error(err)
				return
			}

			f(d, g, why)
			passed = true
			if err := errors.Join(w.Barrier(t.Context(), "done"), g.Close(),
				w.Close()); err != nil {
				t.Error(err)
			}
			if len(d.imports) > 0 {
				t.Errorf("rank %d has not given up %v", r, d.imports)
			}
		})
	}

	wg.Wait()
	if !t.Failed() {
		require.Empty(t, h.blocks, "allocations are left")
	}
}

// TestRoute checks that data arrives, round after round, in memory that several routes use in turn,
// and never before the receiver has released the previous data.
func TestRoute(t *testing.T) {
	const size, routes, turns, rounds, bytes = 3, 4, 2, 6, 64
	each(t, size, nil, func(d *device, g comm.Group, why error) {
		require.NoError(t, why)
		from, err := d.Alloc(routes * bytes)
		require.NoError(t, err)
		places, err := d.Alloc(turns * size * bytes)
		require.NoError(t, err)
		var all []comm.Route
		for i := range routes {
			var sends, receives []comm.Leg
			for r := range size {
				if r == g.Rank() {
					continue
				}
				slot := places + comm.Ptr((i%turns*size+r)*bytes)
				for _, part := range [][2]int{{0, 24}, {24, bytes}} { // two legs to each rank
					n := part[1] - part[0]
					sends = append(sends, comm.Leg{Rank: r, Bytes: n,
						At: from + comm.Ptr(i*bytes+part[0])})
					receives = append(receives, comm.Leg{Rank: r, Bytes: n,
						At: slot + comm.Ptr(part[0])})
				}
			}

			route, err := comm.NewRoute(g, i%turns, sends, receives)
			require.NoError(t, err)
			all = append(all, route)
		}

		const s = comm.Stream(7)
		value := func(round, route, rank int) byte { return byte(1 + rank + 10*route + 50*round) }
		var wrong []string
		for round := range rounds {
			for i := range routes {
				require.NoError(t, d.locked(s, func() {
					for j := range bytes {
						d.at(from+comm.Ptr(i*bytes+j), 1)[0] = value(round, i, g.Rank())
					}
				}))
				require.NoError(t, all[i].Enqueue(s))
				require.NoError(t, d.locked(s, func() {
					for r := range size {
						if r == g.Rank() {
							continue
						}
						for _, v := range d.at(places+comm.Ptr((i%turns*size+r)*bytes), bytes) {
							if v != value(round, i, r) {
								wrong = append(wrong, fmt.Sprint(round, i, r, v))
							}
						}
					}
				}))
				require.NoError(t, all[i].Release(s))
			}
		}

		d.sync(s)
		require.Empty(t, wrong)
		for _, r := range all {
			require.NoError(t, r.Close())
		}
		require.NoError(t, errors.Join(d.Free(from), d.Free(places)))
	})
}

// TestHold checks that data for held destinations does not arrive before these are free, including
// the first time, and that the next route of the slot starts with free destinations.
func TestHold(t *testing.T) {
	const rounds, bytes, s = 3, 64, comm.Stream(7)
	each(t, 2, nil, func(d *device, g comm.Group, why error) {
		require.NoError(t, why)
		p, err := d.Alloc(2 * bytes)
		require.NoError(t, err)
		other, place := 1-g.Rank(), p+bytes
		legs := func() (comm.Route, error) {
			return comm.NewRoute(g, 5, []comm.Leg{{Rank: other, At: p, Bytes: bytes}},
				[]comm.Leg{{Rank: other, At: place, Bytes: bytes}})
		}
		route, err := legs()
		require.NoError(t, err)
		require.NoError(t, route.Hold())
		fill := func(at comm.Ptr, v byte) {
			require.NoError(t, d.locked(s, func() {
				for i := range bytes {
					d.at(at+comm.Ptr(i), 1)[0] = v
				}
			}))
		}

		is := func(want byte) {
			var got byte
			require.NoError(t, d.locked(s, func() { got = d.at(place, 1)[0] }))
			d.sync(s)
			require.Equal(t, want, got)
		}

		for i := range byte(rounds) {
			fill(p, 10+i)
			fill(place, 1) // the destination has another purpose
			if g.Rank() == 1 {
				d.sync(s)
				time.Sleep(30 * time.Millisecond) // give rank 0 time to write
				is(1)
			}
			require.NoError(t, errors.Join(route.Release(s), route.Enqueue(s)))
			is(10 + i)
		}

		require.NoError(t, route.Close())
		route, err = legs()
		require.NoError(t, err)
		fill(p, 40)
		require.NoError(t, errors.Join(route.Enqueue(s), route.Release(s)))
		is(40)
		require.NoError(t, errors.Join(route.Close(), d.Free(p)))
	})
}

// TestOpen checks that an open route sends without waiting for its destinations to be declared free.
func TestOpen(t *testing.T) {
	const bytes, s = 64, comm.Stream(7)
	each(t, 2, nil, func(d *device, g comm.Group, why error) {
		require.NoError(t, why)
		p, err := d.Alloc(2 * bytes)
		require.NoError(t, err)
		other := 1 - g.Rank()
		route, err := comm.NewRoute(g, 0, []comm.Leg{{Rank: other, At: p, Bytes: bytes}},
			[]comm.Leg{{Rank: other, At: p + bytes, Bytes: bytes}})
		require.NoError(t, err)
		route.Open()
		for i := range byte(3) {
			require.NoError(t, d.locked(s, func() { d.at(p, bytes)[9] = i + 10*byte(g.Rank()) }))
			require.NoError(t, route.Enqueue(s))
			var got byte
			require.NoError(t, d.locked(s, func() { got = d.at(p+bytes, bytes)[9] }))
			d.sync(s)
			require.Equal(t, i+10*byte(other), got)
			require.NoError(t, g.(*group).world.Barrier(t.Context(), fmt.Sprint(i)))
		}

		require.NoError(t, errors.Join(route.Close(), d.Free(p)))
	})
}

// TestRefused checks that all ranks keep their group, and get the reason, if one rank's GPU cannot
// share memory, and that legs that do not match are an error.
func TestRefused(t *testing.T) {
	each(t, 2, errors.New("no peers"), func(_ *device, g comm.Group, why error) {
		require.ErrorContains(t, why, "rank 1: no peers")
		require.IsType(t, &plain{}, g)
	})
	each(t, 2, nil, func(d *device, g comm.Group, _ error) {
		p, err := d.Alloc(64)
		require.NoError(t, err)
		_, err = comm.NewRoute(g, 0, []comm.Leg{{Rank: g.Rank(), At: p, Bytes: 4}}, nil)
		require.ErrorContains(t, err, "another of the 2 ranks")
		_, err = comm.NewRoute(g, slots, nil, nil)
		require.ErrorContains(t, err, "slot 256")
		require.NoError(t, d.Free(p))
	})
}

// TestAbort checks that a stream waiting for a rank that sends nothing continues after an abort, and
// that Err returns the cause.
func TestAbort(t *testing.T) {
	each(t, 2, nil, func(d *device, g comm.Group, _ error) {
		p, err := d.Alloc(64)
		require.NoError(t, err)
		other := 1 - g.Rank()
		route, err := comm.NewRoute(g, 0, []comm.Leg{{Rank: other, At: p, Bytes: 32}},
			[]comm.Leg{{Rank: other, At: p + 32, Bytes: 32}})
		require.NoError(t, err)
		if g.Rank() == 0 {
			const s = comm.Stream(1)
			require.NoError(t, route.Enqueue(s))
			done := make(chan struct{})
			go func() { d.sync(s); close(done) }()
			select {
			case <-done:
				t.Error("the stream does not wait")
			case <-time.After(50 * time.Millisecond):
			}
			gone := errors.New("rank 1 is gone")
			g.Abort(gone)
			<-done
			require.ErrorIs(t, g.Err(), gone)
			require.ErrorIs(t, route.Enqueue(s), gone)
		}

		require.NoError(t, route.Close())
		require.NoError(t, d.Free(p))
	})
}
