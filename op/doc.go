// Package op adds the ops of a Llama-style language model and the Kasmina layer to Gorgonia.
//
// The package example builds a small language model and computes the gradients of its loss. A
// constructor takes nodes of a graph and returns the node of its result, which mixes with
// Gorgonia's own ops in the same graph. gorgonia.Grad differentiates through it, Gorgonia's tape
// machine runs it on the CPU in float32 or float64, and Gorgonia's LispMachine can differentiate it
// once. Activations are matrices [rows, features] whose rows are the positions of one sequence
// after another. Weights of linear layers are [out, in].
//
// Constructors return an error that names the op, the argument, the value given and the values
// accepted. Errors that depend on values, such as a token id outside the vocabulary, are returned
// by the run. errors.Is finds the errors they wrap, such as [ErrNonFinite], in the errors of
// cpuops.Machine and cudaops.Machine directly. Errors of Gorgonia's own machines must first pass
// through [RunError]:
//
//	err := op.RunError(machine.RunAll())
//
// Each op consists of a forward op and a backward op. A backward op with several results packs them
// into one vector, and the gradients are views of its parts. A forward op may keep intermediate
// values for its backward op, such as the normalizers of attention or the 1/rms of a norm. A graph
// must therefore not run on two machines at the same time.
package op
