package jinja

// A node is a statement or an expression. Its children are visited in Jinja2's order, since that order
// decides which scope a name belongs to.
type node any

// A name is a variable being loaded or stored. Ident is set by resolveScopes.
type name struct {
	name  string
	mode  nameMode
	ident string
	line  int
}

type nameMode int

const (
	modeLoad nameMode = iota
	modeStore
	modeParam
)

type (
	constant  struct{ v value }
	attribute struct {
		object node
		name   string
		line   int
	}
	item struct {
		object, index node
		line          int
	}
	slice struct{ start, stop, step node } // nil where absent
	call  struct {
		callee node
		args   arguments
		line   int
	}
	// A filter or test. Object is nil for a filter block, which filters its text.
	filter struct {
		object node
		name   string
		args   arguments
		line   int
		known  bool
	}
	test struct {
		object node
		name   string
		args   arguments
		line   int
		known  bool
	}
	arguments struct {
		positional []node
		keywords   []keyword
		list, dict node // *list and **dict
	}
	keyword struct {
		name  string
		value node
	}
	tupleLiteral struct{ items []node }
	listLiteral  struct{ items []node }
	dictLiteral  struct{ keys, values []node }
	binary       struct {
		op          string
		left, right node
		line        int
	}
	unary struct {
		op      string
		operand node
		line    int
	}
	comparison struct {
		first node
		ops   []string
		rest  []node
		line  int
	}
	concat      struct{ parts []node }
	conditional struct{ condition, yes, no node } // no may be nil
	nsRef       struct {
		name, attr, ident string
		line              int
	}
)

type (
	data   struct{ text string }
	output struct {
		expr node
		line int
	}
	forLoop struct {
		target, iterable, condition node // condition may be nil
		body, otherwise             []node
		line                        int

		loopIdent                       string // "" unless the body uses loop
		bodyLoads, testLoads, elseLoads []load
	}
	ifBranch struct {
		condition node
		body      []node
	}
	ifStatement struct {
		branches  []ifBranch
		otherwise []node
		line      int
	}
	set struct {
		target, value node
		refs          []*nsRef
		line          int
	}
	setBlock struct {
		target node
		filter *filter // nil if absent
		body   []node
		loads  []load
		line   int
	}
	macroStatement struct {
		name  *name
		macro *macroBody
		line  int
	}
	callBlock struct {
		call  *call // nil for a generation block
		macro *macroBody
		line  int
	}
	filterBlock struct {
		filter *filter
		body   []node
		loads  []load
		line   int
	}
	with struct {
		targets, values []node
		body            []node
		loads           []load
		line            int
	}
	// A loopControl is break or continue.
	loopControl struct {
		kind control
		line int
	}
)

// A macroBody is the definition of a macro or of the caller of a call block.
type macroBody struct {
	name     string
	params   []*name
	defaults []node // of the last parameters
	body     []node
	loads    []load

	// The identifiers of the special variables, or "" if the body does not use them.
	callerIdent, kwargsIdent, varargsIdent string
}

// children returns the children of a node in Jinja2's order.
func children(n node) []node {
	var all []node
	add := func(nodes ...node) {
		for _, n := range nodes {
			if n != nil {
				all = append(all, n)
			}
		}
	}

	addArguments := func(a arguments) {
		add(a.positional...)
		for _, k := range a.keywords {
			add(k.value)
		}
		add(a.list, a.dict)
	}

	addFilter := func(f *filter) {
		if f != nil {
			add(f)
		}
	}

	switch n := n.(type) {
	case *attribute:
		add(n.object)
	case *item:
		add(n.object, n.index)
	case *slice:
		add(n.start, n.stop, n.step)
	case *call:
		add(n.callee)
		addArguments(n.args)
	case *filter:
		add(n.object)
		addArguments(n.args)
	case *test:
		add(n.object)
		addArguments(n.args)
	case *tupleLiteral:
		add(n.items...)
	case *listLiteral:
		add(n.items...)
	case *dictLiteral:
		for i := range n.keys {
			add(n.keys[i], n.values[i])
		}
	case *binary:
		add(n.left, n.right)
	case *unary:
		add(n.operand)
	case *comparison:
		add(n.first)
		add(n.rest...)
	case *concat:
		add(n.parts...)
	case *conditional:
		add(n.condition, n.yes, n.no)
	case *output:
		add(n.expr)
	case *forLoop:
		add(n.target, n.iterable)
		add(n.body...)
		add(n.otherwise...)
		add(n.condition)
	case *ifStatement:
		for _, b := range n.branches {
			add(b.condition)
			add(b.body...)
		}
		add(n.otherwise...)
	case *set:
		add(n.target, n.value)
	case *setBlock:
		add(n.target)
		addFilter(n.filter)
		add(n.body...)
	case *macroStatement:
		add(macroChildren(n.macro)...)
	case *callBlock:
		if n.call != nil {
			add(n.call)
		}
		add(macroChildren(n.macro)...)
	case *filterBlock:
		add(n.body...)
		addFilter(n.filter)
	case *with:
		add(n.targets...)
		add(n.values...)
		add(n.body...)
	}

	return all
}

func macroChildren(m *macroBody) []node {
	var all []node
	for _, p := range m.params {
		all = append(all, p)
	}
	all = append(all, m.defaults...)
	return append(all, m.body...)
}
