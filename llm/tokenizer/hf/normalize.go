package hf

import (
	"bytes"
	"errors"
	"fmt"
)

// A normalizer replaces characters of a text before the text is split. It does not modify the text in
// place.
type normalizer interface {
	normalize(text []byte) []byte
	// growth returns an upper bound on the ratio of the output length to the input length, in bytes and for
	// long texts: a constant number of added bytes does not count.
	growth() int
}

const (
	maxComponents = 32  // of one kind; known files have up to three
	maxAffix      = 256 // bytes of a prefix or a replacement
	maxGrowth     = 64  // of all normalizers together; see normalizer.growth
)

// readNormalizers reads the normalizers in the order of their application.
func readNormalizers(v value) ([]normalizer, error) {
	var all []normalizer
	err := readComponents("normalizer", v, "normalizers", func(kind string, o *object) error {
		switch kind {
		case "NFC":
			all = append(all, nfc{})
		case "Prepend":
			all = append(all, prepend(o.affix("prepend")))
		case "Replace":
			all = append(all, replace{o.pattern("pattern"), o.affix("content")})
		default:
			return o.unsupported(kind)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}

	growth := 1
	for _, n := range all {
		if growth *= n.growth(); growth > maxGrowth {
			return nil, fmt.Errorf("normalizer: it can make a text more than %d times as long",
				maxGrowth)
		}
	}

	return all, nil
}

// readComponents calls read for a component or, if it is a Sequence, for the components in the list with
// the given name.
func readComponents(where string, v value, list string,
	read func(kind string, o *object) error) error {
	left := maxComponents
	return readNested(where, v, list, read, &left)
}

// readNested implements readComponents. It may call itself left more times in total, which also limits the
// nesting of sequences.
func readNested(where string, v value, list string, read func(kind string, o *object) error,
	left *int) error {
	if *left--; *left < 0 {
		return fmt.Errorf("%s: more than %d components", where, maxComponents)
	}

	o := newObject(where, v)
	kind := o.text("type")
	if o.err != nil {
		return o.err
	}

	if kind != "Sequence" {
		if err := read(kind, o); err != nil {
			return err
		}
		return o.done()
	}

	items, ok := o.must(list)
	if !ok {
		return o.done()
	}

	err := items.elements(func(i int, item value) error {
		return readNested(fmt.Sprintf("%s.%s[%d]", where, list, i), item, list, read, left)
	})
	if err != nil {
		return err
	}

	return o.done()
}

// affix returns the text of a member, which may have at most maxAffix bytes.
func (o *object) affix(key string) string {
	s := o.text(key)
	if len(s) > maxAffix {
		o.fail(key, fmt.Errorf("it has %d bytes, want at most %d", len(s), maxAffix))
	}
	return s
}

// pattern returns the text in a member of the form {"String": text}. The form {"Regex": text} is an error.
func (o *object) pattern(key string) string {
	v, ok := o.must(key)
	if !ok {
		return ""
	}

	p := newObject(path(o.where, key), v)
	if _, ok := p.members["Regex"]; ok {
		p.fail("Regex", errors.New("regular expressions are not supported here"))
	}

	s := p.affix("String")
	if s == "" {
		p.fail("String", errors.New("it is empty"))
	}

	if err := p.done(); err != nil && o.err == nil {
		o.err = err
	}

	return s
}

type prepend string

func (p prepend) normalize(text []byte) []byte {
	if len(text) == 0 {
		return text
	}
	return append([]byte(p), text...)
}

func (p prepend) growth() int { return 1 }

type replace struct{ old, new string }

func (r replace) normalize(text []byte) []byte {
	return bytes.ReplaceAll(text, []byte(r.old), []byte(r.new))
}

func (r replace) growth() int { return max(1, (len(r.new)+len(r.old)-1)/len(r.old)) }
