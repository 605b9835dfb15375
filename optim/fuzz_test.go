package optim_test

import (
	"errors"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/optim"
)

// FuzzSetState gives optimizers their own state with one tensor's name, shape or bytes altered.
// Either SetState rejects the state and changes nothing, or subsequent steps leave finite parameters
// or report an overflow.
func FuzzSetState(f *testing.F) {
	f.Add(uint8(0), "", int64(2), int64(1), []byte{0, 0, 128, 127})
	f.Add(uint8(1), "w.step", int64(1), int64(1), []byte{255, 255, 255, 255, 255, 255, 255, 127})
	f.Add(uint8(4), "norm.exp_avg", int64(-1), int64(-2), []byte{1})
	f.Add(uint8(7), "a.b.c", int64(1<<32), int64(1<<32), []byte(nil))
	f.Fuzz(func(t *testing.T, which uint8, name string, rows, cols int64, data []byte) {
		a, err := optim.NewAdamW()
		require.NoError(t, err)
		m, err := optim.NewMuon()
		require.NoError(t, err)
		for _, o := range []optim.Optimizer{a, m} {
			ps := small()
			require.NoError(t, o.Step(model(ps...)))
			before, altered := o.State(), o.State()
			x := &altered[int(which)%len(altered)]
			if name != "" {
				x.Name = name
			}
			if rows != 0 || cols != 0 {
				x.Shape = []int{int(rows), int(cols)}[:1+int(which>>7)]
			}
			overwrite(x.Data, data)
			bounded.Run(t, int64(len(data)), func() { err = o.SetState(altered) })
			if err != nil {
				require.True(t, equalStates(before, o.State()), "refused with %v", err)
				continue
			}
			for range 2 {
				if err = o.Step(model(ps...)); err != nil {
					require.True(t, errors.Is(err, optim.ErrOverflow), "%v", err)
					break
				}
				for _, p := range ps {
					require.True(t, finite(p.value.Data()), "%s is %v", p.name, p.value)
				}
			}
		}
	})
}

// overwrite sets the first bytes of a tensor's data.
func overwrite(data any, bytes []byte) {
	var memory []byte
	switch x := data.(type) {
	case []int64:
		memory = unsafe.Slice((*byte)(unsafe.Pointer(&x[0])), 8*len(x))
	case []float64:
		memory = unsafe.Slice((*byte)(unsafe.Pointer(&x[0])), 8*len(x))
	case []float32:
		memory = unsafe.Slice((*byte)(unsafe.Pointer(&x[0])), 4*len(x))
	}
	copy(memory, bytes)
}

func finite(data any) bool {
	all := true
	switch x := data.(type) {
	case []float64:
		for _, v := range x {
			all = all && v-v == 0
		}
	case []float32:
		for _, v := range x {
			all = all && v-v == 0
		}
	}

	return all
}
