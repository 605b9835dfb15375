package gpu

import (
	"context"
	"fmt"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm/parallel"
)

// Ordinal is the number of the GPU that a process of a world computes on, among those that it sees.
// It is 0 for a process that is alone, whose world is nil.
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

// Team connects the processes of a world by their GPUs ([Join]). Where the device is nil it
// connects them by their CPUs (parallel.Join), which then are of one host. Without a world there is
// no team. All must call it, and compute on the same kind of device.
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
		return nil, err
	}
	for r, other := range all {
		if string(other) != string(all[0]) {
			return nil, fmt.Errorf("llm/gpu: rank 0 would train on %s and rank %d on %s: name "+
				"the device", all[0], r, other)
		}
	}
	switch {
	case device != nil:
		return Join(ctx, w, device)
	case w.Place().LocalSize != w.Size():
		return nil, w.Blame(fmt.Errorf("llm/gpu: %d processes on several hosts: CPUs train "+
			"together on one host alone", w.Size()))
	}
	return parallel.Join(ctx, w)
}
