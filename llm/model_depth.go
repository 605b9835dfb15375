package llm

// become gives a model a new layout with its parameters.
func become(m *Model, l layout, params []Param) {
	m.Config, m.Planted = l.Config, l.Planted
	m.Params, m.byName = params, make(map[string]int, len(params))
	for i, p := range params {
		m.byName[p.Name] = i
	}
	m.shape++
	m.changes.Add(1)
}
