package driver

import "os"

// PoisonProducts has the result of every product filled with NaN, on the product's stream, before it is computed, where
// beta is 0. What a product leaves out then shows in what is computed from it, and so does a product that reads where it
// writes. It is for tests, which set it or the environment variable KASMINA_POISON. Under compute-sanitizer's initcheck
// it takes the place of the tool's own bookkeeping, which does not see what kernels for Hopper, cuBLASLt's among them, store
// with the tensor memory accelerator, and reports every later read of it. The memsets are not in the statistics.
var PoisonProducts = os.Getenv("KASMINA_POISON") != ""

// poison fills the matrices of D with NaN, and leaves what lies between their rows.
func (p *blasPlan) poison(d Ptr, s Stream) error {
	const nan = 0xff // in every byte of any of the types
	b, m, size := p.b, p.spec, p.spec.D.Size()
	for i := range m.Batch {
		at := uintptr(d.Offset(i * m.StrideD * size))
		err := b.ctx.call(&b.ctx.MemsetD2D8Async, at, uintptr(m.LDD*size), nan, uintptr(m.N*size), uintptr(m.M), uintptr(s))
		if err != nil {
			return err
		}
	}
	return nil
}
