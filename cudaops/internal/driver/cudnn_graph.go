package driver

import (
	"errors"
	"fmt"
	"unsafe"
)

// descriptor is a cudnnBackendDescriptor_t.
type descriptor uintptr

// Numbers of cudnn_graph.h.
type (
	dnnKind      uintptr // cudnnBackendDescriptorType_t
	dnnAttribute uintptr // cudnnBackendAttributeName_t
	dnnType      uintptr // cudnnBackendAttributeType_t
	dnnData      int32   // cudnnDataType_t
	dnnPointwise int32   // cudnnPointwiseMode_t
	dnnReduction int32   // cudnnReduceTensorOp_t
)

const (
	dnnPointwiseKind      dnnKind = 0
	dnnEngine             dnnKind = 2
	dnnEngineConfig       dnnKind = 3
	dnnHeuristics         dnnKind = 4
	dnnExecutionPlan      dnnKind = 5
	dnnOperationPointwise dnnKind = 13
	dnnOperationGraph     dnnKind = 15
	dnnVariantPack        dnnKind = 16
	dnnTensorKind         dnnKind = 17
	dnnMatmulKind         dnnKind = 18
	dnnOperationMatmul    dnnKind = 19
	dnnReductionKind      dnnKind = 21
	dnnOperationReduction dnnKind = 22

	pointwiseMode, pointwisePrecision, pointwiseAxis                                  dnnAttribute = 0, 1, 9
	heuristicsMode, heuristicsGraph, heuristicsResults, heuristicsDevice              dnnAttribute = 200, 201, 202, 204
	configEngine                                                                      dnnAttribute = 300
	planConfig, planWorkspace                                                         dnnAttribute = 401, 402
	operationPointwise, operationPointwiseX, operationPointwiseB, operationPointwiseY dnnAttribute = 750, 751, 752, 753
	operationPointwiseT                                                               dnnAttribute = 758
	graphHandle, graphOperations                                                      dnnAttribute = 800, 801
	tensorAlignment, tensorDataType, tensorDimensions, tensorStrides                  dnnAttribute = 900, 901, 902, 903
	tensorID, tensorVirtual, tensorByValue                                            dnnAttribute = 906, 907, 908
	packIDs, packPointers, packWorkspace                                              dnnAttribute = 1000, 1001, 1003
	engineNotes                                                                       dnnAttribute = 1303
	matmulPrecision                                                                   dnnAttribute = 1500
	operationMatmulA, operationMatmulB, operationMatmulC, operationMatmul             dnnAttribute = 1520, 1521, 1522, 1523
	reductionOperator, reductionPrecision                                             dnnAttribute = 1600, 1601
	operationReductionX, operationReductionY, operationReduction                      dnnAttribute = 1610, 1611, 1612

	ofHandle     dnnType = 0
	ofData       dnnType = 1
	ofBoolean    dnnType = 2
	ofInt64      dnnType = 3
	ofPointer    dnnType = 6
	ofHeuristic  dnnType = 8
	ofNote       dnnType = 11
	ofPointwise  dnnType = 14
	ofDescriptor dnnType = 15
	ofReduction  dnnType = 18

	dnnFloat32  dnnData = 0
	dnnFloat16  dnnData = 2
	dnnInt32    dnnData = 4
	dnnBFloat16 dnnData = 9
	dnnBoolean  dnnData = 11

	dnnMul          dnnPointwise = 1
	dnnAdd          dnnPointwise = 0
	dnnDiv          dnnPointwise = 6
	dnnSub          dnnPointwise = 9
	dnnExp          dnnPointwise = 13
	dnnLog          dnnPointwise = 15
	dnnGreaterEqual dnnPointwise = 303
	dnnIndex        dnnPointwise = 501
	dnnSelect       dnnPointwise = 601

	dnnSum dnnReduction = 0
	dnnMax dnnReduction = 3
)

var dnnTypes = map[DType]dnnData{Float32: dnnFloat32, Float16: dnnFloat16, BFloat16: dnnBFloat16}

// shape4 is the four dimensions of a tensor, [batch, heads, rows, columns], or its strides in elements.
type shape4 [4]int64

// dense is the strides of a tensor without gaps.
func (s shape4) dense() shape4 { return shape4{s[1] * s[2] * s[3], s[2] * s[3], s[3], 1} }

// dnnTensor is a tensor of a graph.
type dnnTensor struct {
	desc descriptor
	dims shape4
}

// dnnStorage is where a tensor is.
type dnnStorage uint8

const (
	inMemory dnnStorage = iota // of the device, aligned to 16 bytes
	nowhere                    // between two operations only; cuDNN calls that virtual
	byValue                    // one number, on the host
)

// dnnGraph builds a graph of operations. After the first error, which stays in err, calls do nothing.
type dnnGraph struct {
	d          *cudnn
	made       []descriptor
	operations []descriptor
	ids        int64 // the number of the newest tensor
	err        error
}

// close destroys all descriptors.
func (g *dnnGraph) close() error {
	var errs []error
	for i := len(g.made) - 1; i >= 0; i-- {
		errs = append(errs, g.d.call(&g.d.DestroyDescriptor, uintptr(g.made[i])))
	}
	g.made = nil
	return errors.Join(errs...)
}

// make creates a descriptor.
func (g *dnnGraph) make(kind dnnKind) descriptor {
	var made descriptor
	if g.err == nil {
		if g.err = g.d.call(&g.d.CreateDescriptor, uintptr(kind), uintptr(unsafe.Pointer(&made))); g.err == nil {
			g.made = append(g.made, made)
		}
	}
	return made
}

