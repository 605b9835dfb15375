package kernels

// What is to be known of launches before they are made: the ways in which they can be, and the memory
// that they work in.

// Ways lists the ways that take a launch.
func (k *Kernels) Ways(params any) (ways []Way) {
	switch p := params.(type) {
	case RMSNorm:
		ways, _ = k.RMSNormWays(p) // an error comes back from the launch
	case RMSNormBackward:
		ways, _ = k.RMSNormBackwardWays(p)
	case Attention:
		for _, v := range k.AttentionVariants(p.shape(), p.Type, p.Y, p.Q, p.K, p.V) {
			if v != AttentionHopperFused { // whose forward pass is AttentionHopper's
				ways = append(ways, Way{Family: v.String()})
			}
		}
	case AttentionBackward:
		for _, v := range k.AttentionVariants(p.shape(), p.Type, p.DQ, p.DK, p.DV, p.G, p.Q, p.K, p.V, p.Y) {
			ways = append(ways, Way{Family: v.String()})
		}
	case SiLUProduct:
		ways = k.SiLUProductWays(p.Rows, p.F, p.D, p.Type)
	case SiLUProductBackward:
		ways = k.SiLUProductWays(p.Rows, p.F, p.D, p.Type)
	case RoPEProduct:
		ways = k.RoPEProductWays(p.RoPEProductShape, p.Type)
	case LinearCrossEntropy:
		ways = k.LinearCrossEntropyWays(p.LinearCrossEntropyShape, p.Type)
	case Symmetric:
		if k.TakesSymmetric(p.SymmetricShape, p.Type) {
			ways = []Way{{Family: "half"}}
		}
	case Product:
		ways = k.ProductWays(p.ProductShape, p.Type)
	}
	return ways
}
