package comm

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// variables reads a file of NAME=value lines as printed by env.
func variables(t *testing.T, file string) func(string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", file))
	require.NoError(t, err)
	values := map[string]string{}
	for line := range strings.Lines(string(text)) {
		name, value, found := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		require.True(t, found, line)
		values[name] = value
	}
	return func(name string) string { return values[name] }
}

func with(getenv func(string) string, changes ...string) func(string) string {
	return func(name string) string {
		for _, change := range changes {
			if n, v, _ := strings.Cut(change, "="); n == name {
				return v
			}
		}
		return getenv(name)
	}
}

// TestReplayedEnvironments reads the variables that each launcher sets for one of its processes.
func TestReplayedEnvironments(t *testing.T) {
	secret := NewSecret()
	for _, c := range []struct {
		file    string
		changes []string
		want    Place
	}{
		{"torchrun.env", nil, Place{Rank: 5, Size: 8, LocalRank: 1,
			LocalSize: 4, MasterAddr: "node-a",
			MasterPort: 29401, Run: "node-a:29400 run7.2", Source: "torchrun"}},
		{"torchrun.env", []string{"TORCHELASTIC_USE_AGENT_STORE=False"}, Place{Rank: 5, Size: 8,
			LocalRank: 1,
			LocalSize: 4, MasterAddr: "node-a", MasterPort: 29400, Run: "node-a:29400 run7.2",
			Source: "torchrun"}},
		{"pytorchjob.env", nil, Place{Rank: 1, Size: 3, LocalSize: 1, MasterAddr: "llama-master-0",
			MasterPort: 23456,
			Run:        "llama-master-0:23456", Source: "torchrun"}},
		{"trainer.env", nil, Place{Rank: 1, Size: 2, LocalSize: 1,
			MasterAddr: "kasmina-node-0-0.kasmina",
			MasterPort: 29400, Run: "kasmina-node-0-0.kasmina:29400", Source: "Kubeflow Trainer"}},
		{"srun.env", nil, Place{Rank: 6, Size: 10, LocalRank: 2, LocalSize: 4, MasterAddr: "gpu07",
			MasterPort: 15000 + 4243%1024*16, Run: "slurm 4242.1", Source: "Slurm"}},
		{"srun.env", []string{"MASTER_ADDR=10.0.0.7", "MASTER_PORT=1234",
			ListenVariable + "=10.1.0.7"}, Place{Rank: 6,
			Size: 10, LocalRank: 2, LocalSize: 4, MasterAddr: "10.0.0.7", MasterPort: 1234,
			Listen: "10.1.0.7", Run: "slurm 4242.1", Source: "Slurm"}},
		// This is the batch script itself.
		{"srun.env", []string{"SLURM_STEP_ID="}, Place{Size: 1, LocalSize: 1}},
		{"mpirun.env", nil, Place{Rank: 3, Size: 4, LocalRank: 1, LocalSize: 2,
			MasterAddr: "pi-worker-0.pi",
			MasterPort: 29500, Run: "pi-worker-0.pi:29500 prterun-pi-launcher-1@1",
			Source: "Open MPI"}},
		{"mpirun.env", []string{"MASTER_ADDR=", "OMPI_COMM_WORLD_LOCAL_SIZE=4"},
			Place{Rank: 3, Size: 4,
				LocalRank: 1,
				LocalSize: 4, MasterAddr: "127.0.0.1", MasterPort: 29500,
				Run: "127.0.0.1:29500 prterun-pi-launcher-1@1", Source: "Open MPI"}},
	} {
		changes := append(c.changes, SecretVariable+"="+string(secret))
		if c.want.Size > 1 {
			c.want.Secret = secret
		}
		p, err := FromEnvironment(with(variables(t, c.file), changes...))
		require.NoError(t, err, c.file)
		require.Equal(t, c.want, p, "%s %v", c.file, c.changes)
	}

	p, err := FromEnvironment(func(string) string { return "" })
	require.NoError(t, err)
	require.Equal(t, Place{Size: 1, LocalSize: 1}, p)
}

