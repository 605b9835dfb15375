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

// checkDnn compares a run, and a captured one, with float64. q, k and v lie side by side.
func (r *rig) checkDnn(t *testing.T, d driver.Dnn, s driver.AttentionSpec) {
	rows, queries, keys := s.Batch*s.Seq, s.Heads*s.HeadDim, s.KVHeads*s.HeadDim
	s.Q, s.Y = queries+2*keys+8, queries+8
	s.K, s.V = s.Q, s.Q
	p := must[driver.AttentionPlan](t)(d.PlanAttention(s))
	sizes := []int{2 * rows * s.Q, 2 * rows * s.Y, 4 * rows * s.Heads, max(p.Workspace(), 1)}
	var at []driver.Ptr
	for _, bytes := range sizes {
		at = append(at, r.alloc(t, bytes))
	}
	x := driver.AttentionArgs{Q: at[0], K: at[0].Offset(2 * queries), V: at[0].Offset(2 * (queries + keys)), Y: at[1], LSE: at[2],
		Workspace: at[3], WorkspaceSize: p.Workspace()}
	ok(t, r.Memset8(at[0], 0xff, sizes[0], 0))
	var in [3][]float64
	for i, at := range []driver.Ptr{x.Q, x.K, x.V} {
		width := keys
		if i == 0 {
			width = queries
		}
		m := r.matrix(s.Type, rows*width)
		in[i] = m.values
		r.columns(t, s.Type, at, rows, width, s.Q, m.bytes)
	}
	y, lse := make([]float64, rows*queries), make([]float64, rows*s.Heads)
	cpu.Attention(y, lse, in[0], in[1], in[2], cpu.AttentionShape{Batch: s.Batch, Seq: s.Seq, Heads: s.Heads, KVHeads: s.KVHeads,
		HeadDim: s.HeadDim, Causal: s.Causal, Scale: s.Scale})
	stream := must[driver.Stream](t)(r.NewStream())
	ok(t, r.Synchronize())
	for _, capture := range []bool{false, true} {
		for i := 1; i < len(at); i++ {
			ok(t, r.Memset8(at[i], 0xff, sizes[i], stream)) // NaN
		}
		launches := r.Stats().Launches
		run := func() error { return p.Run(x, stream) }
		var g *driver.Graph
		if capture {
			ok(t, r.BeginCapture(stream))
			ok(t, run())
			g = must[*driver.Graph](t)(r.EndCapture(stream))
			run = func() error { return r.LaunchGraph(g, stream) }
		}
		ok(t, run())
		ok(t, r.SyncStream(stream))
		if capture {
			ok(t, r.DestroyGraph(g))
		}
		if n := r.Stats().Launches - launches; n != 1 {
			t.Errorf("captured %v: %d runs counted", capture, n)
		}
		if e := relative(r.columns(t, s.Type, x.Y, rows, queries, s.Y, nil), y); !(e <= 1e-2) {
			t.Errorf("captured %v: y is off by %.3g", capture, e)
		}
		if e := relative(r.columns(t, driver.Float32, x.LSE, rows, s.Heads, s.Heads, nil), lse); !(e <= 1e-5) {
			t.Errorf("captured %v: lse is off by %.3g", capture, e)
		}
		for _, gap := range r.columns(t, s.Type, x.Y.Offset(2*queries), rows, 8, s.Y, nil) {
			if gap == gap {
				t.Errorf("captured %v: a gap between rows was written to", capture)
				break
			}
		}
	}
	ok(t, p.Close())
	ok(t, r.DestroyStream(stream))
	for _, p := range at {
		ok(t, r.Free(p))
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