// dnnSet sets an attribute of a descriptor.
func dnnSet[T any](g *dnnGraph, of descriptor, a dnnAttribute, t dnnType, values ...T) {
	if g.err != nil {
		return
	}
	err := g.d.call(&g.d.SetAttribute, uintptr(of), uintptr(a), uintptr(t), uintptr(len(values)),
		uintptr(unsafe.Pointer(unsafe.SliceData(values))))
	if err != nil {
		g.err = fmt.Errorf("attribute %d: %w", a, err)
	}
}

// dnnGet reads an attribute of a descriptor into values and returns those that there are.
func dnnGet[T any](g *dnnGraph, of descriptor, a dnnAttribute, t dnnType, values []T) []T {
	if g.err != nil {
		return nil
	}
	var n int64
	err := g.d.call(&g.d.GetAttribute, uintptr(of), uintptr(a), uintptr(t), uintptr(len(values)),
		uintptr(unsafe.Pointer(&n)), uintptr(unsafe.Pointer(unsafe.SliceData(values))))
	if err != nil {
		g.err = fmt.Errorf("attribute %d: %w", a, err)
		return nil
	}
	return values[:min(int(n), len(values))]
}

// finalize ends the description of x.
func (g *dnnGraph) finalize(x descriptor) descriptor {
	if g.err == nil {
		g.err = g.d.call(&g.d.Finalize, uintptr(x))
	}
	return x
}

// tensor describes a tensor and gives it the next number.
func (g *dnnGraph) tensor(t dnnData, dims, strides shape4, in dnnStorage) dnnTensor {
	x := g.make(dnnTensorKind)
	g.ids++
	dnnSet(g, x, tensorDataType, ofData, t)
	dnnSet(g, x, tensorDimensions, ofInt64, dims[:]...)
	dnnSet(g, x, tensorStrides, ofInt64, strides[:]...)
	dnnSet(g, x, tensorID, ofInt64, g.ids)
	dnnSet[int64](g, x, tensorAlignment, ofInt64, 16)
	dnnSet(g, x, tensorVirtual, ofBoolean, in == nowhere)
	dnnSet(g, x, tensorByValue, ofBoolean, in == byValue)
	return dnnTensor{g.finalize(x), dims}
}

// between describes a tensor that is never stored.
func (g *dnnGraph) between(t dnnData, dims shape4) dnnTensor {
	return g.tensor(t, dims, dims.dense(), nowhere)
}

// operation adds an operation, given what it computes and its tensors by their attributes. It leaves out the zero dnnTensor.
func (g *dnnGraph) operation(kind dnnKind, how dnnAttribute, what descriptor, tensors ...dnnOn) {
	o := g.make(kind)
	dnnSet(g, o, how, ofDescriptor, what)
	for _, t := range tensors {
		if t.tensor.desc != 0 {
			dnnSet(g, o, t.as, ofDescriptor, t.tensor.desc)
		}
	}
	g.operations = append(g.operations, g.finalize(o))
}

// dnnOn is a tensor of an operation.
type dnnOn struct {
	as     dnnAttribute
	tensor dnnTensor
}

// element describes an operation on single elements, with those of several tensors at once.
func (g *dnnGraph) element(mode dnnPointwise, precision dnnData) descriptor {
	p := g.make(dnnPointwiseKind)
	dnnSet(g, p, pointwiseMode, ofPointwise, mode)
	dnnSet(g, p, pointwisePrecision, ofData, precision)
	return p
}

// pointwise adds y = mode(x, b), or x where t holds and b elsewhere. The zero dnnTensor is for what a mode does not take.
func (g *dnnGraph) pointwise(mode dnnPointwise, precision dnnData, y, x, b, t dnnTensor) {
	g.operation(dnnOperationPointwise, operationPointwise, g.finalize(g.element(mode, precision)),
		dnnOn{operationPointwiseX, x}, dnnOn{operationPointwiseY, y}, dnnOn{operationPointwiseB, b}, dnnOn{operationPointwiseT, t})
}

// index adds y = the position along an axis, of every element of x.
func (g *dnnGraph) index(y, x dnnTensor, axis int64) {
	p := g.element(dnnIndex, dnnFloat32)
	dnnSet(g, p, pointwiseAxis, ofInt64, axis)
	g.operation(dnnOperationPointwise, operationPointwise, g.finalize(p), dnnOn{operationPointwiseX, x}, dnnOn{operationPointwiseY, y})
}

// binary is mode(x, b) in float32, of the shape of x.
func (g *dnnGraph) binary(mode dnnPointwise, x, b dnnTensor) dnnTensor {
	y := g.between(dnnFloat32, x.dims)
	g.pointwise(mode, dnnFloat32, y, x, b, dnnTensor{})
	return y
}

// unary is mode(x) in float32.
func (g *dnnGraph) unary(mode dnnPointwise, x dnnTensor) dnnTensor {
	return g.binary(mode, x, dnnTensor{})
}

// matmul adds c = a·b for the matrices of every batch and head. Where b has fewer heads, several of a share one.
func (g *dnnGraph) matmul(c, a, b dnnTensor) {
	m := g.make(dnnMatmulKind)
	dnnSet(g, m, matmulPrecision, ofData, dnnFloat32)
	g.operation(dnnOperationMatmul, operationMatmul, g.finalize(m), dnnOn{operationMatmulA, a}, dnnOn{operationMatmulB, b},
		dnnOn{operationMatmulC, c})
}

// reduce adds y = x reduced along the dimensions in which y is shorter.
func (g *dnnGraph) reduce(mode dnnReduction, y, x dnnTensor) {
	r := g.make(dnnReductionKind)
	dnnSet(g, r, reductionOperator, ofReduction, mode)
	dnnSet(g, r, reductionPrecision, ofData, dnnFloat32)
	g.operation(dnnOperationReduction, operationReduction, g.finalize(r), dnnOn{operationReductionX, x}, dnnOn{operationReductionY, y})
}
