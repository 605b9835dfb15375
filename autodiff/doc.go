// Package autodiff provides tools for the derivatives of any Gorgonia graph, whatever its ops.
//
//   - [CheckGradients] compares the gradients that gorgonia.Grad derives with differences of the cost,
//     element by element. Start here when you write an op.
//   - [ClipGlobalNorm] scales all gradients of a step together, and [FirstNonFinite] finds the parameter
//     that contains a NaN.
//   - [Recompute] trades time for memory by keeping the intermediate results of a sub-graph only
//     while they are needed, and computing them again for the gradient.
package autodiff
