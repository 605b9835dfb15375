package driver

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"unsafe"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/sharedlib"
)

// blasAPI contains the functions used from libcublasLt. The tags are the names of the symbols.
type blasAPI struct {
	Create              proc `c:"cublasLtCreate"`
	Destroy             proc `c:"cublasLtDestroy"`
	GetVersion          proc `c:"cublasLtGetVersion"`
	DescCreate          proc `c:"cublasLtMatmulDescCreate"`
	DescDestroy         proc `c:"cublasLtMatmulDescDestroy"`
	DescSetAttribute    proc `c:"cublasLtMatmulDescSetAttribute"`
	LayoutCreate        proc `c:"cublasLtMatrixLayoutCreate"`
	LayoutDestroy       proc `c:"cublasLtMatrixLayoutDestroy"`
	LayoutSetAttribute  proc `c:"cublasLtMatrixLayoutSetAttribute"`
	PreferenceCreate    proc `c:"cublasLtMatmulPreferenceCreate"`
	PreferenceDestroy   proc `c:"cublasLtMatmulPreferenceDestroy"`
	PreferenceAttribute proc `c:"cublasLtMatmulPreferenceSetAttribute"`
	AlgoGetHeuristic    proc `c:"cublasLtMatmulAlgoGetHeuristic"`
	Matmul              proc `c:"cublasLtMatmul"`
}

// cublasLt is NVIDIA's cuBLASLt for one context.
type cublasLt struct {
	blasAPI
	ctx    *context
	handle uintptr
}

func (c *context) Blas() (gpu.Blas, error) {
	c.blasLock.Lock()
	defer c.blasLock.Unlock()
	if c.blas != nil {
		return c.blas, nil
	}

	f := sharedlib.Host()
	b, tried := sharedlib.Load(f, blasPlaces(f), c.version/1000,
		func(path string) (*cublasLt, error) {
			b := &cublasLt{ctx: c}
			if err := bind(path, &b.blasAPI); err != nil {
				return nil, err
			}
			return b, b.call(&b.Create, uintptr(unsafe.Pointer(&b.handle)))
		})

	if b == nil {
		return nil, &gpu.NotFoundError{Library: "NVIDIA's matrix library (libcublasLt)",
			Tried: tried,
			Help: "Any one of these brings it: pip install nvidia-cublas (in the Python " +
				"environment that is active), a CUDA toolkit, or the folder that holds it in " +
				"LD_LIBRARY_PATH or in " + blasVariable + "."}
	}

	c.blas = b
	return b, nil
}

// call calls a library function with the context current. See [proc.call] for the directive.
//
//go:uintptrescapes
func (b *cublasLt) call(p *proc, args ...uintptr) error {
	return b.ctx.Do(func() error {
		s := gpu.BlasStatus(int32(p.call(args...)))
		if s == 0 {
			return nil
		}
		return gpu.NewError(p.name, s, "", "")
	})
}

func (b *cublasLt) Version() int { return int(b.GetVersion.call()) }
func (b *cublasLt) close() error { return b.call(&b.Destroy, b.handle) }

// blasPlan holds cuBLASLt's descriptors for a product. cuBLASLt uses column-major order, where a
// row-major matrix is its transpose. So D = op(A) op(B) becomes Dᵀ = op(B)ᵀ op(A)ᵀ, where the first
// operand is our B and the second our A.
//
// The descriptors take a few hundred bytes of host memory, and are freed when the plan is garbage
// collected.
type blasPlan struct {
	b     *cublasLt
	spec  gpu.MatmulSpec
	work  gpu.Work
	algos []gpu.Algo

	mu                        sync.Mutex // guards desc's pointers and the scalars
	desc                      uintptr
	layoutA, layoutB, layoutD uintptr
	scales                    [2]gpu.Ptr // pointers stored in desc; null if unknown
	alpha, beta               float32
}

// heuristicResult is cublasLtMatmulHeuristicResult_t.
type heuristicResult struct {
	algo      [8]uint64
	workspace uint64
	state     gpu.BlasStatus
	_         float32 // waves
	_         [4]int32
}

// blasTypes holds values of cudaDataType_t.
var blasTypes = [...]uintptr{gpu.Float32: 0, gpu.Float16: 2, gpu.BFloat16: 14, gpu.Float8E4M3: 28}

