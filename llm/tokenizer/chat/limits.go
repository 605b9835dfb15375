package chat

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/nikolalohinski/gonja/v2/builtins"
	"github.com/nikolalohinski/gonja/v2/exec"
)

// A template comes with a model that anybody may have made. The engine would follow it into loops
// without end, macros that call themselves and texts larger than the memory. So what a template may
// say is listed here, and whatever it calls looks at the limits.
const (
	maxTag      = 1 << 14 // bytes of a tag; the longest known has 6,000
	maxWords    = 1000    // names, numbers and signs of a tag; 72 known
	maxBrackets = 32      // within each other; 4 known
	maxNested   = 100     // tags within each other; 10 known
	maxMacros   = 32      // macros that call each other
	maxItems    = 100_000 // of a list that is looped over, as in Jinja's sandbox
	maxUnique   = 1000    // of a list that is compared each with each
	maxValue    = 1 << 20 // bytes of a value, beside what the conversation takes
	maxDepth    = 32      // of lists within lists
)

// patience is how long a conversation may take to write. Those known take milliseconds.
var patience = 20 * time.Second

// limits are those of one conversation.
type limits struct {
	until  time.Time
	most   int // bytes of a value
	nested int // tags that are being read
	macros int // that are being run
}

// limits returns those of a conversation, from now on.
func (t *Template) limits(messages []Message, variables map[string]any) *limits {
	n := 0
	for _, m := range messages {
		n += len(m.Content)
	}
	for _, v := range variables {
		text, _ := v.(string)
		n += len(text)
	}
	return &limits{until: time.Now().Add(patience), most: maxValue + 4*n}
}

// look returns an error if time is up or a value is too large.
func (l *limits) look(values ...any) error {
	if time.Now().After(l.until) {
		return fmt.Errorf("the template takes longer than %v", patience)
	}
	for _, v := range values {
		if _, err := l.size(reflect.ValueOf(v), 0, 0); err != nil {
			return err
		}
	}
	return nil
}

// size adds to sum what a value takes as text, at least.
func (l *limits) size(v reflect.Value, sum, depth int) (int, error) {
	if sum++; sum > l.most {
		return sum, fmt.Errorf("a value has more than %d bytes", l.most)
	}
	if depth > maxDepth {
		return sum, fmt.Errorf("lists lie deeper than %d within each other", maxDepth)
	}
	var err error
	add := func(item reflect.Value) {
		if err == nil {
			sum, err = l.size(item, sum, depth+1)
		}
	}
	switch v.Kind() {
	case reflect.String:
		if sum += v.Len(); sum > l.most {
			err = fmt.Errorf("a text has more than %d bytes", l.most)
		}
	case reflect.Pointer, reflect.Interface:
		if v.CanInterface() {
			if value, ok := v.Interface().(*exec.Value); ok && value != nil {
				return l.size(value.Val, sum, depth+1)
			}
		}
		if !v.IsNil() {
			return l.size(v.Elem(), sum, depth)
		}
	case reflect.Slice, reflect.Array:
		for i := 0; i < v.Len() && err == nil; i++ {
			add(v.Index(i))
		}
	case reflect.Map:
		for each := v.MapRange(); err == nil && each.Next(); {
			add(each.Key())
			add(each.Value())
		}
	case reflect.Struct: // of pairs
		if d, ok := v.Interface().(exec.Dict); ok {
			for _, p := range d.Pairs {
				add(reflect.ValueOf(p.Key))
				add(reflect.ValueOf(p.Value))
			}
		}
	}
	return sum, err
}

// filters are those that templates may use, and of those that make lists of what they get.
const (
	filters = "abs capitalize d default e escape float indent int items length count lower " +
		"replace round safe string title trim upper "
	listFilters = "dictsort first join last list map max min reject rejectattr reverse select " +
		"selectattr sort sum unique"
)

// filterSet returns the filters, within limits.
func (l *limits) filterSet() *exec.FilterSet {
	all := map[string]exec.FilterFunction{"tojson": toJSON}
	for _, name := range strings.Fields(filters + listFilters) {
		own, _ := builtins.Filters.Get(name)
		all[name] = own
	}
	for name, own := range all {
		lists := strings.Contains(" "+listFilters+" ", " "+name+" ")
		all[name] = func(e *exec.Evaluator, in *exec.Value, args *exec.VarArgs) *exec.Value {
			n := 0
			if in.IsIterable() {
				n = in.Len()
			}
			switch {
			case in.IsError():
			case lists && n > maxItems, name == "unique" && n > maxUnique:
				return exec.AsValue(fmt.Errorf("%s of %d items", name, n))
			case grown(name, in, n, args) > l.most:
				return exec.AsValue(fmt.Errorf("%s makes more than %d bytes", name, l.most))
			}
			if err := l.look(in); err != nil {
				return exec.AsValue(err)
			}
			out := own(e, in, args)
			if err := l.look(out); err != nil && !out.IsError() {
				return exec.AsValue(err)
			}
			return out
		}
	}
	all[items] = func(_ *exec.Evaluator, in *exec.Value, _ *exec.VarArgs) *exec.Value {
		if err := l.look(in); err != nil {
			return exec.AsValue(err)
		}
		if in.IsIterable() && in.Len() > maxItems {
			return exec.AsValue(fmt.Errorf("a loop over %d items", in.Len()))
		}
		return in
	}
	return exec.NewFilterSet(all)
}

// items is the filter through which goes whatever is looped over.
const items = "kasmina_items"

// grown is what a filter, or the method of a string, adds to what it gets of n items, at most.
func grown(name string, in *exec.Value, n int, args *exec.VarArgs) int {
	widest := 0
	for _, a := range slices.AppendSeq(slices.Clone(args.Args), maps.Values(args.KwArgs)) {
		widest = max(widest, wide(a))
	}
	switch name {
	case "join":
	case "indent":
		n = strings.Count(in.String(), "\n") + 1
	case "replace":
		if first := args.First(); first.IsString() {
			n = strings.Count(in.String(), first.String())
		}
	default:
		return 0
	}
	return n * widest
}

// wide is the length of a text, and of one of so many spaces.
func wide(a *exec.Value) int {
	switch {
	case a.IsString():
		return len(a.String())
	case a.IsInteger():
		return max(0, min(a.Integer(), 1<<30))
	}
	return 0
}

// methods returns methods within limits, and without those that fill up with spaces.
func methods[T any](l *limits, all *exec.MethodSet[T], names string) *exec.MethodSet[T] {
	within := map[string]exec.Method[T]{}
	for _, name := range strings.Fields(names) {
		own, ok := all.Get(name)
		if !ok {
			continue
		}
		within[name] = func(self T, v *exec.Value, args *exec.VarArgs) (any, error) {
			added := 0
			switch first := args.First(); {
			case name == "replace":
				added = grown(name, v, v.Len(), args)
			case name == "join" && first.IsIterable():
				added = first.Len() * v.Len()
			}
			if added > l.most {
				return nil, fmt.Errorf("%s makes more than %d bytes", name, l.most)
			}
			if err := l.look(v, args.Args); err != nil {
				return nil, err
			}
			out, err := own(self, v, args)
			if err != nil {
				return nil, err
			}
			return out, l.look(v, out)
		}
	}
	return exec.NewMethodSet(within)
}
