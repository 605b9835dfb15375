package tasks

import (
	"context"
	"encoding/json"
	"math"
	"runtime"
	"sync"
)

// An aggregation computes a metric from the values of all items.
type aggregation uint8

const (
	mean               aggregation = iota // of the values
	perplexity                            // exp(-mean)
	weightedPerplexity                    // exp(-Σx / Σweight)
	bitsPerByte                           // -Σx / Σweight / log 2
	core                                  // mean of the centered accuracies of the tasks of a CORE bundle
)

// Samples of a bootstrap estimate, as in lm-eval.
const (
	bootstrapSeeds   = 100
	bootstrapSamples = 1000 // for each seed
)

// of returns the aggregate of values.
func (a aggregation) of(values []value) float64 {
	sum, weight := 0.0, 0.0
	for _, v := range values {
		sum, weight = sum+v.x, weight+v.weight
	}

	switch a {
	case perplexity:
		return math.Exp(-sum / float64(len(values)))
	case weightedPerplexity:
		return math.Exp(-sum / weight)
	case bitsPerByte:
		return -(sum / weight) / math.Ln2
	}
	return sum / float64(len(values))
}

// deviation returns the aggregate's standard error, or NaN if lm-eval defines none.
func (a aggregation) deviation(ctx context.Context, values []value) (float64, error) {
	if len(values) < 2 {
		return math.NaN(), nil
	}

	x := make([]float64, len(values))
	for i, v := range values {
		x[i] = v.x
	}

	switch a {
	case mean:
		return sampleDeviation(x) / math.Sqrt(float64(len(x))), nil
	case perplexity:
		return bootstrap(ctx, x, func(mean float64) float64 { return math.Exp(-mean) })
	}
	return math.NaN(), nil
}

// sampleDeviation returns the square root of the unbiased variance.
func sampleDeviation(x []float64) float64 {
	mean, squares := sumOf(x)/float64(len(x)), 0.0
	for _, v := range x {
		squares += (v - mean) * (v - mean)
	}
	return math.Sqrt(squares / float64(len(x)-1))
}

func sumOf(x []float64) (sum float64) {
	for _, v := range x {
		sum += v
	}
	return sum
}

// bootstrap returns the standard error of a function of the mean of x, estimated from samples with
// replacement (Efron, "Bootstrap methods: another look at the jackknife", 1979).
func bootstrap(ctx context.Context, x []float64, f func(mean float64) float64) (float64, error) {
	estimates := make([]float64, bootstrapSeeds*bootstrapSamples)
	var wait sync.WaitGroup
	slots := make(chan struct{}, runtime.GOMAXPROCS(0))
	for seed := range bootstrapSeeds {
		wait.Add(1)
		slots <- struct{}{}
		go func() {
			defer func() { <-slots; wait.Done() }()
			r := newPythonRandom(uint32(seed))
			for n := range bootstrapSamples {
				if ctx.Err() != nil {
					return
				}
				sum := 0.0
				for range x {
					sum += x[int(r.float64()*float64(len(x)))]
				}
				estimates[seed*bootstrapSamples+n] = f(sum / float64(len(x)))
			}
		}()
	}

	wait.Wait()
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	return sampleDeviation(estimates), nil
}

// pooledDeviation returns the standard error of the mean over groups of items, from the groups' standard
// errors and sizes.
func pooledDeviation(deviations []float64, sizes []int) float64 {
	variance, all := 0.0, 0
	for i, size := range sizes {
		n := float64(size)
		variance += (n - 1) * deviations[i] * deviations[i] * n
		all += size
	}
	return math.Sqrt(variance / float64(all-len(sizes)) / float64(all))
}

// A Result holds the metrics of a task, of one subject of a task, or of a whole bundle.
type Result struct {
	Task    string
	Format  string
	Version int
	Items   int
	FewShot int
	Metrics []MetricResult
	Groups  []Result // by subject, if the file has several
}

// A MetricResult is the value of a metric.
type MetricResult struct {
	Metric
	Value     float64
	Deviation float64 // standard error; NaN if none is defined
}

// MarshalJSON writes a result with the keys of lm-eval: "acc,none" for a metric and "acc_stderr,none" for
// its standard error, which is "N/A" if none is defined.
func (r Result) MarshalJSON() ([]byte, error) {
	fields := map[string]any{"alias": r.Task, "format": r.Format, "sample_len": r.Items, "n-shot": r.FewShot}
	for _, m := range r.Metrics {
		fields[m.Key()] = number(m.Value)
		fields[m.Name+"_stderr,"+m.Filter] = number(m.Deviation)
	}
	if r.Groups != nil {
		groups := map[string]Result{}
		for _, g := range r.Groups {
			groups[g.Task] = g
		}
		fields["groups"] = groups
	}
	return json.Marshal(fields)
}

// number returns a value for JSON, which has no infinite numbers.
func number(x float64) any {
	switch {
	case math.IsNaN(x):
		return "N/A"
	case math.IsInf(x, 0):
		return "inf"
	}
	return x
}
