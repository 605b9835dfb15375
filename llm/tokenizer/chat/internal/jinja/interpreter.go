package jinja

import (
	"math"
	"strings"
	"time"
)

// An interpreter renders a template once.
type interpreter struct {
	variables map[string]value
	scope     *scope
	out       *strings.Builder
	outLimit  int // bytes of the output, or of the block that is being captured
	line      int
	macros    int // nested macro calls

	now      time.Time
	timeout  time.Duration
	deadline time.Time
	steps    int
	checkAt  int // number of steps after which the time is checked next

	valueLimit  int // bytes of a value
	memory      int // bytes allocated so far
	memoryLimit int
}

// A scope holds the variables of one function of the Python code that Jinja2 generates: the template
// itself or the call of a macro. An inner function sees the values that the variables of the outer
// function have at the time of the lookup.
type scope struct {
	variables map[string]value
	outer     *scope
}

// lookup returns the value of a variable in the innermost scope that has it, or missing.
func (s *scope) lookup(ident string) value {
	for ; s != nil; s = s.outer {
		if v, ok := s.variables[ident]; ok {
			return v
		}
	}
	return missing
}

func newInterpreter(variables Variables, o Options) *interpreter {
	if o.Timeout == 0 {
		o.Timeout = DefaultTimeout
	}

	in := &interpreter{
		variables: map[string]value{}, scope: &scope{variables: map[string]value{}},
		now: o.Now, timeout: o.Timeout, deadline: time.Now().Add(o.Timeout),
	}
	in.out, in.outLimit = &strings.Builder{}, maxOutput

	for name, v := range globals {
		in.variables[name] = v
	}

	size := 0
	for name, v := range variables {
		in.variables[name] = v.v
		size += inputSize(v.v)
	}

	// Long conversations may take more memory than short ones.
	in.valueLimit = maxValue + 4*size
	in.memoryLimit = maxMemory + 64*size
	return in
}

// inputSize returns the approximate number of bytes of a variable.
func inputSize(v value) int {
	switch v := v.(type) {
	case string:
		return len(v)
	case *list:
		n := 0
		for _, i := range v.items {
			n += 16 + inputSize(i)
		}
		return n
	case *dict:
		n := 0
		for i, k := range v.keys {
			n += 32 + inputSize(k) + inputSize(v.values[i])
		}
		return n
	}

	return 8
}

// step counts one step. Like all methods that call fail, it panics if a limit is exceeded.
func (in *interpreter) step() { in.work(1) }

// work counts steps, and fails if time is up. A step is the work of evaluating a small expression. The time
// is checked only every 1024 steps, because reading the clock takes longer than a step.
func (in *interpreter) work(steps int) {
	if in.steps += steps; in.steps < in.checkAt {
		return
	}
	in.checkAt = in.steps + 1024
	if time.Now().After(in.deadline) {
		fail("the template takes longer than %v", in.timeout)
	}
}

// read counts the work of reading or writing n bytes.
func (in *interpreter) read(n int) { in.work(1 + n/64) }

// grow counts allocated memory.
func (in *interpreter) grow(n int) {
	in.read(n)
	if in.memory += n; in.memory > in.memoryLimit {
		fail("the template takes more than %d bytes of memory", in.memoryLimit)
	}
}

// check fails if a value of n bytes would be too large.
func (in *interpreter) check(n int) {
	if n > in.valueLimit {
		fail("a value has more than %d bytes", in.valueLimit)
	}
}

// newString returns a string that has just been made, after counting its memory.
func (in *interpreter) newString(s string) string {
	in.check(len(s))
	in.grow(len(s))
	return s
}

// repeat returns n copies of a string, one after the other. Negative n count as 0.
func (in *interpreter) repeat(s string, n int) string {
	if n <= 0 || s == "" {
		return ""
	}

	// The cap keeps the product below from overflowing. The largest values allowed are far
	// smaller.
	n = min(n, math.MaxInt32/len(s))
	in.check(n * len(s))
	return in.newString(strings.Repeat(s, n))
}

// enter gives the variables of the current scope their initial values, as determined by the analysis of the
// template: a variable of the interpreter, the value of an outer scope, or none.
func (in *interpreter) enter(loads []load) {
	for _, l := range loads {
		switch l.action {
		case loadResolve:
			if v, ok := in.variables[l.from]; ok {
				in.scope.variables[l.ident] = v
			} else {
				in.scope.variables[l.ident] = undefinedVariable(l.from)
			}
		case loadAlias:
			in.scope.variables[l.ident] = in.scope.lookup(l.from)
		case loadUndefined:
			in.scope.variables[l.ident] = missing
		}
	}
}

// leave clears the variables that enter has set.
func (in *interpreter) leave(loads []load) {
	for _, l := range loads {
		in.scope.variables[l.ident] = missing
	}
}

func undefinedVariable(name string) value {
	return &undefined{"the variable " + name + " is undefined"}
}
