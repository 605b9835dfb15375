package run

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/value"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// Constants and parameters travel in pieces, through pinned memory that all share: several
// goroutines read and convert, one copies to the device. So they take no memory of their size on
// the host, and loading a model takes little longer than reading it.

const (
	pieceBytes = 4 << 20
	maxPieces  = 8 // at once
	readers    = 4 // goroutines
)

// Reader hands the elements of an input to put, in order and in pieces of any size, as they lie in
// memory in a type.
type Reader func(n *gorgonia.Node, put func(part []byte, t gpu.DType) error) error

// inPieces reports whether an input travels in pieces.
func inPieces(in *program.Input) bool {
	return in.Constant && len(in.IDs) == 0 && in.Array.Type != gpu.Int64
}

// source is where the elements of an input come from.
type source struct {
	*program.Input
	floats []float32 // nil where the reader has them
}

// sourceOf returns an input's, if its value can be sent.
func (s *Inputs) sourceOf(in *program.Input) (*source, error) {
	v := in.Node.Value()
	if v == nil && in.Frozen && s.read != nil {
		return &source{Input: in}, nil
	}
	if v == nil {
		return nil, noValue(in)
	}
	x, err := value.Floats(v, in.Array.Type, in.Array.Len())
	if err != nil {
		return nil, fmt.Errorf("%s: %w", graph.Describe(in.Node), err)
	}
	return &source{in, x}, nil
}

// piece is part of an input in pinned memory.
type piece struct {
	to     gpu.Ptr
	memory []byte
	bytes  int
}

// sender is what the goroutines share.
type sender struct {
	free   chan []byte // pinned memory
	filled chan piece
	failed atomic.Bool // nobody needs more pieces
}

var errStopped = errors.New("another input could not be sent")

// sendPieces copies inputs to the device.
func (s *Inputs) sendPieces(all []*source) error {
	most := 0
	for _, from := range all {
		most = max(most, from.Array.Extent())
	}
	if most == 0 {
		return nil
	}
	memory := Memory{Ctx: s.Ctx}
	q := &sender{free: make(chan []byte, maxPieces), filled: make(chan piece)}
	for range maxPieces {
		b, err := memory.AllocHost(min(most, pieceBytes))
		if err != nil {
			return errors.Join(err, memory.Close())
		}
		q.free <- b
		if len(all) == 1 && most <= pieceBytes {
			break
		}
	}
	errs := make([]error, len(all))
	var next atomic.Int64
	var work sync.WaitGroup
	for range min(readers, len(all)) {
		work.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(all)); i = next.Add(1) - 1 {
				if err := q.fill(all[i], s.read); err != nil {
					q.failed.Store(true)
					errs[i] = fmt.Errorf("%s: %w", graph.Describe(all[i].Node), err)
				}
			}
		})
	}
	go func() {
		work.Wait()
		close(q.filled)
	}()
	var err error
	for p := range q.filled {
		if err == nil {
			err = errors.Join(s.Ctx.CopyToDevice(p.to, p.memory[:p.bytes], s.Stream),
				s.Ctx.SyncStream(s.Stream))
			q.failed.Store(q.failed.Load() || err != nil)
		}
		q.free <- p.memory
	}
	for _, e := range errs { // the first that is none of others
		if err == nil && !errors.Is(e, errStopped) {
			err = e
		}
	}
	return Joined(err, memory.Close())
}

// fill makes the pieces of an input.
func (q *sender) fill(from *source, read Reader) error {
	t, at := from.Array.Type, 0
	put := func(part []byte, stored gpu.DType) error {
		for len(part) > 0 {
			if q.failed.Load() {
				return errStopped
			}
			if at == from.Array.Len() {
				return fmt.Errorf("there are more than its %d elements", at)
			}
			p := piece{to: from.Array.Ptr().Offset(at * t.Size()), memory: <-q.free}
			n := min(len(part)/stored.Size(), len(p.memory)/t.Size(), from.Array.Len()-at)
			if n == 0 {
				q.free <- p.memory
				return fmt.Errorf("a piece of %d bytes is no number of elements of type %v",
					len(part), stored)
			}
			value.Convert(p.memory, t, part[:n*stored.Size()], stored)
			p.bytes = n * t.Size()
			q.filled <- p
			part, at = part[n*stored.Size():], at+n
		}
		return nil
	}
	var err error
	if from.floats != nil {
		err = put(gpu.Bytes(from.floats), gpu.Float32)
	} else {
		err = read(from.Node, put)
	}
	if err == nil && at < from.Array.Len() {
		err = fmt.Errorf("there are %d elements of %d", at, opbase.Size(from.Array.Shape))
	}
	return err
}

// Fetched is an array, and where its numbers are to be on the host.
type Fetched struct {
	From *program.Array
	To   []float32
}

// plain reports whether an array's numbers are stored as they are wanted on the host.
func plain(a *program.Array, to []float32) bool {
	return a.Type == gpu.Float32 && a.Extent() == 4*len(to)
}

// inFlight is how many pieces are on their way from the device at once.
const inFlight = 2

// FetchAll is FetchFloats for many arrays: they travel in pieces, and several goroutines take them
// out of the pinned memory.
func (r *Runner) FetchAll(all []Fetched) (err error) {
	var large []Fetched
	for _, f := range all {
		if !plain(f.From, f.To) {
			if err := r.FetchFloats(f.From, f.To); err != nil {
				return err
			}
		} else if len(f.To) > 0 {
			large = append(large, f)
		}
	}
	if len(large) == 0 {
		return nil
	}
	memory := Memory{Ctx: r.Ctx}
	defer func() { err = Joined(err, memory.Close()) }()
	type landing struct {
		memory []byte
		to     []float32
		event  gpu.Event
	}
	free, arrived := make(chan landing, maxPieces), make(chan landing, maxPieces)
	for range maxPieces {
		b, err := memory.AllocHost(pieceBytes)
		if err != nil {
			return err
		}
		e, err := memory.NewEvent(false)
		if err != nil {
			return err
		}
		free <- landing{memory: b, event: e}
	}
	var work sync.WaitGroup
	for range readers {
		work.Go(func() {
			for l := range arrived {
				copy(l.to, gpu.View[float32](l.memory))
				free <- l
			}
		})
	}
	defer work.Wait()
	defer close(arrived)
	var flying []landing
	land := func(left int) error {
		for len(flying) > left {
			if err := r.Ctx.SyncEvent(flying[0].event); err != nil {
				return err
			}
			arrived <- flying[0]
			flying = flying[1:]
		}
		return nil
	}
	for _, f := range large {
		for at := 0; at < len(f.To); at += pieceBytes / 4 {
			l := <-free
			l.to = f.To[at:min(len(f.To), at+pieceBytes/4)]
			if err := InTurn(
				func() error {
					return r.Ctx.CopyToHost(l.memory[:4*len(l.to)], f.From.Ptr().Offset(4*at), r.Stream)
				},
				func() error { return r.Ctx.Record(l.event, r.Stream) }); err != nil {
				return Joined(err, r.Ctx.SyncStream(r.Stream))
			}
			flying = append(flying, l)
			if err := land(inFlight); err != nil {
				return err
			}
		}
	}
	if err := land(0); err != nil {
		return err
	}
	r.State.On(Wait)
	return nil
}
