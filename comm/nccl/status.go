package nccl

import (
	"fmt"

	"github.com/kasmina-go/kasmina/comm"
)

// result is an ncclResult_t.
type result int32

const (
	success     result = 0
	remoteError result = 6
	inProgress  result = 7
)

// dataType is an ncclDataType_t.
type dataType int32

var dataTypes = map[comm.Type]dataType{comm.Uint8: 1, comm.Int32: 2, comm.Int64: 4, comm.Uint64: 5,
	comm.Float16: 6, comm.Float32: 7, comm.Float64: 8, comm.BFloat16: 9}

// redOp is an ncclRedOp_t.
type redOp int32

var redOps = map[comm.Op]redOp{comm.Sum: 0, comm.Max: 2, comm.Min: 3}

// check converts a result to an error, which wraps comm.ErrPeer if another rank is to blame.
func (a *api) check(call string, handle uintptr, r result) error {
	if r == success || r == inProgress {
		return nil
	}

	err := fmt.Errorf("nccl: %s: %s", call, a.ErrorString(r))
	if handle != 0 {
		if last := a.LastError(handle); last != "" {
			err = fmt.Errorf("%w: %s", err, last)
		}
	}

	if r == remoteError {
		err = fmt.Errorf("%w: %w", comm.ErrPeer, err)
	}

	return err
}
