// Package autodiff is about the derivatives of any Gorgonia graph, whatever ops it is made of.
//
//   - [CheckGradients] compares what gorgonia.Grad derives with differences of the cost, element by
//     element.
//   - [ClipGlobalNorm] scales all gradients of a step together, and [FirstNonFinite] says where a
//     NaN came from.
//   - [Recompute] trades time for memory: it keeps a sub-graph's intermediate results only while
//     they are needed, and computes them again for the gradient.
package autodiff
