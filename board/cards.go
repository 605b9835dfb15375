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

// cards are the GPUs of the computer that the board's runs train on.
type cards struct {
	open func() (*nvml.Library, error)

	mu      sync.Mutex
	tried   bool
	library *nvml.Library // nil where there is none
	known   []nvml.Card
	read    time.Time
	failed  bool // which has been told
}

// cardsEvery is how old what is told of GPUs may be: asking them takes milliseconds.
const cardsEvery = time.Second

// now returns the GPUs: none where NVML is missing, which is told once.
func (c *cards) now() []nvml.Card {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.tried {
		c.tried = true
		var err error
		if c.library, err = c.open(); err != nil {
			slog.Debug(fmt.Sprintf("board: power and memory of GPUs are not shown: %v", err))
		}
	}
	if c.library == nil || time.Since(c.read) < cardsEvery {
		return c.known
	}
	var err error
	if c.known, err = c.library.Cards(); err != nil && !c.failed {
		c.failed = true
		slog.Warn(fmt.Sprintf("board: what GPUs tell of themselves is not complete: %v", err))
	}
	c.read = time.Now()
	return c.known
}

// told returns the GPUs as the API has them.
func (c *cards) told() []api.Card {
	all := []api.Card{}
	for _, n := range c.now() {
		all = append(all, api.Card{Index: n.Index, Name: n.Name, UUID: n.UUID,
			Power: api.Float(n.Power), PowerLimit: api.Float(n.PowerLimit),
			Used: n.Used, Total: n.Total, Busy: api.Float(n.Busy)})
	}
	return all
}

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

// cardMetrics are the gauges of a GPU. What it does not tell is 0, and left out.
var cardMetrics = []struct {
	name, help string
	value      func(nvml.Card) float64
}{
	{"kasmina_gpu_power_watts", "Power that the GPU draws.", func(c nvml.Card) float64 {
		return c.Power
	}},
	{"kasmina_gpu_power_limit_watts", "Power at which the GPU lowers its clock.",
		func(c nvml.Card) float64 { return c.PowerLimit }},
	{"kasmina_gpu_power_ratio", "Share of the power limit, which bounds training steps.",
		func(c nvml.Card) float64 {
			if c.PowerLimit == 0 {
				return 0
			}
			return c.Power / c.PowerLimit
		}},
	{"kasmina_gpu_memory_used_bytes", "Memory of the GPU in use, by all programs.",
		func(c nvml.Card) float64 { return float64(c.Used) }},
	{"kasmina_gpu_memory_total_bytes", "Memory of the GPU.",
		func(c nvml.Card) float64 { return float64(c.Total) }},
	{"kasmina_gpu_busy_ratio", "Share of the time in which some kernel ran.",
		func(c nvml.Card) float64 { return c.Busy }},
}

// cardExposition returns the gauges of GPUs in Prometheus' text format.
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
