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
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
)

// Team connects a process with the other ranks of a run. Only the training goroutine may call its methods,
// except for Rank, Size, First and Group.
type Team struct {
	world *comm.World
	group comm.Group
	host  *loopback.Host // nil if the group uses the memory of GPUs
	stop  context.CancelFunc
	watch sync.WaitGroup
	steps atomic.Int64 // number of steps that have started

	pairs op.PreferenceFigures // since the last call of TakePairs
}

// TakePairs returns the figures of the preference pairs that all ranks have computed in steps since the last
// call.
func (t *Team) TakePairs() op.PreferenceFigures {
	f := t.pairs
	t.pairs = op.PreferenceFigures{}
	return f
}

// Join connects the ranks of a world on the CPUs of one host. All ranks must call it. The team takes
// ownership of the world, which Join closes if it returns an error.
func Join(ctx context.Context, w *comm.World) (*Team, error) {
	host := loopback.NewHost()
	g, err := loopback.New(ctx, w, host)
	if err != nil {
		err = w.Blame(err)
		w.Close() // does not wait, and adds nothing to the error
		return nil, fmt.Errorf("parallel: %w", err)
	}
	return newTeam(w, g, host), nil
}

// On returns a team that uses an existing group, for ranks that exchange gradients in the memory of their
// GPUs. Package llm/gpu uses it. The team takes ownership of the world and the group.
func On(w *comm.World, g comm.Group) *Team { return newTeam(w, g, nil) }

func newTeam(w *comm.World, g comm.Group, host *loopback.Host) *Team {
	t := &Team{world: w, group: g, host: host}
	watching, stop := context.WithCancel(context.Background())
	t.stop = stop
	// An error from Watch also reaches every caller waiting for the group.
	t.watch.Go(func() { _ = comm.Watch(watching, w, t.group, 0) })
	return t
}

// wait calls f, which waits for other ranks.
func (t *Team) wait(f func() error) error { return t.world.Wait(f) }

// sync waits for the work that has been enqueued on the host's stream, such as an AllGather.
func (t *Team) sync() error { return t.wait(func() error { return t.host.Sync(0) }) }

// Rank returns the rank of this process, from 0.
func (t *Team) Rank() int { return t.world.Rank() }

// Size returns the number of ranks.
func (t *Team) Size() int { return t.world.Size() }

// Close closes the connections of the team. If failure is not nil, Close reports it to the other ranks and
// returns immediately. Otherwise, it waits until all ranks have called it.
//
// An error that wraps [llm.ErrStopped] is no failure, because all ranks stop after the same step.
func (t *Team) Close(failure error) error {
	if errors.Is(failure, llm.ErrStopped) {
		failure = nil
	}

	if failure != nil && t.world.Err() == nil {
		t.world.Fail(failure)
	}

	var err error
	if failure == nil {
		_, err = t.exchange(nil) // wait until all ranks have finished computing
	}

	t.stop()
	t.watch.Wait()
	if failure != nil {
		t.group.Abort(failure)
		t.group.Close() // returns failure again
		t.world.Close()
		return nil
	}

	return errors.Join(err, t.group.Close(), t.world.Close())
}

// Agree returns err if it is not nil, and otherwise the error of the lowest rank that passed one. All ranks
// must call it.
func (t *Team) Agree(err error) error {
	// An empty message means no error. The mark precedes every error, because its text may be empty.
	const mark = "!"
	message := ""
	if err != nil {
		message = mark + err.Error()
	}

	all, failed := t.exchange([]byte(message))
	if err != nil || failed != nil {
		return errors.Join(err, failed)
	}

	for r, message := range all {
		if len(message) > 0 {
			return fmt.Errorf("rank %d: %s", r, message[len(mark):])
		}
	}

	return nil
}

// blame returns the cause of a failed collective. If this rank is the cause, it reports that to the other
// ranks.
func (t *Team) blame(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("parallel: %w", t.world.Blame(err))
}

// progress reports to rank 0 that this rank is working.
func (t *Team) progress() error { return t.blame(t.world.Report(int(t.steps.Load()))) }

// Exchange sends a value to all ranks and returns the values of all ranks. All ranks must call it.
func (t *Team) Exchange(value []byte) ([][]byte, error) { return t.exchange(value) }

// Blame returns the cause of an error of the group. If this rank is the cause, Blame reports that to the
// other ranks.
func (t *Team) Blame(err error) error { return t.blame(err) }

// Failed reports whether a rank has failed, so that collectives can no longer complete.
func (t *Team) Failed() bool { return t.world.Err() != nil }

// Progress reports to rank 0 that this rank is working. Call it regularly during long work.
func (t *Team) Progress() error { return t.progress() }

// Drawing wraps a function returned by an engine's Decoder so that each call reports progress. It
// returns nil if next is nil.
func (t *Team) Drawing(next func(ctx context.Context, tokens []int) (any, error)) func(
	ctx context.Context, tokens []int) (any, error) {
	if t == nil || next == nil {
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

// Group returns the group that exchanges gradients.
func (t *Team) Group() comm.Group { return t.group }

// exchange sends a value to all ranks and returns the values of all ranks.
func (t *Team) exchange(value []byte) ([][]byte, error) {
	if t.Size() == 1 {
		return [][]byte{value}, t.blame(t.world.Err())
	}

	if t.host == nil { // avoid waiting for the GPU
		values, err := t.world.Gather(context.Background(), "exchange", value)
		return values, t.blame(err)
	}

	return t.frames(value)
}

// frameBytes is the size of the first message of an exchange. It contains the length and the first bytes of
// the value. Nearly all values of a step fit, so a second message is rarely needed.
const frameBytes = 1 << 10

// frames implements exchange with collectives of the group, which require that all ranks send the same number
// of bytes. If some value does not fit in its frame, a second AllGather sends the remaining bytes, padded to
// the length of the longest.
func (t *Team) frames(value []byte) ([][]byte, error) {
	const head = 8                 // bytes of the length
	const room = frameBytes - head // for the first bytes of the value

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

	// If all values fit in the frames, rest is empty and allGather sends nothing.
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

// allGather returns the concatenated bytes of all ranks, which must have the same length.
func (t *Team) allGather(own []byte) ([]byte, error) {
	n := len(own)
	if n == 0 {
		return nil, nil
	}

	p, err := t.host.Alloc(n * t.Size())
	if err != nil {
		return nil, err
	}
	defer t.host.Free(p) // cannot fail for an allocated pointer

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
