package driver

import "os"

// Poison has what a product or a kernel of the copy engine is about to write filled with NaN, on its stream: D, where nothing
// of it is read, and what cuBLASLt needs of its workspace, and what this module's kernels for Hopper store with the engine
// (package kernels). What the writer leaves out then shows in what is computed from it, and so does a product that reads where
// it writes. It is for tests, which set it or the environment variable KASMINA_POISON. Under compute-sanitizer's initcheck it
// takes the place of the tool's own bookkeeping, which does not see what the copy engine stores, and reports every later read
// of it. Products' memsets are not in the statistics.
var Poison = os.Getenv("KASMINA_POISON") != ""

// Overwrites reports whether all that D holds before is lost.
func (a MatmulArgs) Overwrites() bool { return a.Beta == 0 || a.C != 0 && a.C != a.D }

// poison fills the matrices of D, but not what lies between their rows, and the workspace of an algorithm.
func (p *blasPlan) poison(algo int, a MatmulArgs, s Stream) error {
	m, size := p.spec, p.spec.D.Size()
	if n := p.algos[algo].Workspace; n > 0 {
		if err := p.fill(a.Workspace, n, n, 1, s); err != nil {
			return err
		}
	}
	for i := 0; i < m.Batch && a.Overwrites(); i++ {
		if err := p.fill(a.D.Offset(i*m.StrideD*size), m.LDD*size, m.N*size, m.M, s); err != nil {
			return err
		}
	}
	return nil
}

// fill fills rows of so many bytes, each at a distance of pitch bytes from the one before it, with NaN of any of the types.
func (p *blasPlan) fill(at Ptr, pitch, bytes, rows int, s Stream) error {
	c := p.b.ctx
	if pitch == bytes { // as one row, for each of which initcheck takes long
		return c.call(&c.MemsetD8Async, uintptr(at), 0xff, uintptr(rows*bytes), uintptr(s))
	}
	return c.call(&c.MemsetD2D8Async, uintptr(at), uintptr(pitch), 0xff, uintptr(bytes), uintptr(rows), uintptr(s))
}
