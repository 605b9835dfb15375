package llm

// become gives a model a new configuration and the parameters that belong to it. A nil model is ignored.
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
