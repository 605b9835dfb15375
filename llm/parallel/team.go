package parallel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/comm/loopback"
)

// Team is the processes that train together, seen from one of them. All but Rank, Size, First and
// Group is for the goroutine that trains.
type Team struct {
	world *comm.World
	group comm.Group
	host  *loopback.Host // nil where the group works in the memory of GPUs
	stop  context.CancelFunc
	watch sync.WaitGroup
	steps atomic.Int64 // that have begun
}

// Join connects the ranks of a world, on the CPUs of one host. All must call it. The world is the
// team's from then on.
func Join(ctx context.Context, w *comm.World) (*Team, error) {
	if ctx == nil || w == nil {
		return nil, errors.New("parallel: Join: the context or the world is nil")
	}
	host := loopback.NewHost()
	g, err := loopback.New(ctx, w, host)
	if err != nil {
		return nil, fmt.Errorf("parallel: %w", w.Blame(err))
	}
	return newTeam(w, g, host), nil
}

// On is the team of a world's ranks whose group works in the memory of their GPUs: see package
// llm/gpu. World and group are the team's from then on.
func On(w *comm.World, g comm.Group) *Team { return newTeam(w, g, nil) }

// errZero is the error of a team that nobody has made.
var errZero = errors.New("parallel: the team is its zero value, want one that Join or Meet returns")

func newTeam(w *comm.World, g comm.Group, host *loopback.Host) *Team {
	t := &Team{world: w, group: g, host: host}
	watching, stop := context.WithCancel(context.Background())
	t.stop = stop
	// Its error is that of whatever waits for the group.
	t.watch.Go(func() { _ = comm.Watch(watching, w, t.group, 0) })
	return t
}

// wait calls f, which waits for other ranks.
func (t *Team) wait(f func() error) error { return t.world.Wait(f) }

// sync waits for the work of the stream.
func (t *Team) sync() error { return t.wait(func() error { return t.host.Sync(0) }) }

// Rank is this process's, from 0.
func (t *Team) Rank() int { return t.world.Rank() }

// Size is the number of ranks.
func (t *Team) Size() int { return t.world.Size() }

// Close leaves the team. Where the run has ended with an error, the others learn of it, and nobody
// waits; otherwise Close waits until all ranks have called it.
func (t *Team) Close(failure error) error {
	if t.world == nil {
		return nil
	}
	if failure != nil && t.world.Err() == nil {
		t.world.Fail(failure)
	}
	var err error
	if failure == nil {
		_, err = t.exchange(nil) // nobody leaves while others still compute
	}
	t.stop()
	t.watch.Wait()
	if failure != nil {
		t.group.Abort(failure)
		t.group.Close() // which is the failure
		t.world.Close()
		return nil
	}
	return errors.Join(err, t.group.Close(), t.world.Close())
}

// Agree returns this rank's error or, where it has none, the first of another's. All ranks must
// call it.
func (t *Team) Agree(err error) error {
	if t.world == nil {
		return errors.Join(err, errZero)
	}
	text := ""
	if err != nil {
		text = "!" + err.Error()
	}
	all, failed := t.exchange([]byte(text))
	if err != nil || failed != nil {
		return errors.Join(err, failed)
	}
	for r, text := range all {
		if len(text) > 0 {
			return fmt.Errorf("rank %d: %s", r, text[1:])
		}
	}
	return nil
}

// blame returns why a collective has failed, and tells the others if that is here.
func (t *Team) blame(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("parallel: %w", t.world.Blame(err))
}

// progress tells rank 0 that this rank is at work.
func (t *Team) progress() error { return t.blame(t.world.Report(int(t.steps.Load()))) }

// Exchange hands a value to all ranks and returns those of all, by rank. All ranks must call it.
func (t *Team) Exchange(value []byte) ([][]byte, error) { return t.exchange(value) }

// Blame returns why work of the group has failed, and tells the others if that is here.
func (t *Team) Blame(err error) error { return t.blame(err) }

// Failed reports whether a rank has, so that nobody can wait for others any more.
func (t *Team) Failed() bool { return t.world.Err() != nil }

// Progress tells rank 0 that this rank is at work, in what may take long.
func (t *Team) Progress() error { return t.progress() }

// Drawing wraps a function returned by an engine's Decoder so that each call reports progress. It
// returns nil if next is nil.
func (t *Team) Drawing(next func(ctx context.Context, tokens []int) (any, error)) func(
	ctx context.Context, tokens []int) (any, error) {
	if t == nil || t.world == nil || next == nil {
		return next
	}
	return func(ctx context.Context, tokens []int) (any, error) {
		if err := t.progress(); err != nil {
			return nil, err
		}
		return next(ctx, tokens)
	}
}

// Busy declares work that may take longer than the deadline, such as "writing a checkpoint". The work
// ends when the returned function is called. See [comm.World.Busy]. A nil Team does nothing.
func (t *Team) Busy(what string) (done func()) {
	if t == nil {
		return func() {}
	}
	return t.world.Busy(what)
}

// Group is what the ranks exchange gradients by.
func (t *Team) Group() comm.Group { return t.group }

// exchange hands a value to all ranks and returns those of all, by rank.
func (t *Team) exchange(value []byte) ([][]byte, error) {
	if t.world == nil {
		return nil, errZero
	}
	if t.Size() == 1 {
		return [][]byte{value}, t.blame(t.world.Err())
	}
	if t.host == nil { // a GPU would have to be waited for
		values, err := t.world.Gather(context.Background(), "exchange", value)
		return values, t.blame(err)
	}
	return t.frames(value)
}

// frameBytes is what a rank hands over of a value, with its length, in one operation. Nearly all
// values of a step are shorter: two operations would take twice the time.
const frameBytes = 1 << 10

// frames is exchange by the group.
func (t *Team) frames(value []byte) ([][]byte, error) {
	const head = 8
	frame := make([]byte, frameBytes)
	binary.LittleEndian.PutUint64(frame, uint64(len(value)))
	copy(frame[head:], value)
	first, err := t.allGather(frame)
	if err != nil {
		return nil, t.blame(err)
	}
	longest, sizes := 0, make([]int, t.Size())
	for r := range sizes {
		sizes[r] = int(binary.LittleEndian.Uint64(first[frameBytes*r:]))
		longest = max(longest, sizes[r])
	}
	const room = frameBytes - head
	rest := make([]byte, max(0, longest-room))
	copy(rest, value[min(len(value), room):])
	more, err := t.allGather(rest)
	if err != nil {
		return nil, t.blame(err)
	}
	values := make([][]byte, t.Size())
	for r, n := range sizes {
		values[r] = append(values[r], first[frameBytes*r+head:][:min(n, room)]...)
		values[r] = append(values[r], more[len(rest)*r:][:max(0, n-room)]...)
	}
	return values, nil
}

// allGather returns the bytes of all ranks, as many of each, one behind the other.
func (t *Team) allGather(own []byte) ([]byte, error) {
	n := len(own)
	if n == 0 {
		return nil, nil
	}
	p, err := t.host.Alloc(n * t.Size())
	if err != nil {
		return nil, err
	}
	defer t.host.Free(p) // which was allocated
	all, err := t.host.Bytes(p, n*t.Size())
	if err != nil {
		return nil, err
	}
	copy(all[t.Rank()*n:], own)
	if err := t.group.AllGather(p, p.Offset(t.Rank()*n, comm.Uint8), n, comm.Uint8, 0); err != nil {
		return nil, err
	}
	return all, t.sync()
}
