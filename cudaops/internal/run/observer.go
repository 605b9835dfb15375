package run

// Observer measures the work of a machine. It enqueues that work in the machine's stead, with marks of
// time around it or within it, and changes no result.
type Observer interface {
	// Run enqueues a run of the program.
	Run(w Work) error
	// Update enqueues an update by calling enqueue, which passes its parts to UpdatePart.
	Update(enqueue func() error) error
	// UpdatePart enqueues a part of the update under way.
	UpdatePart(w Work) error
}

// Work is a piece of work that can be enqueued in two variants.
type Work struct {
	// Replay enqueues the work as usual: by launching its graph, once that has been captured.
	Replay func() error
	// Plain enqueues the same work kernel by kernel.
	Plain func() error

	Captured  bool    // Replay launches a graph, or captures one
	Optimizer any     // the optimizer that the machine has, nil for none
	Bytes     float64 // what an update moves
}

// Unobserved is the Observer that only enqueues work.
type Unobserved struct{}

// Run enqueues a run.
func (Unobserved) Run(w Work) error { return w.Replay() }

// Update enqueues an update.
func (Unobserved) Update(enqueue func() error) error { return enqueue() }

// UpdatePart enqueues a part of an update.
func (Unobserved) UpdatePart(w Work) error { return w.Replay() }
