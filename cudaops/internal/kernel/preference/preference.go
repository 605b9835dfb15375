// Package preference contains the kernels that compute the loss of preference pairs and its gradient.
package preference

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/internal/cpu/preference"
)

// FigureCount is the number of figures of a batch: its pairs, the pairs whose chosen answer has the higher reward, and
// the sums of the rewards of the chosen and of the rejected answers.
const FigureCount = 4

// The threads of the block that computes the loss, and of a block that computes the gradient.
const lossThreads, gradientThreads = 1024, 256

// Forward computes the mean loss of the pairs in a batch of Rows rows. LogProbs and Reference [Rows] are float32.
// Answers, int64, is 2·i for the rows of the chosen answer of pair i, 2·i+1 for those of the rejected one, and negative
// for all other rows.
//
// Loss receives the loss, Figures the FigureCount figures, and Gradients [2·Rows] the derivatives of a pair's loss with
// respect to the log-probabilities of the answers. Elements of Gradients for answers without rows do not
// change.
type Forward struct {
	Loss, Figures, Gradients     gpu.Ptr
	LogProbs, Reference, Answers gpu.Ptr
	Workspace                    gpu.Ptr
	Rows                         int
	Pair                         preference.Loss
}

// WorkspaceBytes implements [kernel.Workspaced].
func (a Forward) WorkspaceBytes(gpu.DeviceInfo) int { return 2 * a.Rows * (8 + 4) }

// WorkspaceField implements [kernel.Workspaced].
func (a *Forward) WorkspaceField() *gpu.Ptr { return &a.Workspace }

// Launch enqueues one kernel.
func (a Forward) Launch(q *kernel.Queue) {
	q.Run("preference", "preference_loss", kernel.Line(1, lossThreads), a.Loss, a.Figures, a.Gradients, a.Workspace,
		a.Workspace.Offset(2*a.Rows*8), a.LogProbs, a.Reference, a.Answers, a.Rows, int(a.Pair.Kind), a.Pair.Beta,
		a.Pair.Smoothing)
}

// Backward computes the gradient DX [Rows] of the log-probabilities from the Figures and Gradients of [Forward] and the
// gradient of the loss, Grad.
type Backward struct {
	DX, Gradients, Figures, Grad, Answers gpu.Ptr
	Rows                                  int
}

// Launch enqueues one kernel.
func (a Backward) Launch(q *kernel.Queue) {
	q.Run("preference", "preference_loss_gradient", kernel.Cover(a.Rows, gradientThreads, gradientThreads), a.DX,
		a.Gradients, a.Figures, a.Grad, a.Answers, a.Rows)
}
