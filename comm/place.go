package comm

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
)

// Place describes the position of a process among the processes of a run, one per GPU.
type Place struct {
	// Rank numbers the processes of the run from 0 to Size−1.
	Rank, Size int
	// LocalRank numbers the processes of one host from 0 to LocalSize−1.
	LocalRank, LocalSize int
	// MasterAddr is the name or address of rank 0's host. Rank 0 listens on the addresses that it
	// resolves to, or on the loopback address if all ranks run on the same host.
	MasterAddr string
	// MasterPort is the first port on which rank 0 may listen. Rank 0 uses the first free one of
	// [PortWindow] ports, and the other ranks try them all.
	MasterPort int
	// Listen is the address that rank 0 listens on if MasterAddr does not resolve to an address of
	// its host; 0.0.0.0 means every interface. It is ignored if all ranks run on one host.
	Listen string
	// Run identifies the run. It is the same for all of the run's processes and differs from that of
	// any other run.
	Run string
	// Secret authenticates the processes of the run to each other. It is required unless Size is 1.
	Secret Secret
	// Source names the launcher that set the variables: "torchrun", "Slurm", "Open MPI" or
	// "Kubeflow Trainer". It is empty for a process that runs alone.
	Source string
}

// PortWindow is the number of ports, starting with MasterPort, on which rank 0 may listen.
const PortWindow = 16

// ListenVariable is the environment variable that sets [Place.Listen].
const ListenVariable = "KASMINA_LISTEN"

const (
	defaultPort = 29500   // the default of torchrun
	maxRanks    = 1 << 20 // limits rank 0's memory for other ranks
)

// FromEnvironment determines the place from the variables that launchers set. getenv is normally
// os.Getenv.
//
//   - torchrun, Kubeflow's PyTorchJob and package launch set RANK, WORLD_SIZE, LOCAL_RANK,
//     LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
//   - Open MPI's mpirun and Kubernetes' MPI operator set OMPI_COMM_WORLD_*. Runs on several hosts
//     must also pass MASTER_ADDR on (mpirun -x MASTER_ADDR).
//   - Kubeflow Trainer with one process per node sets PET_*. With several, the program starts them
//     itself with package launch.
//   - Slurm's srun sets SLURM_*. Rank 0's host is the first host of the step, and its port is derived
//     from the job number. MASTER_ADDR and MASTER_PORT override both.
//
// Without any of these, the process is the only rank of its run. If the variables are incomplete or
// invalid, the error names them.
//
// Runs of several processes also need a secret (see [SecretFromEnvironment]). If it is missing or
// unusable, the error wraps [ErrSecret], although the rest of the place is valid. KASMINA_LISTEN sets
// [Place.Listen].
func FromEnvironment(getenv func(string) string) (Place, error) {
	e := &environment{getenv: getenv}
	var p Place
	switch {
	case e.has("RANK") || e.has("WORLD_SIZE"):
		p = e.torch()
	case e.has("OMPI_COMM_WORLD_RANK"):
		p = e.openMPI()
	case e.has("PET_NNODES") && e.has("PET_NODE_RANK"):
		p = e.trainer()
	case e.has("SLURM_PROCID") && e.has("SLURM_STEP_ID"): // a batch script has no step
		p = e.slurm()
	default:
		return Place{Size: 1, LocalSize: 1}, nil
	}

	if e.err != nil {
		return Place{}, fmt.Errorf("environment of %s: %w", p.Source, e.err)
	}

	p.Listen = getenv(ListenVariable)
	var err error
	if p.Size > 1 {
		p.Secret, err = SecretFromEnvironment(getenv)
	}

	if err == nil {
		err = p.Check()
	}

	if errors.Is(err, ErrSecret) {
		return p, fmt.Errorf("environment of %s: %w", p.Source, err)
	}
	if err != nil {
		return Place{}, fmt.Errorf("environment of %s: %w", p.Source, err)
	}

	return p, nil
}

