package board

import (
	"bytes"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/board/internal/nvml"
)

// cards reads the state of the GPUs of this computer.
type cards struct {
	open func() (*nvml.Library, error)

	mu      sync.Mutex
	tried   bool
	library *nvml.Library // nil if it is missing
	known   []nvml.Card
	read    time.Time
	failed  bool // an error has been logged
}

// cardsEvery limits how often the GPUs are queried, because a query takes milliseconds.
const cardsEvery = time.Second

// now returns the state of the GPUs, at most cardsEvery old. If NVML is missing, it returns none and
// logs that once.
func (c *cards) now() []nvml.Card {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.tried {
		c.tried = true
		var err error
		if c.library, err = c.open(); err != nil {
			slog.Debug(fmt.Sprintf("board: the power and memory of GPUs are not shown: %v", err))
		}
	}

	if c.library == nil || time.Since(c.read) < cardsEvery {
		return c.known
	}

	var err error
	if c.known, err = c.library.Cards(); err != nil && !c.failed {
		c.failed = true
		slog.Warn(fmt.Sprintf("board: some GPUs cannot be read: %v", err))
	}
	c.read = time.Now()
	return c.known
}

// state returns the state of the GPUs for the API.
func (c *cards) state() []api.Card {
	all := []api.Card{}
	for _, n := range c.now() {
		all = append(all, api.Card{Index: n.Index, Name: n.Name, UUID: n.UUID,
			Power: api.Float(n.Power), PowerLimit: api.Float(n.PowerLimit),
			Used: n.Used, Total: n.Total, Busy: api.Float(n.Busy)})
	}
	return all
}

// close closes the library.
func (c *cards) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.library
	c.tried, c.library, c.known = true, nil, nil
	if l == nil {
		return nil
	}
	return l.Close()
}

// cardMetrics lists the gauges of a GPU. Values that a GPU does not report are 0 and omitted.
var cardMetrics = []struct {
	name, help string
	value      func(nvml.Card) float64
}{
	{"kasmina_gpu_power_watts", "Power that the GPU draws.", func(c nvml.Card) float64 {
		return c.Power
	}},
	{"kasmina_gpu_power_limit_watts", "Power above which the GPU reduces its clock.",
		func(c nvml.Card) float64 { return c.PowerLimit }},
	{"kasmina_gpu_power_ratio", "Fraction of the power limit that the GPU draws.",
		func(c nvml.Card) float64 {
			if c.PowerLimit == 0 {
				return 0
			}
			return c.Power / c.PowerLimit
		}},
	{"kasmina_gpu_memory_used_bytes", "Memory of the GPU that is in use by any program.",
		func(c nvml.Card) float64 { return float64(c.Used) }},
	{"kasmina_gpu_memory_total_bytes", "Memory of the GPU.",
		func(c nvml.Card) float64 { return float64(c.Total) }},
	{"kasmina_gpu_busy_ratio", "Fraction of the time during which a kernel ran.",
		func(c nvml.Card) float64 { return c.Busy }},
}

// cardExposition returns the gauges of GPUs in Prometheus's text format.
func cardExposition(all []nvml.Card) []byte {
	var b bytes.Buffer
	for _, m := range cardMetrics {
		head := fmt.Sprintf("# HELP %s %s\n# TYPE %s gauge\n", m.name, m.help, m.name)
		for _, c := range all {
			if m.value(c) == 0 {
				continue
			}
			fmt.Fprintf(&b, "%s%s{gpu=\"%s\",name=\"%s\",uuid=\"%s\"} %s\n", head, m.name,
				strconv.Itoa(c.Index), escaped(c.Name), escaped(c.UUID), value(m.value(c)))
			head = ""
		}
	}
	return b.Bytes()
}