// Attributes of cuBLASLt's descriptors.
const (
	descTransA, descTransB                              = 3, 4
	descScalePointerA, descScalePointerB, descFastAccum = 17, 18, 25
	descScaleModeA, descScaleModeB                      = 31, 32
	layoutBatchCount, layoutBatchStride                 = 5, 6
	prefWorkspace, prefReduction, prefAlignA            = 1, 3, 5 // 6 to 8 are the alignments of B, C and D
)

func (b *cublasLt) Plan(m gpu.MatmulSpec, workspace, want int) (gpu.MatmulPlan, error) {
	m, err := m.Normal()
	if err != nil {
		return nil, err
	}

	p := &blasPlan{b: b, spec: m, work: m.Work()}
	if err = p.describe(); err == nil {
		err = p.search(workspace, want)
	}
	if err != nil {
		return nil, fmt.Errorf("matmul %+v: %w", m, err)
	}

	return p, nil
}

// describe creates the descriptors of the operation and of the matrices.
func (p *blasPlan) describe() error {
	const compute32F, real32F = 68, 0
	const outerVector = 3 // one scale per row or column, instead of one per tensor
	b, m := p.b, p.spec
	if err := b.call(&b.DescCreate, uintptr(unsafe.Pointer(&p.desc)), compute32F,
		real32F); err != nil {
		return err
	}

	p.owns(p.desc, &b.DescDestroy)
	attributes := []attribute{{descTransA, bit(m.TransB), 4}, {descTransB, bit(m.TransA), 4},
		{descFastAccum, bit(m.Scaled()), 1}}
	if m.Scaled() {
		attributes = append(attributes, attribute{descScaleModeA, outerVector, 4},
			attribute{descScaleModeB, outerVector, 4})
	}

	if err := b.set(&b.DescSetAttribute, p.desc, attributes...); err != nil {
		return err
	}

	if m.Scaled() {
		// The heuristic requires pointers, but reads only their alignment.
		if err := p.pointScales(256, 256); err != nil {
			return err
		}
	}

	if err := p.layout(&p.layoutA, m.A, m.M, m.K, m.TransA); err != nil {
		return err
	}
	if err := p.layout(&p.layoutB, m.B, m.K, m.N, m.TransB); err != nil {
		return err
	}
	return p.layout(&p.layoutD, m.D, m.M, m.N, false)
}

// owns makes a descriptor's lifetime end with the plan's.
func (p *blasPlan) owns(descriptor uintptr, destroy *proc) {
	runtime.AddCleanup(p, func(d uintptr) { destroy.call(d) }, descriptor)
}

// attribute is a descriptor attribute with an integer value.
type attribute struct {
	id    uintptr
	value uint64
	bytes uintptr
}

// set sets attributes of a descriptor. cuBLASLt reads only the first a.bytes bytes of a value. They are
// the low bytes, because all platforms with CUDA are little-endian.
func (b *cublasLt) set(p *proc, descriptor uintptr, attributes ...attribute) error {
	for _, a := range attributes {
		if err := b.call(p, descriptor, a.id, uintptr(unsafe.Pointer(&a.value)),
			a.bytes); err != nil {
			return err
		}
	}
	return nil
}

