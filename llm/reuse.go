package llm

import (
	"context"
	"sync/atomic"
)

// reuseKey is the key of the counter in a context.
type reuseKey struct{}

// WithReuse returns a context for [Generator.Generate]. A generator of a [Batcher] stores in n the number of tokens at
// the start of the prompt that it need not compute, because it has computed them for an earlier text.
func WithReuse(ctx context.Context, n *atomic.Int64) context.Context {
	return context.WithValue(ctx, reuseKey{}, n)
}

// reuseCounter returns the counter in a context, or nil.
func reuseCounter(ctx context.Context) *atomic.Int64 {
	n, _ := ctx.Value(reuseKey{}).(*atomic.Int64)
	return n
}
