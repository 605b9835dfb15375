// Package schedule orders the calls of a program. It looks only at calls and their operands, and depends
// on neither the graph nor the device.
package schedule

import (
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// DeferProducts moves to the end the last n products that no later call depends on. While they are
// computed, results of the earlier calls can be sent to other GPUs. In a language model, this covers
// the gradient of the embedding table, which is the largest and is computed last.
func DeferProducts(p *program.Program, n int) {
	for i := len(p.Calls) - 1; i >= 0 && n > 0; i-- {
		c, rest := p.Calls[i], p.Calls[i+1:]
		_, product := c.Params.(*program.Matmul)
		if product && !slices.ContainsFunc(rest, c.Conflicts) {
			p.Calls = append(slices.Delete(p.Calls, i, i+1), c)
			n--
		}
	}
}
