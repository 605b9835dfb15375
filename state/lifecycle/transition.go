package lifecycle

// Transition is a change of a seed's stage.
type Transition struct {
	Epoch    int // number of epochs that had ended before the change
	From, To Stage
}

// packedEpochs is the number of epochs that a packed transition can represent; later epochs are
// stored as the last one.
const packedEpochs = 1 << 24

// Pack encodes the transition in four bytes. The result is never 0, which would be a transition
// from Dormant to Dormant.
func (t Transition) Pack() uint32 {
	return uint32(min(t.Epoch, packedEpochs-1))<<8 | uint32(t.From)<<4 | uint32(t.To)
}

// Unpack decodes the result of Pack.
func Unpack(p uint32) Transition {
	return Transition{int(p >> 8), Stage(p >> 4 & 15), Stage(p & 15)}
}
