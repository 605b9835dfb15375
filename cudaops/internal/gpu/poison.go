package gpu

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
