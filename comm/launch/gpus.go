package launch

import (
	"cmp"
	"errors"
	"fmt"
	"os"

	"github.com/kasmina-go/kasmina/comm"
)

// ForGPUs is the job that a program runs in the place of its own work, where it is to start a
// process a GPU. gpus is what its user asks for, 0 for nothing. args are its own arguments, which
// the processes get. On a host of Kubeflow Trainer it is what PET_NPROC_PER_NODE asks for. It is
// nil where the program does the work: alone, or as one of the processes that this package,
// torchrun, Slurm or MPI has started.
func ForGPUs(gpus int, args []string, getenv func(string) string) (*Job, error) {
	if gpus < 0 {
		return nil, fmt.Errorf("launch: %d GPUs: want at least 1, or 0 where it is left open", gpus)
	}

	node, perNode, found, err := NodeFromEnvironment(getenv)
	if err != nil {
		return nil, err
	}

	if perNode = cmp.Or(gpus, perNode); perNode < 2 || getenv("RANK") != "" {
		return nil, nil
	}

	place, err := comm.FromEnvironment(getenv)
	if (err == nil || errors.Is(err, comm.ErrSecret)) && place.Size > 1 && !found {
		return nil, fmt.Errorf("launch: %d GPUs are asked for, and %s has started a process for "+
			"each already: do not ask for any", gpus, place.Source)
	}

	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("launch: %w", err)
	}

	return &Job{Path: self, Args: args, PerNode: perNode, Node: node}, nil
}