func bit(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

// pointScales sets the scales of our A and B, known to cuBLASLt as B and A.
func (p *blasPlan) pointScales(a, b gpu.Ptr) error {
	scales := [2]gpu.Ptr{a, b}
	if scales == p.scales {
		return nil
	}

	p.scales = [2]gpu.Ptr{} // if the second pointer can't be set, the state is unknown
	err := p.b.set(&p.b.DescSetAttribute, p.desc, attribute{descScalePointerB, uint64(a), 8},
		attribute{descScalePointerA, uint64(b), 8})
	if err == nil {
		p.scales = scales
	}

	return err
}

// layout describes a row-major matrix, possibly stored transposed, as the equivalent column-major matrix,
// its transpose.
func (p *blasPlan) layout(to *uintptr, t gpu.DType, rows, cols int, transposed bool) error {
	if transposed {
		rows, cols = cols, rows
	}

	// In column-major order, the matrix has cols rows, rows columns and the leading dimension cols.
	b := p.b
	if err := b.call(&b.LayoutCreate, uintptr(unsafe.Pointer(to)), blasTypes[t],
		uintptr(cols), uintptr(rows), uintptr(cols)); err != nil {
		return err
	}

	p.owns(*to, &b.LayoutDestroy)
	if p.spec.Batch == 1 {
		return nil
	}

	return b.set(&b.LayoutSetAttribute, *to, attribute{layoutBatchCount, uint64(p.spec.Batch), 4},
		attribute{layoutBatchStride, uint64(rows * cols), 8})
}

// search queries the heuristic for variants of the product.
func (p *blasPlan) search(workspace, want int) error {
	b := p.b
	var pref uintptr
	if err := b.call(&b.PreferenceCreate, uintptr(unsafe.Pointer(&pref))); err != nil {
		return err
	}
	defer b.call(&b.PreferenceDestroy, pref)

	attributes := []attribute{{prefWorkspace, uint64(workspace), 8}}
	for i := range uintptr(4) { // A, B, C and D
		attributes = append(attributes, attribute{prefAlignA + i, uint64(p.spec.Align), 4})
	}

	// Partial sums must be combined in float32, before rounding to D's type.
	if p.spec.D.Size() < gpu.Float32.Size() {
		const computeType = 2 // CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
		attributes = append(attributes, attribute{prefReduction, computeType, 4})
	}

	if err := b.set(&b.PreferenceAttribute, pref, attributes...); err != nil {
		return err
	}

	found := make([]heuristicResult, max(want, 1))
	var n int32
	if err := b.call(&b.AlgoGetHeuristic, b.handle, p.desc,
		p.layoutB, p.layoutA, p.layoutD, p.layoutD, // cuBLASLt's A, B, C and D
		pref, uintptr(len(found)), uintptr(unsafe.Pointer(&found[0])),
		uintptr(unsafe.Pointer(&n))); err != nil {
		return err
	}

	for _, r := range found[:n] {
		if r.state == 0 {
			p.algos = append(p.algos, gpu.Algo{Workspace: int(r.workspace), ID: r.algo})
		}
	}

	if len(p.algos) == 0 {
		return gpu.NewError(b.AlgoGetHeuristic.name, gpu.BlasNotSupported, "",
			"cuBLASLt has no algorithm for this product")
	}

	return nil
}

func (p *blasPlan) Algos() []gpu.Algo { return slices.Clone(p.algos) }

func (p *blasPlan) Run(algo int, a gpu.MatmulArgs, s gpu.Stream) error {
	b := p.b
	if err := p.spec.Ready(b.ctx, p.algos, algo, &a, s); err != nil {
		return err
	}

	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.pointScales(a.ScaleA, a.ScaleB); err != nil {
		return err
	}

	// D = alpha · op(A) op(B) + beta · C, with our B passed as cuBLASLt's A and our A as its B.
	p.alpha, p.beta = a.Alpha, a.Beta
	err := b.ctx.Watch(s, p.work, func() error {
		return b.call(&b.Matmul, b.handle, p.desc,
			uintptr(unsafe.Pointer(&p.alpha)), uintptr(a.B), p.layoutB, uintptr(a.A), p.layoutA,
			uintptr(unsafe.Pointer(&p.beta)), uintptr(a.C), p.layoutD, uintptr(a.D), p.layoutD,
			uintptr(unsafe.Pointer(&p.algos[algo].ID)), uintptr(a.Workspace),
			uintptr(a.WorkspaceSize), uintptr(s))
	})
	if err != nil {
		return fmt.Errorf("matmul %+v: %w", p.spec, err)
	}

	return nil
}

// blasPlaces lists the possible locations of cuBLASLt, for the major versions of CUDA with the functions
// used here.
func blasPlaces(f sharedlib.Finder) []sharedlib.Place {
	name := "libcublasLt.so.%s"
	if f.GOOS == "windows" {
		name = "cublasLt64_%s.dll"
	}
	library := func(major string) sharedlib.Place { return sharedlib.Place(fmt.Sprintf(name, major)) }
	anyVersion := string(library("1[0-9]")) // a pattern for files in folders
	return f.Toolkit(blasVariable, anyVersion, "cu*", library("13"), library("12"))
}
