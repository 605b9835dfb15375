package gemm

import (
	"sync/atomic"
	"time"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// FMAPeak returns the number of float32 operations per second of multiply-adds in registers,
// counting two per multiply-add, measured on the given number of cores for about d. It is the upper
// limit for [Mul]. Without vector kernels, it returns 0.
func FMAPeak(cores int, d time.Duration) float64 {
	flops, loop := fmaPeakLoop()
	if loop == nil {
		return 0
	}

	const rounds = 1 << 13 // some tens of microseconds
	var calls atomic.Int64
	start := time.Now()
	cpu.Parallel(cores, 1, func(int, int) {
		// Run at least once, no matter how late this goroutine starts.
		for over := false; !over; over = time.Since(start) >= d {
			loop(rounds)
			calls.Add(1)
		}
	})

	return float64(calls.Load()) * rounds * float64(flops) / time.Since(start).Seconds()
}
