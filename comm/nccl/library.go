package nccl

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"

	"github.com/ebitengine/purego"

	"github.com/kasmina-go/kasmina/internal/sharedlib"
)

// Variable is the name of the environment variable that holds the path of NCCL's library or its
// directory. If it is set, no other location is searched.
const Variable = "KASMINA_LIBNCCL"

// uniqueID identifies a communicator. C passes it by value.
type uniqueID struct{ Bytes [16]uint64 }

// config is ncclConfig_t as of NCCL 2.18, the first version with this layout. The library infers
// the existing fields from size and version.
type config struct {
	Size                                 uint64
	Magic, Version                       uint32
	Blocking, Clusters, MinCTAs, MaxCTAs int32
	NetName                              uintptr
	SplitShare                           int32
	_                                    int32
}

const (
	configSize    = 48
	configMagic   = 0xcafebeef
	configVersion = 2*10000 + 18*100
	undefined     = math.MinInt32
)

// api holds the functions used from NCCL. Tags are the names of the symbols.
type api struct {
	GetVersion     func(version *int32) result                                                        `c:"ncclGetVersion"`
	GetUniqueID    func(id *uniqueID) result                                                          `c:"ncclGetUniqueId"`
	CommInit       func(comm *uintptr, ranks int32, id uniqueID, rank int32, c *config) result        `c:"ncclCommInitRankConfig"`
	CommDestroy    func(comm uintptr) result                                                          `c:"ncclCommDestroy"`
	CommAbort      func(comm uintptr) result                                                          `c:"ncclCommAbort"`
	CommAsyncError func(comm uintptr, r *result) result                                               `c:"ncclCommGetAsyncError"`
	LastError      func(comm uintptr) string                                                          `c:"ncclGetLastError"`
	ErrorString    func(r result) string                                                              `c:"ncclGetErrorString"`
	MemAlloc       func(p *uintptr, bytes uintptr) result                                             `c:"ncclMemAlloc"`
	MemFree        func(p uintptr) result                                                             `c:"ncclMemFree"`
	CommRegister   func(comm, p, bytes uintptr, handle *uintptr) result                               `c:"ncclCommRegister"`
	CommDeregister func(comm, handle uintptr) result                                                  `c:"ncclCommDeregister"`
	GroupStart     func() result                                                                      `c:"ncclGroupStart"`
	GroupEnd       func() result                                                                      `c:"ncclGroupEnd"`
	AllReduce      func(src, dst, count uintptr, t dataType, op redOp, comm, stream uintptr) result   `c:"ncclAllReduce"`
	ReduceScatter  func(src, dst, count uintptr, t dataType, op redOp, comm, stream uintptr) result   `c:"ncclReduceScatter"`
	AllGather      func(src, dst, count uintptr, t dataType, comm, stream uintptr) result             `c:"ncclAllGather"`
	Broadcast      func(src, dst, count uintptr, t dataType, root int32, comm, stream uintptr) result `c:"ncclBroadcast"`
	Send           func(src, count uintptr, t dataType, peer int32, comm, stream uintptr) result      `c:"ncclSend"`
	Recv           func(dst, count uintptr, t dataType, peer int32, comm, stream uintptr) result      `c:"ncclRecv"`
}

// loaded is the library, once it has been found.
var loaded struct {
	sync.Mutex
	api  *api
	path string
}

// load finds and loads NCCL once.
func load() (*api, error) {
	loaded.Lock()
	defer loaded.Unlock()

	if loaded.api != nil {
		return loaded.api, nil
	}

	a, tried := sharedlib.Load(sharedlib.Host(), places(sharedlib.Host()), 0, open)
	if a == nil {
		return nil, &sharedlib.NotFoundError{Library: "NVIDIA's library for several GPUs (libnccl)", Tried: tried,
			Help: "Install it in one of these ways: pip install nvidia-nccl-cu13, or nvidia-nccl-cu12 for a driver of CUDA 12 " +
				"(in the Python environment that is active), the system's package libnccl2, or the folder that holds it in " +
				"LD_LIBRARY_PATH or in " + Variable + "."}
	}

	loaded.api = a
	return a, nil
}

// places returns the possible locations of NCCL, which exists only for Linux.
func places(f sharedlib.Finder) []sharedlib.Place {
	if f.GOOS != "linux" {
		return nil
	}
	return f.Toolkit(Variable, "libnccl.so.2", "nccl", "libnccl.so.2")
}

// oldest is the first version that provides all functions used here.
const oldest = 2*10000 + 19*100

// open loads the library at path and checks its version.
func open(path string) (*api, error) {
	library, err := sharedlib.Open(path)
	if err != nil {
		return nil, errors.New(strings.TrimPrefix(err.Error(), path+": "))
	}

	a, err := bind(library)
	if err != nil {
		return nil, err
	}

	var version int32
	if r := a.GetVersion(&version); r != success {
		return nil, fmt.Errorf("ncclGetVersion: %s", a.ErrorString(r))
	}

	if version < oldest {
		return nil, fmt.Errorf("it is NCCL %s, want %s or later", versionString(version), versionString(oldest))
	}

	return a, nil
}

// versionString formats a version number of NCCL.
func versionString(v int32) string { return fmt.Sprintf("%d.%d.%d", v/10000, v/100%100, v%100) }

// Version returns the version of the library.
func Version() (string, error) {
	a, err := load()
	if err != nil {
		return "", err
	}
	var version int32
	a.GetVersion(&version)
	return versionString(version), nil
}

// bind looks up the functions.
func bind(library uintptr) (*api, error) {
	a := &api{}
	for symbol, f := range sharedlib.Functions(a) {
		address, err := sharedlib.Lookup(library, symbol)
		if err != nil {
			return nil, fmt.Errorf("it has no %s: it is too old", symbol)
		}
		purego.RegisterFunc(f, address)
	}
	return a, nil
}