// Check returns an error if the place is invalid. The error wraps [ErrSecret] if only the secret is
// missing or unusable.
func (p Place) Check() error {
	switch {
	case p.Size > maxRanks:
		return fmt.Errorf("%d ranks: want at most %d", p.Size, maxRanks)
	case p.Size < 1 || p.Rank < 0 || p.Rank >= p.Size:
		return fmt.Errorf("rank %d of %d: want a rank from 0 to the number of ranks minus one",
			p.Rank,
			p.Size)
	case p.LocalSize < 1 || p.LocalSize > p.Size || p.LocalRank < 0 || p.LocalRank >= p.LocalSize:
		return fmt.Errorf("local rank %d of %d in a run of %d ranks: want 0 ≤ local rank < local "+
			"size ≤ size",
			p.LocalRank, p.LocalSize, p.Size)
	case p.Size > 1 && p.MasterAddr == "":
		return fmt.Errorf("no address of rank 0: set MASTER_ADDR")
	case p.Size > 1 && (p.MasterPort < 1 || p.MasterPort > 65535):
		return fmt.Errorf("port %d of rank 0: want 1 to 65535", p.MasterPort)
	case p.Size > 1:
		return p.Secret.check()
	}

	return nil
}

// Device returns the index of the process's GPU among the visible ones. This is its local rank, or 0
// if only one GPU is visible, since Slurm or a container may show each process only its own GPU.
func (p Place) Device(visible int) (int, error) {
	switch {
	case p.LocalRank < visible:
		return p.LocalRank, nil
	case visible == 1:
		return 0, nil
	}
	return 0, fmt.Errorf("local rank %d of %d sees %d GPUs: start at most one process per GPU",
		p.LocalRank, p.LocalSize, visible)
}

// ports returns the ports on which rank 0 may listen.
func (p Place) ports() []int {
	first := min(p.MasterPort, 65536-PortWindow)
	ports := make([]int, PortWindow)
	for i := range ports {
		ports[i] = first + i
	}
	return ports
}

// environment reads variables and keeps the first error.
type environment struct {
	getenv func(string) string
	err    error
}

// has reports whether a variable is set.
func (e *environment) has(name string) bool { return e.getenv(name) != "" }

// fail records an error unless there is one already.
func (e *environment) fail(format string, args ...any) {
	if e.err == nil {
		e.err = fmt.Errorf(format, args...)
	}
}

// number returns the value of the first variable that is set, which must be a non-negative integer.
func (e *environment) number(names ...string) int {
	for _, name := range names {
		v := e.getenv(name)
		if v == "" {
			continue
		}
		n, err := strconv.Atoi(v)
		if err != nil || n < 0 {
			e.fail("%s=%q: want a number of at least 0", name, v)
		}
		return n
	}

	e.fail("%s is not set", strings.Join(names, " or "))
	return 0
}

// numberOr is like number, but returns otherwise if no variable is set.
func (e *environment) numberOr(otherwise int, names ...string) int {
	if slices.ContainsFunc(names, e.has) {
		return e.number(names...)
	}
	return otherwise
}

// torch reads the variables of torchrun.
func (e *environment) torch() Place {
	p := Place{Source: "torchrun", Rank: e.number("RANK"), Size: e.number("WORLD_SIZE"),
		LocalRank: e.numberOr(0, "LOCAL_RANK"), MasterAddr: e.getenv("MASTER_ADDR"),
		MasterPort: e.numberOr(defaultPort, "MASTER_PORT")}
	p.LocalSize = e.numberOr(p.LocalRank+1, "LOCAL_WORLD_SIZE")
	p.Run = net.JoinHostPort(p.MasterAddr, strconv.Itoa(p.MasterPort))
	if id := e.getenv("TORCHELASTIC_RUN_ID"); id != "" {
		// A process left over from before a restart must not join.
		p.Run += " " + id + "." + e.getenv("TORCHELASTIC_RESTART_COUNT")
	}

	if strings.EqualFold(e.getenv("TORCHELASTIC_USE_AGENT_STORE"), "true") {
		p.MasterPort++ // torchrun itself listens on the port it passes.
	}

	return p
}

