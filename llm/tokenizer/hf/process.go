package hf

import (
	"errors"
	"fmt"
	"maps"
	"slices"
)

// A template describes the tokens that the file's post-processors add before and after a text.
type template struct{ before, after []int }

const maxTemplate = 64 // tokens

// readTemplate reads the post-processors. Post-processors that only change offsets have no effect here.
func readTemplate(v value) (t template, err error) {
	err = readComponents("post_processor", v, "processors", func(kind string, o *object) error {
		switch kind {
		case "ByteLevel":
			for _, key := range []string{"add_prefix_space", "trim_offsets", "use_regex"} {
				o.boolOr(key, true)
			}
		case "TemplateProcessing":
			if t.before != nil || t.after != nil {
				return fmt.Errorf("%s: a second template is not supported", o.where)
			}
			t = o.template()
		default:
			return o.unsupported(kind)
		}
		return nil
	})

	return t, err
}

// template reads the template for a single text. The template for pairs of texts is ignored.
func (o *object) template() (t template) {
	o.take("pair")
	ids := o.templateIDs()
	single, ok := o.must("single")
	if !ok {
		return t
	}

	seen := false
	err := single.elements(func(i int, item value) error {
		p := newObject(fmt.Sprintf("%s.single[%d]", o.where, i), item)
		if v, ok := p.take("Sequence"); ok {
			s := newObject(p.where, v)
			if id := s.text("id"); s.err == nil && (id != "A" || seen) {
				return fmt.Errorf("%s: sequence %.40q is not supported, want A once", p.where, id)
			}
			seen = true
			s.integer("type_id")
			p.finish(s)
			return p.done()
		}
		v, ok := p.must("SpecialToken")
		if !ok {
			return p.done()
		}
		s := newObject(p.where, v)
		name := s.text("id")
		s.integer("type_id")
		p.finish(s)
		these, ok := ids[name]
		if !ok {
			p.fail("", fmt.Errorf("%.60q is not among the special_tokens", name))
		}
		if seen {
			t.after = append(t.after, these...)
		} else {
			t.before = append(t.before, these...)
		}
		if len(t.before)+len(t.after) > maxTemplate {
			p.fail("", fmt.Errorf("it adds more than %d tokens", maxTemplate))
		}
		return p.done()
	})

	if err == nil && !seen {
		err = errors.New("it has no sequence A")
	}
	if err != nil {
		o.fail("single", err)
	}

	return t
}

// templateIDs reads the ids of the tokens in a template.
func (o *object) templateIDs() map[string][]int {
	all := map[string][]int{}
	v, ok := o.take("special_tokens")
	if !ok {
		return all
	}

	tokens := newObject(path(o.where, "special_tokens"), v)
	for _, name := range slices.Sorted(maps.Keys(tokens.members)) {
		member, ok := tokens.must(name)
		if !ok {
			continue
		}
		s := newObject(path(tokens.where, name), member)
		s.text("id")
		s.take("tokens")
		ids, ok := s.must("ids")
		if ok {
			err := ids.elements(func(i int, item value) error {
				id, err := item.integer(maxIDs - 1)
				all[name] = append(all[name], id)
				if i == maxTemplate {
					err = fmt.Errorf("it has more than %d ids", maxTemplate)
				}
				return err
			})
			if err != nil {
				s.fail("ids", err)
			}
		}
		tokens.finish(s)
	}

	o.finish(tokens)
	return all
}
