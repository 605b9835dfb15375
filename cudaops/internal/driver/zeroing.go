package driver

import (
	"slices"
	"unsafe"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Many of cuBLASLt's kernels count in a few bytes of workspace, which the library sets to zero in
// front of each. In a captured graph that is a memset node of about 2 µs for each product. Where
// one memset at the graph's beginning has done that for all (MatmulArgs.Zeroed), such a node
// changes nothing, and is taken out. What the node is and where it stands is read from the captured
// graph; of the library nothing is assumed. Any answer that is not the expected one leaves the
// graph as it was captured, which is right too. So does a driver without these functions.

// noteZeroing returns what looks at the work captured on a stream in between. If that sets some
// memory to zero first of all, the node is noted: the graph can do without.
func (c *context) noteZeroing(s gpu.Stream, memory gpu.Ptr, bytes int) func() {
	from := c.front(s)
	if len(from) == 0 {
		return func() {}
	}
	return func() {
		if node := c.zeroing(from, c.front(s), memory, bytes); node != 0 {
			c.ledger.Surplus(s, node)
		}
	}
}

// front is the nodes behind which what a stream is given next would be captured; none outside a
// capture. Like all calls here it fails where an edge is not an ordinary one, which waits for all
// of the node in front of it.
func (c *context) front(s gpu.Stream) []uintptr {
	const active = 1
	var status int32
	var id uint64
	var graph, n uintptr
	var nodes *uintptr // the driver's memory
	err := c.call(&c.StreamCaptureInfo, uintptr(s), uintptr(unsafe.Pointer(&status)),
		uintptr(unsafe.Pointer(&id)),
		uintptr(unsafe.Pointer(&graph)), uintptr(unsafe.Pointer(&nodes)),
		uintptr(unsafe.Pointer(&n)))
	if err != nil || status != active {
		return nil
	}
	return slices.Clone(unsafe.Slice(nodes, n))
}

// neighbours returns the nodes that a node waits for, or those that wait for it.
func (c *context) neighbours(p *proc, node uintptr) ([]uintptr, error) {
	var n uintptr
	if err := c.call(p, node, 0, uintptr(unsafe.Pointer(&n))); err != nil || n == 0 {
		return nil, err
	}
	nodes := make([]uintptr, n)
	err := c.call(p, node, uintptr(unsafe.Pointer(&nodes[0])), uintptr(unsafe.Pointer(&n)))
	return nodes[:n], err
}

// zeroing returns the node that sets bytes within some memory to zero, 0 if there is none. It is
// the first of those captured between two fronts, which must be a chain. As the first, it finds
// what was there before the chain.
func (c *context) zeroing(from, to []uintptr, memory gpu.Ptr, bytes int) uintptr {
	const most = 8 // nodes of a product
	if len(to) != 1 {
		return 0
	}
	node := to[0]
	for range most {
		before, err := c.neighbours(&c.GraphDependencies, node)
		switch {
		case err != nil:
			return 0
		case sameNodes(before, from):
			if !c.zeroes(node, memory, bytes) {
				return 0
			}
			return node
		case len(before) != 1:
			return 0
		}
		node = before[0]
	}
	return 0
}

func sameNodes(a, b []uintptr) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

// memsetParams is CUDA_MEMSET_NODE_PARAMS.
type memsetParams struct {
	dst           gpu.Ptr
	pitch         uintptr
	value, size   uint32 // of an element
	width, height uintptr
}

// zeroes reports whether a node sets bytes to zero, and only within some memory.
func (c *context) zeroes(node uintptr, memory gpu.Ptr, bytes int) bool {
	const memset = 2
	var kind int32
	var p memsetParams
	if c.call(&c.GraphNodeType, node, uintptr(unsafe.Pointer(&kind))) != nil || kind != memset ||
		c.call(&c.GraphMemsetParams, node, uintptr(unsafe.Pointer(&p))) != nil {
		return false
	}
	return p.within(memory, bytes)
}

func (p memsetParams) within(memory gpu.Ptr, bytes int) bool {
	return p.value == 0 && p.height == 1 && p.dst >= memory && p.dst-memory <= gpu.Ptr(bytes) &&
		uint64(p.width) <= uint64(bytes) &&
		uint64(p.width)*uint64(p.size) <= uint64(bytes)-uint64(p.dst-memory)
}

// takeOut destroys a node of a graph for which a single other one waits. That waits for what the
// node has waited for then.
func (c *context) takeOut(graph, node uintptr) {
	before, err := c.neighbours(&c.GraphDependencies, node)
	if err != nil || len(before) == 0 {
		return
	}
	behind, err := c.neighbours(&c.GraphDependents, node)
	if err != nil || len(behind) != 1 {
		return
	}
	to := slices.Repeat(behind, len(before))
	if c.call(&c.GraphAddEdges, graph, uintptr(unsafe.Pointer(&before[0])),
		uintptr(unsafe.Pointer(&to[0])), uintptr(len(before))) == nil {
		_ = c.call(&c.GraphDestroyNode, node) // one that stays does no harm
	}
}
