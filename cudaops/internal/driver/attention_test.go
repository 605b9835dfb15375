package driver_test

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/internal/cpu"
)

// eachDnn is each where there is a cuDNN.
func eachDnn(t *testing.T, f func(t *testing.T, r *rig, d driver.Dnn)) {
	each(t, func(t *testing.T, r *rig) {
		d, err := r.Dnn()
		var missing *driver.NotFoundError
		if errors.As(err, &missing) {
			reason, _, _ := strings.Cut(err.Error(), "\n")
			t.Skip(reason)
		}
		ok(t, err)
		f(t, r, d)
	})
}

// attended is operands in device memory, q, k and v side by side, as are their gradients.
type attended struct {
	driver.AttentionSpec
	driver.AttentionArgs
	all []driver.Ptr
}

func (r *rig) attended(t *testing.T, s driver.AttentionSpec) *attended {
	queries, keys := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim
	s.Q = queries + 2*keys + 8
	s.K, s.V, s.DQ, s.DK, s.DV, s.Y, s.G = s.Q, s.Q, s.Q, s.Q, s.Q, queries, queries+8
	a := &attended{AttentionSpec: s}
	alloc := func(bytes int) driver.Ptr {
		a.all = append(a.all, r.alloc(t, bytes))
		ok(t, r.Memset8(a.all[len(a.all)-1], 0xff, bytes, 0)) // NaN
		return a.all[len(a.all)-1]
	}
	rows := s.Batch * s.Seq
	a.AttentionArgs.Q, a.AttentionArgs.DQ = alloc(2*rows*s.Q), alloc(2*rows*s.DQ)
	a.AttentionArgs.K, a.AttentionArgs.V = a.AttentionArgs.Q.Offset(2*queries), a.AttentionArgs.Q.Offset(2*(queries+keys))
	a.AttentionArgs.DK, a.AttentionArgs.DV = a.AttentionArgs.DQ.Offset(2*queries), a.AttentionArgs.DQ.Offset(2*(queries+keys))
	a.AttentionArgs.Y, a.AttentionArgs.G, a.LSE = alloc(2*rows*s.Y), alloc(2*rows*s.G), alloc(4*rows*s.Heads)
	return a
}

func (a *attended) free(t *testing.T, r *rig) {
	for _, p := range a.all {
		ok(t, r.Free(p))
	}
}

// columns reads or, given values, writes the first columns of rows.
func (r *rig) columns(t *testing.T, typ driver.DType, at driver.Ptr, rows, width, stride int, write []byte) []float64 {
	t.Helper()
	size := typ.Size()
	var got []float64
	for i := range rows {
		p := at.Offset(i * stride * size)
		if write != nil {
			ok(t, r.CopyToDevice(p, write[i*width*size:][:width*size], 0))
			continue
		}
		b := make([]byte, width*size)
		ok(t, r.CopyToHost(b, p, 0))
		ok(t, r.Synchronize())
		got = append(got, values(typ, b)...)
	}
	return got
}

func TestDnnAttention(t *testing.T) {
	eachDnn(t, func(t *testing.T, r *rig, d driver.Dnn) {
		t.Logf("%s, version %d", d.Library(), d.Version())
		if again, err := r.Dnn(); err != nil || again != d {
			t.Errorf("a second call: %v, %v", again, err)
		}
		for i, s := range []driver.AttentionSpec{
			{Batch: 2, Seq: 130, Heads: 4, KVHeads: 2, HeadDim: 64, Causal: true, Type: driver.BFloat16},
			{Batch: 1, Seq: 67, Heads: 3, KVHeads: 3, HeadDim: 96, Type: driver.Float16},
			{Batch: 2, Seq: 64, Heads: 2, KVHeads: 1, HeadDim: 128, Causal: true, Type: driver.Float16},
		} {
			if i > 0 && testing.Short() {
				break
			}
			s.Scale = 1.25 / math.Sqrt(float64(s.HeadDim))
			t.Run(fmt.Sprintf("%dx%d,%d-%dx%d,%v", s.Batch, s.Seq, s.Heads, s.KVHeads, s.HeadDim, s.Type), func(t *testing.T) {
				r.checkDnn(t, d, s)
			})
		}
	})
}

