package gemm

import (
	"sync/atomic"
	"time"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// FMAPeak returns the float32 operations per second that chains of multiply-adds in registers
// reach, two for each. They run on the given number of cores for about d. It is the ceiling for
// [Mul]. It is 0 without vector kernels.
func FMAPeak(cores int, d time.Duration) float64 {
	flops, loop := fmaPeakLoop()
	if loop == nil {
		return 0
	}
	const rounds = 1 << 13 // some tens of microseconds
	var calls atomic.Int64
	start := time.Now()
	cpu.Parallel(cores, 1, func(int, int) {
		// once at least, however late this begins
		for over := false; !over; over = time.Since(start) >= d {
			loop(rounds)
			calls.Add(1)
		}
	})
	return float64(calls.Load()) * rounds * float64(flops) / time.Since(start).Seconds()
}
