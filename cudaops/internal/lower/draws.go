package lower

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/sample"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/cpu/sampling"
	"github.com/kasmina-go/kasmina/internal/graph"
)

// Draws names the nodes of a graph from which tokens are drawn: logits [n, vocabulary], and the ids, an int vector,
// that a later run can take from the tokens of an earlier one. Both are nil if no tokens are drawn.
type Draws struct{ Logits, IDs *gorgonia.Node }

// draw adds the calls that draw tokens.
func (c *compiler) draw(d Draws) {
	logits, ids := c.Values[d.Logits], c.Values[d.IDs]
	if logits == nil || ids == nil || len(logits.Shape) != 2 || ids.Type != gpu.Int64 || len(ids.Shape) != 1 {
		c.fail(fmt.Errorf("WithDraws: the graph does not compute a matrix of logits from a vector of ids, both of "+
			"which must be among the nodes %s and %s", graph.Describe(d.Logits), graph.Describe(d.IDs)))
		return
	}

	rows, fed := logits.Shape[0], ids.Shape[0]
	p := &program.Draws{Rows: rows, Fed: fed, Tokens: c.NewResident(gpu.Int64, rows)}
	words := fed + rows*sample.RuleWords + sampling.MostEntries*sample.EntryWords
	p.Params = c.NewResident(gpu.Int64, words)
	from, rules := p.Params.View(0, fed), p.Params.View(fed, rows*sample.RuleWords)
	entries := p.Params.View(fed+rows*sample.RuleWords, sampling.MostEntries*sample.EntryWords)
	state := c.NewConstant(make([]float32, sample.StateBytes(rows)/4)) // zero before and after every launch

	feed := sample.Feed{Rows: fed}
	c.Calls = slices.Insert(c.Calls, 0, c.named(d.IDs, program.NewCall(&feed, program.Updates(&feed.IDs, ids),
		program.Reads(&feed.From, from), program.Reads(&feed.Tokens, p.Tokens))))
	a := sample.Tokens{Rows: rows, N: logits.Shape[1], Type: logits.Type}
	addCall(c, d.Logits, &a, program.Writes(&a.Tokens, p.Tokens), program.Reads(&a.Logits, logits),
		program.Reads(&a.IDs, ids), program.Reads(&a.Rules, rules), program.Reads(&a.Entries, entries),
		program.Updates(&a.State, state))
	c.Draws = p
}
