package gpu

import (
	"context"
	"fmt"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm/parallel"
)

// Ordinal returns the index of this process's GPU among the visible GPUs. It returns 0 if the process
// is the only one and w is nil.
func Ordinal(w *comm.World) (int, error) {
	if w == nil {
		return 0, nil
	}
	visible, err := cudaops.Count()
	if err != nil {
		return 0, err
	}
	return w.Place().Device(visible)
}

// Team connects the processes of a world with [Join] or, if device is nil, with parallel.Join, which uses the
// CPUs of one host. All processes must call it with the same kind of device. If w is nil, it returns nil.
// The team takes ownership of the world, which Team closes if it returns an error.
func Team(ctx context.Context, w *comm.World, device *cudaops.Device) (*parallel.Team, error) {
	if w == nil {
		return nil, nil
	}

	own := "the CPU"
	if device != nil {
		own = "a GPU"
	}

	all, err := w.Gather(ctx, "device", []byte(own))
	if err != nil {
		return nil, abandon(w, err)
	}

	for r, other := range all {
		if string(other) != string(all[0]) {
			return nil, abandon(w, fmt.Errorf("llm/gpu: rank 0 would train on %s and rank %d on %s: name "+
				"the device", all[0], r, other))
		}
	}

	switch {
	case device != nil:
		return Join(ctx, w, device)
	case w.Place().LocalSize != w.Size():
		return nil, abandon(w, fmt.Errorf("llm/gpu: %d processes on several hosts: training on "+
			"CPUs is limited to a single host", w.Size()))
	}

	return parallel.Join(ctx, w)
}
