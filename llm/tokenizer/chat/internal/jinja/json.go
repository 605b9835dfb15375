package jinja

import (
	"fmt"
	"math/big"
	"sort"
	"unicode/utf16"
)

// A jsonWriter writes values like Python's json.dumps.
type jsonWriter struct {
	*builder
	ascii    bool
	sortKeys bool
	indented bool
	indent   string
	item     string // separates items
	key      string // separates a key from its value
}

func (w *jsonWriter) newline(depth int) {
	if w.indented {
		w.add("\n")
		for range depth {
			w.add(w.indent)
		}
	}
}

func (w *jsonWriter) write(v value, depth int) {
	checkDepth(depth)
	switch v := v.(type) {
	case nil:
		w.add("null")
	case bool:
		w.add(map[bool]string{true: "true", false: "false"}[v])
	case int64, *big.Int:
		w.add(integerText(v))
	case float64:
		w.add(floatText(v))
	case string:
		w.string(v)
	case markup:
		w.string(string(v))
	case *list:
		w.array(v.items, depth)
	case *tuple:
		w.array(v.items, depth)
	case *dict:
		w.object(v, depth)
	default:
		fail("tojson: %s is not JSON serializable", describe(v))
	}
}

func (w *jsonWriter) string(s string) {
	w.add(`"`)
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			w.WriteByte('\\')
			w.WriteRune(r)
		case r == '\n':
			w.WriteString(`\n`)
		case r == '\r':
			w.WriteString(`\r`)
		case r == '\t':
			w.WriteString(`\t`)
		case r == '\b':
			w.WriteString(`\b`)
		case r == '\f':
			w.WriteString(`\f`)
		case r < ' ', w.ascii && r > 126 && r <= 0xffff:
			fmt.Fprintf(w, `\u%04x`, r)
		case w.ascii && r > 0xffff:
			high, low := utf16.EncodeRune(r)
			fmt.Fprintf(w, `\u%04x\u%04x`, high, low)
		default:
			w.WriteRune(r)
		}
	}

	w.add(`"`)
}

func (w *jsonWriter) array(items []value, depth int) {
	if len(items) == 0 {
		w.add("[]")
		return
	}

	w.add("[")
	for i, v := range items {
		if i > 0 {
			w.add(w.item)
		}
		w.newline(depth + 1)
		w.write(v, depth+1)
	}

	w.newline(depth)
	w.add("]")
}

func (w *jsonWriter) object(d *dict, depth int) {
	if len(d.keys) == 0 {
		w.add("{}")
		return
	}

	order := make([]int, len(d.keys))
	for i := range order {
		order[i] = i
	}

	if w.sortKeys {
		sort.SliceStable(order, func(i, j int) bool {
			return w.in.compare("<", d.keys[order[i]], d.keys[order[j]]) < 0
		})
	}

	w.add("{")
	for n, i := range order {
		if n > 0 {
			w.add(w.item)
		}
		w.newline(depth + 1)
		switch k := d.keys[i].(type) {
		case string, markup:
			s, _ := text(k)
			w.string(s)
		case nil, bool, int64, *big.Int, float64:
			w.add(`"`)
			w.write(k, depth+1)
			w.add(`"`)
		default:
			fail("tojson: a key must be a string or a number, not %s", describe(k))
		}
		w.add(w.key)
		w.write(d.values[i], depth+1)
	}

	w.newline(depth)
	w.add("}")
}

// toJSON implements transformers' tojson filter.
func toJSON(in *interpreter, v value, a *callArguments) value {
	args := a.bind("tojson", 0, "ensure_ascii", "indent", "separators", "sort_keys")
	w := &jsonWriter{builder: &builder{in: in}, item: ", ", key: ": "}
	w.ascii = isTrue(orDefault(args[0], false))
	w.sortKeys = isTrue(orDefault(args[3], false))

	switch indent := orDefault(args[1], nil).(type) {
	case nil:
	case string:
		w.indented, w.indent = true, indent
	default:
		w.indented = true
		w.indent = in.repeat(" ", toInt(indent))
	}

	if w.indented {
		w.item = ","
	}

	if separators := orDefault(args[2], nil); separators != nil {
		pair := in.elements(separators)
		if len(pair) != 2 {
			fail("tojson: separators has %d elements, want 2", len(pair))
		}
		item, ok := text(pair[0])
		key, ok2 := text(pair[1])
		if !ok || !ok2 {
			fail("tojson: separators must be strings")
		}
		w.item, w.key = item, key
	}

	w.write(v, 0)
	in.grow(w.Len())
	return w.String()
}

func orDefault(v, otherwise value) value {
	if v == missing {
		return otherwise
	}
	return v
}