// checkDnn compares both passes, the backward one captured, with float64.
func (r *rig) checkDnn(t *testing.T, d driver.Dnn, s driver.AttentionSpec) {
	a := r.attended(t, s)
	defer a.free(t, r)
	s = a.AttentionSpec
	rows, queries, keys := s.Batch*s.Seq, s.Heads*s.HeadDim, s.KVHeads*s.HeadDim
	var in [4][]float64
	for i, o := range []struct {
		at            driver.Ptr
		width, stride int
	}{{a.AttentionArgs.Q, queries, s.Q}, {a.AttentionArgs.K, keys, s.K}, {a.AttentionArgs.V, keys, s.V}, {a.AttentionArgs.G, queries, s.G}} {
		m := r.matrix(s.Type, rows*o.width)
		in[i] = m.values
		r.columns(t, s.Type, o.at, rows, o.width, o.stride, m.bytes)
	}
	stream := must[driver.Stream](t)(r.NewStream())
	run := func(capture bool) {
		p := must[driver.AttentionPlan](t)(d.PlanAttention(s))
		x := a.AttentionArgs
		x.WorkspaceSize = p.Workspace()
		x.Workspace = r.alloc(t, max(p.Workspace(), 1))
		ok(t, r.Memset8(x.Workspace, 0xff, max(p.Workspace(), 1), stream))
		launches := r.Stats().Launches
		if capture {
			ok(t, r.BeginCapture(stream))
		}
		ok(t, p.Run(x, stream))
		if capture {
			g := must[*driver.Graph](t)(r.EndCapture(stream))
			for range 2 {
				ok(t, r.LaunchGraph(g, stream))
			}
			ok(t, r.SyncStream(stream))
			ok(t, r.DestroyGraph(g))
			launches++
		}
		ok(t, r.SyncStream(stream))
		if n := r.Stats().Launches - launches; n != 1 {
			t.Errorf("%d runs counted", n)
		}
		ok(t, r.Free(x.Workspace))
		ok(t, p.Close())
	}
	ok(t, r.Synchronize())
	run(false)
	s.Backward = true
	run(true)
	ok(t, r.DestroyStream(stream))

	shape := cpu.AttentionShape{Batch: s.Batch, Seq: s.Seq, Heads: s.Heads, KVHeads: s.KVHeads, HeadDim: s.HeadDim, Causal: s.Causal,
		Scale: s.Scale}
	y, lse := make([]float64, rows*queries), make([]float64, rows*s.Heads)
	dq, dk, dv := make([]float64, rows*queries), make([]float64, rows*keys), make([]float64, rows*keys)
	cpu.Attention(y, lse, in[0], in[1], in[2], shape)
	cpu.AttentionBackward(dq, dk, dv, in[3], in[0], in[1], in[2], y, lse, shape)
	for _, o := range []struct {
		name          string
		typ           driver.DType
		at            driver.Ptr
		width, stride int
		want          []float64
		tolerance     float64
	}{
		{"y", s.Type, a.AttentionArgs.Y, queries, s.Y, y, 1e-2}, {"lse", driver.Float32, a.LSE, s.Heads, s.Heads, lse, 1e-5},
		{"dq", s.Type, a.AttentionArgs.DQ, queries, s.DQ, dq, 2e-2}, {"dk", s.Type, a.AttentionArgs.DK, keys, s.DK, dk, 2e-2},
		{"dv", s.Type, a.AttentionArgs.DV, keys, s.DV, dv, 2e-2},
	} {
		got := r.columns(t, o.typ, o.at, rows, o.width, o.stride, nil)
		if e := relative(got, o.want); !(e <= o.tolerance) {
			t.Errorf("%s: off by %.3g, want at most %.3g", o.name, e, o.tolerance)
		}
	}
	// What lies between the rows stays.
	for _, gap := range r.columns(t, s.Type, a.AttentionArgs.DQ.Offset(2*(s.DQ-8)), rows, 8, s.DQ, nil) {
		if gap == gap {
			t.Error("a gap between rows was written to")
			break
		}
	}
}

func TestDnnRefuses(t *testing.T) {
	eachDnn(t, func(t *testing.T, r *rig, d driver.Dnn) {
		good := driver.AttentionSpec{Batch: 1, Seq: 64, Heads: 2, KVHeads: 1, HeadDim: 64, Scale: 0.125, Type: driver.BFloat16, Q: 256, K: 256,
			V: 256, Y: 128}
		for name, change := range map[string]func(a *driver.AttentionSpec){
			"a size":             func(a *driver.AttentionSpec) { a.Batch = 0 },
			"heads":              func(a *driver.AttentionSpec) { a.KVHeads = 3 },
			"the type":           func(a *driver.AttentionSpec) { a.Type = driver.Float32 },
			"a stride":           func(a *driver.AttentionSpec) { a.K = 63 },
			"a gradient's":       func(a *driver.AttentionSpec) { a.Backward, a.G, a.DQ, a.DK = true, 128, 128, 64 },
			"the head dimension": func(a *driver.AttentionSpec) { a.HeadDim = 20 },
		} {
			a := good
			change(&a)
			_, err := d.PlanAttention(a)
			var e *driver.Error
			if !errors.As(err, &e) {
				t.Errorf("%s: error %v", name, err)
				continue
			}
			if s, is := e.Code.(driver.DnnStatus); !is || name == "the head dimension" && !s.NotSupported() {
				t.Errorf("%s: %v", name, err)
			}
		}
		p := must[driver.AttentionPlan](t)(d.PlanAttention(good))
		at := r.alloc(t, 1<<16)
		x := driver.AttentionArgs{Q: at, K: at, V: at, Y: at, LSE: at, Workspace: at, WorkspaceSize: p.Workspace()}
		for name, change := range map[string]func(x *driver.AttentionArgs){
			"alignment":     func(x *driver.AttentionArgs) { x.K += 8 },
			"null":          func(x *driver.AttentionArgs) { x.LSE = 0 },
			"the workspace": func(x *driver.AttentionArgs) { x.WorkspaceSize-- },
			"its alignment": func(x *driver.AttentionArgs) { x.Workspace += 128 },
		} {
			y := x
			change(&y)
			if err := p.Run(y, 0); err == nil || !strings.Contains(err.Error(), "cudnnBackendExecute") {
				t.Errorf("%s: error %v", name, err)
			}
		}
		ok(t, p.Close())
		ok(t, r.Free(at))
	})
}

// TestDnnMissing wants an error that says what to install.
func TestDnnMissing(t *testing.T) {
	c := must[driver.Context](t)(fake.New(fake.Config{}).Retain(0))
	_, err := c.Dnn()
	var missing *driver.NotFoundError
	if !errors.As(err, &missing) {
		t.Errorf("error %v", err)
	}
	ok(t, c.Close())
}
