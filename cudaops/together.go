package cudaops

import "sync"

// Blocks of kernels.ProductNorm wait for one another, so all of them must get to run. They do beside kernels that end by themselves, but
// two such kernels on two streams could each have a part of the multiprocessors and wait for the rest for ever. (A cooperative launch,
// which would rule that out, is not to be had with clusters of blocks: CUDA 13.0.) The work of one machine is in order, so in each
// context one machine at a time may have them. Contexts take turns on a GPU.
var together = struct {
	sync.Mutex
	machines map[uintptr]*Machine // by context
}{machines: map[uintptr]*Machine{}}

// mayWait reports whether kernels of the machine may wait for others of their blocks: no other machine's do until stopWaiting.
func (m *Machine) mayWait() bool {
	together.Lock()
	defer together.Unlock()
	at := m.device.ctx.Handle()
	if together.machines[at] == nil {
		together.machines[at] = m
	}
	return together.machines[at] == m
}

// stopWaiting leaves such kernels to other machines.
func (m *Machine) stopWaiting() {
	together.Lock()
	defer together.Unlock()
	if at := m.device.ctx.Handle(); together.machines[at] == m {
		delete(together.machines, at)
	}
}
