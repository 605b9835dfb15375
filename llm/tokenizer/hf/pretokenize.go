package hf

import (
	"bytes"
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/kasmina-go/kasmina/llm/tokenizer/internal/split"
)

// A stage is a pre-tokenizer. It divides a piece into non-empty parts and calls a function for each.
// The argument first reports whether the piece or part starts the text.
type stage interface {
	cut(piece []byte, first bool, next func(part []byte, first bool))
}

// readStages reads the pre-tokenizers. It also reports whether they convert the text to the byte level.
func readStages(v value) (stages []stage, byteLevel bool, err error) {
	err = readComponents("pre_tokenizer", v, "pretokenizers", func(kind string, o *object) error {
		if byteLevel {
			return fmt.Errorf("%s: type %s after ByteLevel is not supported", o.where, kind)
		}
		switch kind {
		case "ByteLevel":
			byteLevel = true
			if o.boolOr("add_prefix_space", true) {
				stages = append(stages, prefixSpace{})
			}
			o.boolOr("trim_offsets", true) // offsets are not computed
			if o.boolOr("use_regex", true) {
				stages = append(stages, mustScan(split.GPT2))
			}
		case "Digits":
			stages = append(stages, digits{individual: o.boolOr("individual_digits", false)})
		case "Metaspace":
			stages = append(stages, readMetaspace(o))
		case "Split":
			stages = append(stages, readSplit(o))
		default:
			return o.unsupported(kind)
		}
		return nil
	})

	return stages, byteLevel, err
}

// prefixSpace adds a space to pieces that do not start with one.
type prefixSpace struct{}

func (prefixSpace) cut(piece []byte, first bool, next func([]byte, bool)) {
	if piece[0] != ' ' {
		piece = append([]byte{' '}, piece...)
	}
	next(piece, first)
}

// scan divides a text with one of the published patterns, which leave no text unmatched.
type scan struct{ *split.Scanner }

func mustScan(pattern string) scan {
	s, _ := split.NewScanner(pattern)
	return scan{s}
}

func (s scan) cut(piece []byte, first bool, next func([]byte, bool)) {
	for len(piece) > 0 {
		n := s.Next(piece)
		next(piece[:n], first)
		piece, first = piece[n:], false
	}
}

// digits separates numbers from other text and, if individual is set, digits from each other.
type digits struct{ individual bool }

func (d digits) cut(piece []byte, first bool, next func([]byte, bool)) {
	from, inNumber := 0, false
	for at := 0; at < len(piece); {
		r, n := utf8.DecodeRune(piece[at:])
		number := split.IsNumeric(r)
		if at > from && (number != inNumber || number && d.individual) {
			next(piece[from:at], first && from == 0)
			from = at
		}
		inNumber = number
		at += n
	}

	next(piece[from:], first && from == 0)
}

// metaspace replaces spaces with a character and splits the text before that character.
type metaspace struct {
	replacement string
	scheme      string // when to add the character at the start: always, first or never
	split       bool
}

const (
	always = "always"
	first  = "first"
	never  = "never"
)

// readMetaspace reads a pre-tokenizer or a decoder.
func readMetaspace(o *object) metaspace {
	m := metaspace{replacement: o.text("replacement")}
	if utf8.RuneCountInString(m.replacement) != 1 && o.err == nil {
		o.fail("replacement", fmt.Errorf("it is %.40q, want one character", m.replacement))
	}

	m.scheme = o.textOr("prepend_scheme", always)
	if m.scheme != always && m.scheme != first && m.scheme != never {
		o.fail("prepend_scheme", fmt.Errorf("%.40q is not supported, want always, first or never",
			m.scheme))
	}

	if !o.boolOr("add_prefix_space", true) { // in older files
		if m.scheme != never {
			o.fail("add_prefix_space", fmt.Errorf("it is false, but prepend_scheme is %q, want "+
				"\"never\"", m.scheme))
		}
	}

	o.textOr("str_rep", "") // in older files, without effect
	m.split = o.boolOr("split", true)
	return m
}

