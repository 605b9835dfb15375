package run

// Observer measures the work of a machine. It enqueues the work on the machine's behalf, adding timing
// events around it or within it, and changes no results.
type Observer interface {
	// Run enqueues a run of the program.
	Run(w Work) error
	// Update enqueues an update by calling enqueue, which passes the parts of the update to UpdatePart.
	Update(enqueue func() error) error
	// UpdatePart enqueues part of the current update.
	UpdatePart(w Work) error
}

// Work is a unit of work that can be enqueued in two ways.
type Work struct {
	// Replay enqueues the work normally: it launches the graph once one has been captured.
	Replay func() error
	// Plain enqueues the same work kernel by kernel.
	Plain func() error

	Captured  bool    // Replay launches or captures a graph
	Optimizer any     // the machine's optimizer; nil if it has none
	Bytes     float64 // bytes that an update moves
}

// Unobserved is an Observer that measures nothing.
type Unobserved struct{}

// Run enqueues a run.
func (Unobserved) Run(w Work) error { return w.Replay() }

// Update enqueues an update.
func (Unobserved) Update(enqueue func() error) error { return enqueue() }

// UpdatePart enqueues part of an update.
func (Unobserved) UpdatePart(w Work) error { return w.Replay() }
