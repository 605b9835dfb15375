// Package op adds the ops of a Llama-style language model and the Kasmina layer to Gorgonia.
//
// The package example builds a small language model and computes the gradients of its loss. Each op
// has a constructor, which takes nodes of a graph and returns the node of the result. The node can be
// combined freely with Gorgonia's own ops. gorgonia.Grad differentiates through it, Gorgonia's tape
// machine runs it on the CPU in float32 or float64, and Gorgonia's LispMachine can differentiate it
// once. Activations are matrices [rows, features], whose rows are the positions of all sequences in
// turn. Weights of linear layers are [out, in].
//
// Errors returned by constructors name the op, the argument, its value, and the accepted values.
// Errors that depend on data, such as a token id outside the vocabulary, are returned by the run. For
// cpuops.Machine and cudaops.Machine, errors.Is finds wrapped errors such as [ErrNonFinite] directly,
// but errors from Gorgonia's own machines must first pass through [RunError]:
//
//	err := op.RunError(machine.RunAll())
//
// Each op consists of a forward op and a backward op. A backward op with several results packs them
// into one vector, and the gradients are views of its parts. Because a forward op may keep
// intermediate values for its backward op, such as the normalizers of attention or the 1/rms of a
// norm, a graph must not run on two machines at the same time.
package op
