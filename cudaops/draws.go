package cudaops

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/sample"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/cpu/sampling"
)

// DecodesOnDevice reports whether tokens are to be drawn on the device, so that the next token does not wait for the
// host. This is the case unless the environment variable KASMINA_DECODE is "host".
func DecodesOnDevice() bool { return os.Getenv("KASMINA_DECODE") != "host" }

// WithDraws makes the machine draw tokens: see [Machine.Draw]. Logits, [rows, vocabulary], is a result of the graph,
// and ids, an int vector, an input.
func WithDraws(logits, ids *gorgonia.Node) MachineOption {
	return func(c *machineConfig) error {
		if logits == nil || ids == nil {
			return errors.New("WithDraws: a node is nil")
		}
		c.Draws = lower.Draws{Logits: logits, IDs: ids}
		return c.AddOutputs(logits)
	}
}

// draws holds the host memory through which a machine receives rules and returns the tokens that it
// draws.
type draws struct {
	params []int64 // pinned, as the kernels read them
	pass   *sampling.Pass

	// Tokens arrive in pinned memory, while later runs are in progress.
	tokens [drawsInFlight][]byte
	copied [drawsInFlight]gpu.Event
	next   int
}

// drawsInFlight is the maximum number of Draw calls with pending tokens.
const drawsInFlight = 3

// newDraws allocates the host memory of a machine that draws tokens.
func newDraws(m *Machine) (*draws, error) {
	p, memory := m.runner.Program.Draws, m.runner.Memory
	if p == nil {
		return nil, nil
	}

	d := new(draws)
	params, err := memory.AllocHost(p.Params.Extent())
	if err != nil {
		return nil, err
	}
	d.params = gpu.View[int64](params)
	for i := range d.tokens {
		if d.tokens[i], err = memory.AllocHost(p.Tokens.Extent()); err != nil {
			return nil, err
		}
		if d.copied[i], err = memory.NewEvent(false); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// Draw runs the graph like [Machine.Run] and draws a token for every row of the logits that has a rule. The machine
// must have been made with [WithDraws].
//
// Draw returns once the work has been enqueued. The returned function waits for the tokens. A token is −1
// if its row has no rule, or if the row's logits are not finite or exclude all tokens. Up to three calls
// may be pending at the same time. Wait for them in order.
func (m *Machine) Draw(ctx context.Context, p sampling.Pass) (wait func() ([]int, error), err error) {
	defer annotate("Machine.Draw", &err)
	if err := usable(m); err != nil {
		return nil, err
	}
	d := m.draws
	if d == nil {
		return nil, errors.New("the machine draws no tokens: make it with WithDraws")
	}
	if err := checkPass(m, p); err != nil {
		return nil, err
	}

	d.pass = &p
	err = m.Run(ctx)
	d.pass = nil
	if err != nil {
		return nil, err
	}

	device, stream := m.device.ctx, m.runner.Stream
	tokens, copied := d.tokens[d.next], d.copied[d.next]
	d.next = (d.next + 1) % drawsInFlight
	if err := run.Joined(device.CopyToHost(tokens, m.runner.Program.Draws.Tokens.Ptr(), stream),
		device.Record(copied, stream)); err != nil {
		return nil, err
	}

	return func() ([]int, error) {
		if err := device.SyncEvent(copied); err != nil {
			return nil, fmt.Errorf("cudaops.Machine.Draw: %w", err)
		}
		return intsOf(gpu.View[int64](tokens)), nil
	}, nil
}

// intsOf returns the numbers as ints.
func intsOf(x []int64) []int {
	all := make([]int, len(x))
	for i, v := range x {
		all[i] = int(v)
	}
	return all
}

// checkPass returns an error for a pass that the machine's graph cannot compute.
func checkPass(m *Machine, pass sampling.Pass) error {
	p := m.runner.Program.Draws
	invalid := func(row int) bool { return row < -1 || row >= p.Rows }
	switch {
	case len(pass.From) > p.Fed || len(pass.Rules) > p.Rows || len(pass.Rules) > len(pass.Rows):
		return fmt.Errorf("%d rows are fed, and %d of %d rows have a rule, in a graph with %d ids and %d rows of logits",
			len(pass.From), len(pass.Rules), len(pass.Rows), p.Fed, p.Rows)
	case slices.ContainsFunc(pass.From, invalid):
		return fmt.Errorf("rows are fed from %v, and there are %d rows of logits", pass.From, p.Rows)
	}

	entries := 0
	for i, r := range pass.Rules {
		if r == nil {
			continue
		}
		if entries += len(r.Entries); entries > sampling.MostEntries {
			return fmt.Errorf("the rules have more than %d entries", sampling.MostEntries)
		}
		if row := pass.Rows[i]; row < 0 || row >= p.Fed || len(r.Pending) > 1 {
			return fmt.Errorf("rule %d is for row %d of %d ids, with %d pending tokens", i, row, p.Fed, len(r.Pending))
		}
	}
	return nil
}

// send copies the current pass to the device. Without one, no tokens are fed or drawn.
func (d *draws) send(m *Machine) error {
	if d == nil {
		return nil
	}

	p := m.runner.Program.Draws
	pass := sampling.Pass{}
	if d.pass != nil {
		pass = *d.pass
	}

	for i := range p.Fed {
		d.params[i] = -1
		if i < len(pass.From) {
			d.params[i] = int64(pass.From[i])
		}
	}

	words, used := d.params[p.Fed:], 0
	entries := words[p.Rows*sample.RuleWords:]
	for i := range p.Rows {
		rule := words[i*sample.RuleWords:][:sample.RuleWords]
		if i >= len(pass.Rules) || pass.Rules[i] == nil {
			sample.None(rule)
			continue
		}
		r := pass.Rules[i]
		sample.Encode(rule, r, used, pass.Rows[i])
		for _, e := range r.Entries {
			sample.EncodeEntry(entries[used*sample.EntryWords:], e)
			used++
		}
	}

	n := p.Fed + p.Rows*sample.RuleWords + used*sample.EntryWords
	return m.device.ctx.CopyToDevice(p.Params.Ptr(), gpu.Bytes(d.params[:n]), m.runner.Stream)
}
