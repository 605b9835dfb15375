// Package launch starts a run's processes on one host, one per GPU, and terminates them together.
//
// Each process receives the variables that package comm reads, namely RANK, LOCAL_RANK, WORLD_SIZE,
// LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them, and the secret of the run in
// KASMINA_SECRET. If the job's environment contains no secret, a run on a single host gets a random
// one, whereas a run on several hosts fails, since all hosts need the same secret. The secret is
// passed only in the environment, which other users cannot read. Each line of output is prefixed with
// the rank that wrote it.
//
// When a process fails, the remaining ones are asked to terminate (SIGTERM). After the grace period
// they are killed (SIGKILL), along with any processes they started. The [Error] names the process
// that failed first, the reason, and its last lines.
//
// Interrupts and termination requests are forwarded to all processes, which may save and exit in
// their own time. A second one terminates them as a failure does.
package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/kasmina-go/kasmina/comm"
)

// Job describes the processes to start.
type Job struct {
	// Path is the program. Args are its arguments, without the program's name.
	Path string
	Args []string
	Dir  string
	// Env is the environment of the processes, apart from the variables of their places; nil means
	// os.Environ().
	Env []string
	// PerNode is the number of processes on this host.
	PerNode int
	// Node identifies this host in a run on several hosts. The zero Node means that it is the only one.
	Node Node
	// Stdout and Stderr receive the lines of all processes; nil means os.Stdout and os.Stderr.
	Stdout, Stderr io.Writer
	// Grace is the time between asking the processes to terminate and killing them; 0 means 4 s.
	Grace time.Duration

	secret comm.Secret
}

// Node is one of the hosts of a run.
type Node struct {
	// Rank numbers the hosts from 0 to Count−1.
	Rank, Count int
	// MasterAddr and MasterPort are the address and port of rank 0.
	MasterAddr string
	MasterPort int
}

// NodeFromEnvironment identifies this host from the variables (PET_*) that Kubeflow Trainer sets for
// torchrun, in whose place the program runs. perNode is 0 if the number of processes is left open
// ("auto", "gpu" or unset). found is false if the variables are missing or if the process already has
// a rank.
func NodeFromEnvironment(getenv func(string) string) (n Node, perNode int, found bool, err error) {
	if getenv("RANK") != "" || getenv("PET_NNODES") == "" || getenv("PET_NODE_RANK") == "" {
		return Node{}, 0, false, nil
	}

	number := func(name, otherwise string) int {
		v := cmp.Or(getenv(name), otherwise)
		i, bad := strconv.Atoi(v)
		if bad != nil || i < 0 {
			err = errors.Join(err, fmt.Errorf("launch: %s=%q: want a number of at least 0", name, v))
		}
		return i
	}

	n = Node{Rank: number("PET_NODE_RANK", ""), Count: number("PET_NNODES", ""),
		MasterAddr: getenv("PET_MASTER_ADDR"), MasterPort: number("PET_MASTER_PORT", "29400")}
	switch v := getenv("PET_NPROC_PER_NODE"); v {
	case "", "auto", "gpu", "cpu":
	default:
		perNode = number("PET_NPROC_PER_NODE", "")
	}

	return n, perNode, true, err
}

// check fills in defaults and returns an error if the job is invalid.
func (j *Job) check() error {
	if j.Node.Count == 0 {
		port, err := freePort()
		if err != nil {
			return fmt.Errorf("launch: no port for rank 0: %w", err)
		}
		j.Node = Node{Count: 1, MasterAddr: "127.0.0.1", MasterPort: port}
	}

	if j.PerNode < 1 {
		return fmt.Errorf("launch: %d processes on this host: want at least 1", j.PerNode)
	}

	if j.Env == nil {
		j.Env = os.Environ()
	}

	if j.Stdout == nil {
		j.Stdout = os.Stdout
	}

	if j.Stderr == nil {
		j.Stderr = os.Stderr
	}

	if j.Grace <= 0 {
		j.Grace = 4 * time.Second
	}

	secret, err := comm.SecretFromEnvironment(j.getenv)
	if err == nil && secret == "" && j.Node.Count == 1 {
		secret = comm.NewSecret()
	}

	j.secret = secret
	if err == nil {
		err = j.place(j.PerNode - 1).Check()
	}
	if err != nil {
		return fmt.Errorf("launch: host %d of %d: %w", j.Node.Rank, j.Node.Count, err)
	}

	return nil
}

// freePort returns a port that is currently unused. If another process takes it in the meantime, rank
// 0 listens on the next free one.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}

func (j *Job) place(local int) comm.Place {
	return comm.Place{Rank: j.Node.Rank*j.PerNode + local, Size: j.Node.Count * j.PerNode,
		LocalRank: local, LocalSize: j.PerNode, MasterAddr: j.Node.MasterAddr,
		MasterPort: j.Node.MasterPort, Secret: j.secret}
}

// getenv returns a variable of the job's environment. The last of several values applies.
func (j *Job) getenv(name string) string {
	for _, variable := range slices.Backward(j.Env) {
		if value, ok := strings.CutPrefix(variable, name+"="); ok {
			return value
		}
	}
	return ""
}

// environment returns the job's environment with the place of a process in it.
func (j *Job) environment(local int) []string {
	p := j.place(local)
	env := slices.DeleteFunc(slices.Clone(j.Env), func(variable string) bool {
		// torchrun's store is unavailable here, even if torchrun started this program.
		return strings.HasPrefix(variable, "TORCHELASTIC_")
	})
	env = append(env, "RANK="+strconv.Itoa(p.Rank), "WORLD_SIZE="+strconv.Itoa(p.Size),
		"LOCAL_RANK="+strconv.Itoa(local), "LOCAL_WORLD_SIZE="+strconv.Itoa(p.LocalSize),
		"MASTER_ADDR="+p.MasterAddr, "MASTER_PORT="+strconv.Itoa(p.MasterPort))
	return append(env, comm.SecretVariable+"="+string(p.Secret))
}

