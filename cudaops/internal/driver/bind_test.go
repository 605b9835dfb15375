package driver

import (
	"testing"
)

// BenchmarkBinding takes one call apart: purego's call of a trivial function, and the same with the context set.
func BenchmarkBinding(b *testing.B) {
	d, err := Open()
	if err != nil {
		b.Skip("needs an NVIDIA GPU")
	}
	ctx, err := d.Retain(0)
	if err != nil {
		b.Fatal(err)
	}
	defer ctx.Close()
	c := ctx.(*context)
	e, err := c.NewEvent(false)
	if err != nil {
		b.Fatal(err)
	}
	b.Run("set-context", func(b *testing.B) {
		for range b.N {
			c.CtxSetCurrent.call(c.handle)
		}
	})
	b.Run("query-without-context", func(b *testing.B) {
		if err := c.on(func() error {
			for range b.N {
				c.EventQuery.call(uintptr(e))
			}
			return nil
		}); err != nil {
			b.Fatal(err)
		}
	})
	b.Run("query-with-context", func(b *testing.B) {
		for range b.N {
			if err := c.call(&c.EventQuery, uintptr(e)); err != nil {
				b.Fatal(err)
			}
		}
	})
	if err := c.DestroyEvent(e); err != nil {
		b.Fatal(err)
	}
}
