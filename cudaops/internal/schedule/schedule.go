// Package schedule orders the calls of a program. It knows calls and what they read and write, but
// no graph and no device.
package schedule

import (
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// PutOff moves the last n products to the end that no other call needs. While they multiply, what
// was made before them can be on its way to other GPUs: of a model that is the gradient of its
// table of embeddings, the largest and last.
func PutOff(p *program.Program, n int) {
	for i := len(p.Calls) - 1; i >= 0 && n > 0; i-- {
		c, rest := p.Calls[i], p.Calls[i+1:]
		_, product := c.Params.(*program.Matmul)
		if product && !slices.ContainsFunc(rest, c.Bound) {
			p.Calls = append(slices.Delete(p.Calls, i, i+1), c)
			n--
		}
	}
}