// openMPI reads the variables of Open MPI.
func (e *environment) openMPI() Place {
	p := Place{Source: "Open MPI", Rank: e.number("OMPI_COMM_WORLD_RANK"),
		Size: e.number("OMPI_COMM_WORLD_SIZE"), LocalRank: e.number("OMPI_COMM_WORLD_LOCAL_RANK"),
		LocalSize: e.number("OMPI_COMM_WORLD_LOCAL_SIZE"), MasterAddr: e.getenv("MASTER_ADDR"),
		MasterPort: e.numberOr(defaultPort, "MASTER_PORT")}
	if p.MasterAddr == "" && p.LocalSize == p.Size {
		p.MasterAddr = "127.0.0.1"
	}

	if p.MasterAddr == "" {
		e.fail("no address of rank 0: run mpirun -x MASTER_ADDR=HOST with the first host of the " +
			"host file")
	}

	p.Run = net.JoinHostPort(p.MasterAddr, strconv.Itoa(p.MasterPort)) + " " +
		e.getenv("PMIX_NAMESPACE")
	return p
}

// trainer reads the variables of Kubeflow Trainer.
func (e *environment) trainer() Place {
	p := Place{Source: "Kubeflow Trainer", Rank: e.number("PET_NODE_RANK"),
		Size:      e.number("PET_NNODES"),
		LocalSize: 1, MasterAddr: e.getenv("PET_MASTER_ADDR"),
		MasterPort: e.numberOr(defaultPort, "PET_MASTER_PORT")}
	if per := e.getenv("PET_NPROC_PER_NODE"); per != "" && per != "1" {
		e.fail("PET_NPROC_PER_NODE=%q but RANK is not set: start the processes of each node with package "+
			"launch", per)
	}
	p.Run = net.JoinHostPort(p.MasterAddr, strconv.Itoa(p.MasterPort))
	return p
}

// slurm reads the variables of Slurm.
func (e *environment) slurm() Place {
	job, step := e.number("SLURM_JOB_ID", "SLURM_JOBID"), e.number("SLURM_STEP_ID", "SLURM_STEPID")
	p := Place{Source: "Slurm", Rank: e.number("SLURM_PROCID"),
		Size:       e.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
		LocalRank:  e.number("SLURM_LOCALID"),
		MasterAddr: e.getenv("MASTER_ADDR"), Run: fmt.Sprintf("slurm %d.%d", job, step)}
	p.MasterPort = e.numberOr(slurmPort(job, step), "MASTER_PORT")
	p.LocalSize = e.slurmLocalSize(p)
	if p.MasterAddr != "" {
		return p
	}

	list := cmp.Or(e.getenv("SLURM_STEP_NODELIST"), e.getenv("SLURM_JOB_NODELIST"),
		e.getenv("SLURM_NODELIST"))
	hosts, err := slurmHosts(list)
	if err != nil {
		e.fail("list of nodes: %w", err)
		return p
	}

	p.MasterAddr = hosts[0]
	return p
}

// slurmLocalSize returns the number of the step's tasks on this node.
func (e *environment) slurmLocalSize(p Place) int {
	text := e.getenv("SLURM_STEP_TASKS_PER_NODE")
	if text == "" {
		return p.LocalRank + 1 // the smallest possible value
	}

	tasks, err := slurmCounts(text)
	node := e.numberOr(0, "SLURM_NODEID")
	if err == nil && node >= len(tasks) {
		err = fmt.Errorf("SLURM_NODEID=%d with %d nodes", node, len(tasks))
	}
	if err != nil {
		e.fail("SLURM_STEP_TASKS_PER_NODE=%q: %w", text, err)
		return 1
	}

	return tasks[node]
}
