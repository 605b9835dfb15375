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

// Place is where a process stands among the processes of a run, one for each GPU.
type Place struct {
	// Rank counts the processes of the run from 0 to Size−1.
	Rank, Size int
	// LocalRank counts those of one host from 0 to LocalSize−1.
	LocalRank, LocalSize int
	// MasterAddr is the name or address of rank 0's host. Rank 0 listens on the addresses to which
	// it resolves, or on the loopback address if all ranks run on the same host.
	MasterAddr string
	// MasterPort is the first of the ports at which rank 0 may listen. It takes the first free one
	// of [PortWindow] ports, and the others look for it there.
	MasterPort int
	// Listen is the address rank 0 listens on when MasterAddr does not resolve to an address of
	// its own host; 0.0.0.0 means every interface. It is ignored if all ranks run on one host.
	Listen string
	// Run is the same for all processes of a run, and differs for every other.
	Run string
	// Secret authenticates the processes of the run to each other. It is required unless Size is 1.
	Secret Secret
	// Source names whose variables say so: "torchrun", "Slurm", "Open MPI", "Kubeflow Trainer". It
	// is empty for a process that runs alone.
	Source string
}

// PortWindow is the number of ports from MasterPort on that rank 0 may listen at.
const PortWindow = 16

// ListenVariable is the environment variable that sets [Place.Listen].
const ListenVariable = "KASMINA_LISTEN"

const (
	defaultPort = 29500   // torchrun's
	maxRanks    = 1 << 20 // for which rank 0 keeps seats
)

// FromEnvironment reads the place from the variables that launchers set, getenv being os.Getenv:
//
//   - torchrun, Kubeflow's PyTorchJob and package launch: RANK, WORLD_SIZE, LOCAL_RANK,
//     LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT;
//   - Open MPI's mpirun and Kubernetes' MPI operator: OMPI_COMM_WORLD_*. Over several hosts
//     MASTER_ADDR must be handed on (mpirun -x MASTER_ADDR);
//   - Kubeflow Trainer with one process a node: PET_*. With more, the program starts them itself,
//     by package launch;
//   - Slurm's srun: SLURM_*. The first host of the step is that of rank 0, and the port follows from
//     the job's number. MASTER_ADDR and MASTER_PORT overrule both.
//
// If none of them is set, the process is alone: rank 0 of 1. If some are set and others are missing
// or make no sense, the error names them.
//
// A run of several processes also needs a secret (see [SecretFromEnvironment]). If the secret is
// missing or unusable, the error wraps [ErrSecret] and the rest of the place is valid.
// KASMINA_LISTEN sets [Place.Listen].
func FromEnvironment(getenv func(string) string) (Place, error) {
	if getenv == nil {
		return Place{}, errors.New("comm: FromEnvironment: the function is nil, want os.Getenv")
	}
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
		return fmt.Errorf("rank %d of %d: want a rank from 0 to the number of ranks less one",
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

// Device picks the GPU of the process among those that it sees: the one of its local rank, or the
// only one. Slurm or a container may show each process its own.
func (p Place) Device(visible int) (int, error) {
	switch {
	case p.LocalRank < visible:
		return p.LocalRank, nil
	case visible == 1:
		return 0, nil
	}
	return 0, fmt.Errorf("local rank %d of %d sees %d GPUs: start at most one process a GPU",
		p.LocalRank, p.LocalSize, visible)
}

// ports lists where rank 0 may listen.
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

func (e *environment) has(name string) bool { return e.getenv(name) != "" }

func (e *environment) fail(format string, args ...any) {
	if e.err == nil {
		e.err = fmt.Errorf(format, args...)
	}
}

// number is the first of the variables that is set; it must be a number that is not negative.
func (e *environment) number(names ...string) int {
	for _, name := range names {
		v := e.getenv(name)
		if v == "" {
			continue
		}
		n, err := strconv.Atoi(v)
		if err != nil || n < 0 {
			e.fail("%s=%q: want a number from 0", name, v)
		}
		return n
	}
	e.fail("%s is not set", strings.Join(names, " or "))
	return 0
}

// numberOr is number with a default for variables that may be missing.
func (e *environment) numberOr(otherwise int, names ...string) int {
	if slices.ContainsFunc(names, e.has) {
		return e.number(names...)
	}
	return otherwise
}

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
		p.MasterPort++ // torchrun itself listens at the port that it names
	}
	return p
}

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

func (e *environment) trainer() Place {
	p := Place{Source: "Kubeflow Trainer", Rank: e.number("PET_NODE_RANK"),
		Size:      e.number("PET_NNODES"),
		LocalSize: 1, MasterAddr: e.getenv("PET_MASTER_ADDR"),
		MasterPort: e.numberOr(defaultPort, "PET_MASTER_PORT")}
	if per := e.getenv("PET_NPROC_PER_NODE"); per != "" && per != "1" {
		e.fail("PET_NPROC_PER_NODE=%q and no RANK: each node starts its processes by package "+
			"launch", per)
	}
	p.Run = net.JoinHostPort(p.MasterAddr, strconv.Itoa(p.MasterPort))
	return p
}

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

// slurmLocalSize is the number of the step's tasks on this node.
func (e *environment) slurmLocalSize(p Place) int {
	text := e.getenv("SLURM_STEP_TASKS_PER_NODE")
	if text == "" {
		return p.LocalRank + 1 // at least
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
