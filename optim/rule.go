package optim

// Rule is what an optimiser does with one parameter, for a machine that does it in its own way.
// Learning rates are multiples of the optimiser's LR.
type Rule struct {
	Muon         bool    // Muon's update; otherwise AdamW's
	LRScale      float64 // times LR
	Decay        float64
	Beta1, Beta2 float64 // AdamW's; Muon's momentum is Beta1
	Eps          float64 // AdamW's

	ShapeScale float64 // Muon: times the learning rate of the update, not of the decay
	Nesterov   bool    // Muon
	Iterations int     // Muon: Newton-Schulz steps
}

// Rule returns what a does with the parameter of that name and shape.
func (a *AdamW) Rule(name string, shape []int) Rule {
	h := resolve(a.base, a.groups, name, shape)
	return Rule{LRScale: h.scale, Decay: h.decay, Beta1: h.beta1, Beta2: h.beta2, Eps: a.eps}
}

// Rule returns what m does with the parameter of that name and shape.
func (m *Muon) Rule(name string, shape []int) Rule {
	if m.rest == nil {
		return Rule{}
	}
	if m.usesAdamW(name, shape) {
		r := m.rest.Rule(name, shape)
		r.LRScale *= m.restShare
		return r
	}
	h := resolve(m.base, m.groups, name, shape)
	return Rule{Muon: true, LRScale: h.scale, Decay: h.decay, Beta1: m.momentum,
		ShapeScale: m.scale.of(shape[0], shape[1]),
		Nesterov:   m.nesterov, Iterations: m.iterations}
}
