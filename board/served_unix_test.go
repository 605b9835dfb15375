//go:build unix

package board_test

import (
	"fmt"
	"math"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/board"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// BenchmarkServed measures the processor time that 20 viewers in another process take from a run,
// depending on its steps per second. An iteration consists of several seconds with viewers and as
// many without. A tenth of a percent of two cores is 2 ms per second.
func BenchmarkServed(b *testing.B) {
	for _, steps := range []int{2, 20} {
		b.Run(fmt.Sprintf("%d-steps-a-second", steps), func(b *testing.B) { served(b, steps) })
	}
}

func served(b *testing.B, steps int) {
	shown, err := board.New()
	require.NoError(b, err)
	defer shown.Close()
	url, err := shown.Listen("127.0.0.1:0")
	require.NoError(b, err)
	run := shown.Add("paced")
	run.Take(llm.Event{Kind: llm.RunStart, Steps: math.MaxInt32})
	look := lookers(b, url)
	const stretch = 10 // seconds; viewers are updated every few seconds
	every, step := time.Second/time.Duration(steps), 0
	second := func() (took float64) {
		began := spent(b)
		for range steps {
			step++
			run.Take(llm.Event{Kind: llm.StepEnd, Step: step, Steps: math.MaxInt32,
				Loss: 1 / float64(step), Elapsed: time.Duration(step) * every})
			time.Sleep(every)
		}
		reports := make([]state.Report, 12)
		for i := range reports {
			reports[i].Seeds = make([]state.SeedReport, 16)
		}
		run.Take(llm.Event{Kind: llm.EpochEnd, Step: step, Reports: reports})
		return spent(b) - began
	}

	alone, seen := 0.0, 0.0
	for b.Loop() {
		look()
		second() // the viewers connect
		for range stretch {
			seen += second() / stretch
		}
		look()
		for range stretch {
			alone += second() / stretch
		}
	}

	b.ReportMetric(1e3*alone/float64(b.N), "alone-cpu-ms/s")
	b.ReportMetric(1e3*seen/float64(b.N), "viewers-cpu-ms/s")
}

// spent returns the processor time in seconds that this process has used.
func spent(b *testing.B) float64 {
	var u syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}