func TestEnvironmentsInPart(t *testing.T) {
	for _, c := range []struct {
		file   string
		change string
		want   string
	}{
		{"torchrun.env", "WORLD_SIZE=", "torchrun: WORLD_SIZE is not set"},
		{"torchrun.env", "RANK=8", "rank 8 of 8"},
		{"torchrun.env", "WORLD_SIZE=1000000000000", "ranks: want at most 1048576"},
		{"torchrun.env", "RANK=-1", `RANK="-1": want a number`},
		{"torchrun.env", "LOCAL_RANK=4", "local rank 4 of 4"},
		{"torchrun.env", "LOCAL_WORLD_SIZE=9", "local rank 1 of 9 in a run of 8"},
		{"torchrun.env", "MASTER_ADDR=", "set MASTER_ADDR"},
		{"torchrun.env", "MASTER_PORT=70000", "port 70001"},
		{"trainer.env", "PET_NPROC_PER_NODE=4", "package launch"},
		{"srun.env", "SLURM_STEP_NODELIST=gpu[07-08", "brackets do not match"},
		{"srun.env", "SLURM_STEP_NUM_TASKS=ten", `SLURM_STEP_NUM_TASKS="ten": want a number`},
		{"srun.env", "SLURM_LOCALID=", "SLURM_LOCALID is not set"},
		{"srun.env", "SLURM_STEP_TASKS_PER_NODE=4(x", "want a number of tasks"},
		{"srun.env", "SLURM_NODEID=3", "SLURM_NODEID=3 with 3 nodes"},
		{"mpirun.env", "MASTER_ADDR=", "mpirun -x MASTER_ADDR"},
	} {
		_, err := FromEnvironment(with(variables(t, c.file), c.change))
		require.ErrorContains(t, err, c.want, "%s %s", c.file, c.change)
	}
}

func TestDevice(t *testing.T) {
	for _, c := range []struct{ local, visible, want int }{{0, 1, 0}, {3, 4, 3}, {3, 1, 0}} {
		got, err := Place{LocalRank: c.local}.Device(c.visible)
		require.NoError(t, err)
		require.Equal(t, c.want, got)
	}
	for _, visible := range []int{0, 2, 3} {
		_, err := Place{LocalRank: 3, LocalSize: 4}.Device(visible)
		require.ErrorContains(t, err, "one process per GPU")
	}
}

func TestSlurmHosts(t *testing.T) {
	for list, want := range map[string]string{
		"node":                          "node",
		"gpu[01-03,7],login":            "gpu01 gpu02 gpu03 gpu7 login",
		"r[1-2]n[0-1]-ib":               "r1n0-ib r1n1-ib r2n0-ib r2n1-ib",
		"a[098-101]":                    "a098 a099 a100 a101",
		"a-1,b-[2,4]":                   "a-1 b-2 b-4",
		"tux[0-1].cluster.example.com":  "tux0.cluster.example.com tux1.cluster.example.com",
		"gpu[7]":                        "gpu7",
		"x[9-10]y[1],z":                 "x9y1 x10y1 z",
		"cn[0000-0001],cn[0010-0011,8]": "cn0000 cn0001 cn0010 cn0011 cn8",
	} {
		got, err := slurmHosts(list)
		require.NoError(t, err, list)
		require.Equal(t, want, strings.Join(got, " "), list)
	}

	for _, list := range []string{"", ",", "a,", "a[", "a]", "a[1", "a[]",
		"a[x]", "a[2-1]", "a[1-]",
		"a[[1]]",
		"a[1-2-3]", "a[0-999999999]", "a[0-9999][0-9999]", "a[-1]", "a[0-4294967296]",
		"a[" + strings.Repeat("0", 21) + "-9]"} {
		hosts, err := slurmHosts(list)
		require.Error(t, err, "%s: %v", list, len(hosts))
	}
}

// FuzzSlurmHosts checks that any list is either rejected or expanded to names, without a panic or an
// endless loop.
func FuzzSlurmHosts(f *testing.F) {
	for _, list := range []string{"gpu[01-03,7],login", "r[1-2]n[0-1]-ib", "a[0-99999]b[0-99999]",
		"[[", "a[1]]"} {
		f.Add(list)
	}

	f.Fuzz(func(t *testing.T, list string) {
		hosts, err := slurmHosts(list)
		if err == nil {
			require.NotEmpty(t, hosts)
			require.LessOrEqual(t, len(hosts), maxSlurmHosts)
		}
		for _, h := range hosts {
			require.NotContains(t, h, "[")
		}
	})
}

// TestSlurmPorts checks that port windows lie below the ports that systems assign, and do not
// overlap.
func TestSlurmPorts(t *testing.T) {
	for job := range 2048 {
		p := Place{MasterPort: slurmPort(job, 3)}.ports()
		require.Len(t, p, PortWindow)
		require.GreaterOrEqual(t, p[0], 15000)
		require.Less(t, p[PortWindow-1], 32768)
		require.Zero(t, (p[0]-15000)%PortWindow)
	}
	require.Equal(t, 65535, Place{MasterPort: 65535}.ports()[PortWindow-1])
}
