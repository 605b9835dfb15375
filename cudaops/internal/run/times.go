package run

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Times enqueues n pieces of work on a stream, one after another without waiting, and returns the time
// that each takes. Without gaps between them, all pieces run at the clock rates of a busy GPU. The work
// enqueued by before, ahead of each piece, is not included.
func Times(ctx gpu.Context, s gpu.Stream, n int, before, work func(i int) error) (
	took []time.Duration, err error) {
	m := Memory{Ctx: ctx}
	defer func() { err = Joined(err, m.Close()) }()
	marks := make([]gpu.Event, 2*n)
	for i := range marks {
		if marks[i], err = m.NewEvent(true); err != nil {
			return nil, err
		}
	}

	for i := range n {
		if err := InOrder(func() error { return before(i) },
			func() error { return ctx.Record(marks[2*i], s) },
			func() error { return work(i) },
			func() error { return ctx.Record(marks[2*i+1], s) }); err != nil {
			return nil, err
		}
	}

	if err := ctx.SyncStream(s); err != nil {
		return nil, err
	}

	for i := range n {
		d, err := ctx.Elapsed(marks[2*i], marks[2*i+1])
		if err != nil {
			return nil, err
		}
		took = append(took, d)
	}

	return took, nil
}

// Median returns the median of times.
func Median(times []time.Duration) time.Duration {
	return slices.Sorted(slices.Values(times))[len(times)/2]
}

// Fill fills memory with normally distributed random numbers of the given standard deviation. The
// sequence repeats after 65,535 numbers.
func Fill(ctx gpu.Context, s gpu.Stream, at gpu.Ptr, bytes int, t gpu.DType,
	deviation float64, seed uint64) error {
	const some = 1<<16 - 1 // odd, so that rows differ
	r := rand.New(rand.NewPCG(1, seed))
	numbers := make([]float32, some)
	for i := range numbers {
		numbers[i] = float32(deviation * r.NormFloat64())
	}

	raw := make([]byte, some*t.Size())
	gpu.Encode(raw, t, numbers)
	done := min(bytes, len(raw))
	err := ctx.CopyToDevice(at, raw[:done], s)
	for ; err == nil && done < bytes; done += min(done, bytes-done) {
		err = ctx.CopyOnDevice(at.Offset(done), at, min(done, bytes-done), s)
	}

	return err
}