func (m metaspace) cut(piece []byte, atStart bool, next func([]byte, bool)) {
	mark := []byte(m.replacement)
	piece = bytes.ReplaceAll(piece, []byte(" "), mark)
	if !bytes.HasPrefix(piece, mark) && (m.scheme == always || m.scheme == first && atStart) {
		piece = append(mark, piece...)
	}

	if !m.split {
		next(piece, atStart)
		return
	}

	for len(piece) > 0 {
		n := bytes.Index(piece[min(len(mark), len(piece)):], mark)
		if !bytes.HasPrefix(piece, mark) {
			n = bytes.Index(piece, mark)
		} else if n >= 0 {
			n += len(mark)
		}
		if n < 0 {
			n = len(piece)
		}
		next(piece[:n], atStart)
		piece, atStart = piece[n:], false
	}
}

// splitter divides a text at the matches of a pattern.
type splitter struct {
	find     finder
	behavior string
	invert   bool // swap matches and the text between them
}

// A finder calls match for the matches of a pattern in a text, in order.
type finder func(text []byte, match func(from, to int))

// The behaviors for matches.
const (
	removed            = "Removed"
	isolated           = "Isolated"
	mergedWithPrevious = "MergedWithPrevious"
	mergedWithNext     = "MergedWithNext"
	contiguous         = "Contiguous"
)

func readSplit(o *object) stage {
	s := splitter{behavior: o.text("behavior"), invert: o.boolOr("invert", false)}
	switch s.behavior {
	case removed, isolated, mergedWithPrevious, mergedWithNext, contiguous:
	default:
		o.fail("behavior", fmt.Errorf("%.40q is not supported", s.behavior))
	}

	v, ok := o.must("pattern")
	if !ok {
		return s
	}

	p := newObject(path(o.where, "pattern"), v)
	if _, regex := p.members["Regex"]; !regex {
		old := p.affix("String")
		if old == "" {
			p.fail("String", errors.New("it is empty"))
		}
		s.find = findString(old)
	} else {
		pattern := p.text("Regex")
		scanner, ok := split.NewScanner(pattern)
		if ok && s.behavior == isolated {
			o.finish(p)
			return scan{scanner}
		}
		find, err := findPattern(pattern)
		if err != nil && p.err == nil {
			p.fail("Regex", err)
		}
		s.find = find
	}

	o.finish(p)
	return s
}

// finish records the error of a nested object.
func (o *object) finish(p *object) {
	if err := p.done(); err != nil && o.err == nil {
		o.err = err
	}
}

func findString(old string) finder {
	return func(text []byte, match func(from, to int)) {
		for at := 0; ; {
			n := bytes.Index(text[at:], []byte(old))
			if n < 0 {
				return
			}
			match(at+n, at+n+len(old))
			at += n + len(old)
		}
	}
}

// A section of a text is either a match of a pattern or the text between two matches.
type section struct {
	from, to int
	match    bool
}

func (s splitter) cut(piece []byte, first bool, next func([]byte, bool)) {
	var sections []section
	end := 0
	add := func(from, to int, match bool) {
		sections = append(sections, section{from, to, match != s.invert})
	}
	s.find(piece, func(from, to int) {
		if from > end {
			add(end, from, false)
		}
		add(from, to, true)
		end = to
	})

	if end < len(piece) {
		add(end, len(piece), false)
	}

	for _, c := range s.joined(sections) {
		if c.to > c.from && !(s.behavior == removed && c.match) {
			next(piece[c.from:c.to], first && c.from == 0)
		}
	}
}

// joined joins sections according to the behavior.
func (s splitter) joined(sections []section) []section {
	var all []section
	before := false // the previous section is a match
	switch s.behavior {
	case mergedWithPrevious, contiguous:
		for _, c := range sections {
			join := c.match && !before
			if s.behavior == contiguous {
				join = c.match == before
			}
			if join && len(all) > 0 {
				all[len(all)-1].to = c.to
			} else {
				all = append(all, c)
			}
			before = c.match
		}
		return all
	case mergedWithNext:
		for i := len(sections) - 1; i >= 0; i-- {
			c := sections[i]
			if c.match && !before && len(all) > 0 {
				all[len(all)-1].from = c.from
			} else {
				all = append(all, c)
			}
			before = c.match
		}
		for i, j := 0, len(all)-1; i < j; i, j = i+1, j-1 {
			all[i], all[j] = all[j], all[i]
		}
		return all
	}

	return sections
}