// Run starts the processes and returns when all have exited and their output has been written. The
// error is an *[Error] unless the processes could not be started.
func Run(ctx context.Context, j Job) error {
	if err := j.check(); err != nil {
		return err
	}

	// Linux kills the processes when the thread that started them exits.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, forwarded...)
	defer signal.Stop(signals)

	r := &run{job: &j, exits: make(chan *process, j.PerNode), signals: signals}
	if err := r.start(); err != nil {
		r.end()
		r.follow(ctx)
		return errors.Join(err, r.drain())
	}

	r.follow(ctx)
	return r.result()
}

// run manages the processes of a job.
type run struct {
	job       *Job
	processes []*process
	exits     chan *process
	signals   <-chan os.Signal
	alive     int
	ending    bool             // all processes were asked to terminate
	forced    bool             // all processes were killed
	explained <-chan time.Time // delivers when a failed process has had enough time to write the reason
	force     <-chan time.Time // delivers when the grace period is over
	forwarded os.Signal        // first forwarded termination request
	cause     error            // set if the context or a signal terminated the run
}

// process is one process of a run.
type process struct {
	Death
	cmd    *exec.Cmd
	output *output
	err    error
}

func (r *run) start() error {
	mux := &merged{stdout: r.job.Stdout, stderr: r.job.Stderr}
	for local := range r.job.PerNode {
		rank := r.job.place(local).Rank
		p := &process{Death: Death{Rank: rank}, cmd: exec.Command(r.job.Path, r.job.Args...)}
		p.cmd.Dir, p.cmd.Env = r.job.Dir, r.job.environment(local)
		p.cmd.SysProcAttr = attributes()
		var err error
		if p.output, err = newOutput(p.cmd, mux, fmt.Sprintf("[%d] ", rank)); err == nil {
			err = p.output.started(p.cmd.Start())
		}
		if err != nil {
			return fmt.Errorf("launch: rank %d: %w", rank, err)
		}
		p.PID = p.cmd.Process.Pid
		r.processes = append(r.processes, p)
		r.alive++
		go func() {
			p.err = p.cmd.Wait()
			r.exits <- p
		}()
	}

	return nil
}

// follow waits for all processes to exit.
func (r *run) follow(ctx context.Context) {
	done := ctx.Done()
	for r.alive > 0 {
		select {
		case p := <-r.exits:
			r.ended(p)
		case <-done:
			done = nil
			r.cause = context.Cause(ctx)
			r.end()
		case s := <-r.signals:
			r.forward(s)
		case <-r.explained:
			r.end()
		case <-r.force:
			r.forced = true
			r.each(kill)
		}
	}
}

// ended records that a process exited. If it failed, the remaining processes are terminated too.
func (r *run) ended(p *process) {
	r.alive--
	p.Code, p.Signal = outcome(p.cmd.ProcessState)
	p.ended = true
	p.Asked = r.ending && (p.Signal == nil || p.Signal == syscall.SIGTERM ||
		p.Signal == syscall.SIGKILL && r.forced)
	kill(p.cmd.Process) // kills any processes it left running
	if p.err != nil {
		if r.forwarded != nil && r.cause == nil {
			r.cause = Interruption{r.forwarded}
		}
		if p.Code != comm.ExitPeer {
			r.end()
		} else if r.explained == nil {
			r.explained = time.After(explanationWait)
		}
	}
}

// explanationWait limits the time for which the remaining processes keep running after a process exits
// because of the failure of another one, which may still be writing the reason.
const explanationWait = 2 * time.Second

// end asks all processes to terminate, and kills them after the grace period.
func (r *run) end() {
	if r.ending {
		return
	}
	r.ending = true
	r.each(terminate)
	r.force = time.After(r.job.Grace)
}

// forward forwards a signal to all processes. The second termination request is not forwarded but
// terminates the run.
func (r *run) forward(s os.Signal) {
	if r.forwarded != nil && slices.Contains(requests, s) {
		r.cause = fmt.Errorf("%w, after %v", Interruption{s}, r.forwarded)
		r.end()
		return
	}
	if slices.Contains(requests, s) {
		r.forwarded = s
	}
	r.each(func(p *os.Process) { send(p, s) })
}

func (r *run) each(f func(*os.Process)) {
	for _, p := range r.processes {
		if !p.ended {
			f(p.cmd.Process)
		}
	}
}

// result returns the outcome of the run.
func (r *run) result() error {
	written := r.drain()
	e := &Error{Cause: r.cause}
	for _, p := range r.processes {
		if p.err != nil {
			p.Last = p.output.last.lines()
			e.Deaths = append(e.Deaths, p.Death)
		} else {
			e.Well++
		}
	}

	if len(e.Deaths) == 0 && e.Cause == nil {
		return written
	}

	slices.SortStableFunc(e.Deaths, func(a, b Death) int {
		return cmp.Compare(a.guilt(), b.guilt())
	})
	return errors.Join(e, written)
}

// drain waits for the rest of the output.
func (r *run) drain() error {
	var errs []error
	for _, p := range r.processes {
		errs = append(errs, p.output.drain(r.job.Grace))
	}
	return errors.Join(errs...)
}
