package launch

import (
	"cmp"
	"errors"
	"fmt"
	"os"

	"github.com/kasmina-go/kasmina/comm"
)

// ForGPUs returns a job that starts the current program once per GPU, for programs that can start
// themselves. gpus is the number the user requested, or 0 for none. The processes receive the program's
// arguments, args. On a host of Kubeflow Trainer, PET_NPROC_PER_NODE is the default for gpus.
//
// ForGPUs returns nil if this process should do the work itself, either because it is the only one or
// because this package, torchrun, Slurm or MPI started it as one of several.
func ForGPUs(gpus int, args []string, getenv func(string) string) (*Job, error) {
	if gpus < 0 {
		return nil, fmt.Errorf("launch: %d GPUs: want at least 1, or 0 for the default", gpus)
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
		return nil, fmt.Errorf("launch: %d GPUs were requested, but %s has already started the "+
			"processes: do not request any", gpus, place.Source)
	}

	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("launch: %w", err)
	}

	return &Job{Path: self, Args: args, PerNode: perNode, Node: node}, nil
}
