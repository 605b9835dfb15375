package llm

// become gives a model, if it is not nil, another configuration and its parameters.
func become(m *Model, c Config, params []Param) {
	if m == nil {
		return
	}
	m.Config, m.Params, m.byName = c, params, make(map[string]int, len(params))
	for i, p := range params {
		m.byName[p.Name] = i
	}
	m.shape++
	m.changes.Add(1)
}
