package hf

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/kasmina-go/kasmina/llm/tokenizer/internal/bytelevel"
)

// A decoding converts tokens to bytes as the file's decoders do. The steps are replacing, decoding <0xNN>
// or the byte level, and joining, in this order.
type decoding struct {
	replaced     []replace
	metaspace    *metaspace
	byteFallback bool
	byteLevel    bool
	fused        bool
	spaced       bool // the file has no decoder, so tokens are separated by spaces
	stripped     rune // character to remove at the start of the text
	strip        int  // maximum number of characters to remove
}

// readDecoding reads the decoders. It supports them in the order of the fields in decoding.
func readDecoding(v value) (d decoding, err error) {
	begun := "" // the last decoder that must come after all replacements
	err = readComponents("decoder", v, "decoders", func(kind string, o *object) error {
		if d.byteLevel && kind != "Fuse" || d.strip > 0 ||
			begun != "" && (kind == "Replace" || kind == "Metaspace" || kind == "ByteLevel") ||
			d.fused && kind == "ByteFallback" {
			return fmt.Errorf("%s: type %.60q is not supported at this place", o.where, kind)
		}
		switch kind {
		case "Replace":
			d.replaced = append(d.replaced, replace{o.pattern("pattern"), o.affix("content")})
		case "Metaspace":
			if d.metaspace != nil || d.replaced != nil {
				return fmt.Errorf("%s: a Metaspace after another is not supported", o.where)
			}
			m := readMetaspace(o)
			d.metaspace = &m
			begun = kind
		case "ByteFallback":
			d.byteFallback, begun = true, kind
		case "ByteLevel":
			for _, key := range []string{"add_prefix_space", "trim_offsets", "use_regex"} {
				o.boolOr(key, true)
			}
			if d.replaced != nil {
				return fmt.Errorf("%s: ByteLevel after Replace is not supported", o.where)
			}
			d.byteLevel = true
		case "Fuse":
			d.fused, begun = true, kind
		case "Strip":
			d.readStrip(o)
		default:
			return o.unsupported(kind)
		}
		return nil
	})

	return d, err
}

func (d *decoding) readStrip(o *object) {
	content := o.text("content")
	r, n := utf8.DecodeRuneInString(content)
	if n != len(content) || n == 0 {
		o.fail("content", fmt.Errorf("it is %.40q, want one character", content))
	}

	d.stripped, d.strip = r, o.integer("start")
	if stop := o.integer("stop"); stop != 0 {
		o.fail("stop", fmt.Errorf("%d is not supported, want 0", stop))
	}

	if !d.fused {
		o.fail("", errors.New("it is supported only after Fuse"))
	}
}

// appendToken appends the bytes of a token.
func (d *decoding) appendToken(out []byte, text string, first bool) []byte {
	if d.spaced && !first {
		out = append(out, ' ')
	}

	if m := d.metaspace; m != nil {
		space := " "
		if first && m.scheme != never {
			space = ""
		}
		text = strings.ReplaceAll(text, m.replacement, space)
	}

	for _, r := range d.replaced {
		text = strings.ReplaceAll(text, r.old, r.new)
	}

	if d.byteFallback && len(text) == 6 && text[:3] == "<0x" && text[5] == '>' {
		if b, err := strconv.ParseUint(text[3:5], 16, 8); err == nil {
			return append(out, byte(b))
		}
	}

	if d.byteLevel {
		if out, ok := bytelevel.AppendBytes(out, text); ok {
			return out
		}
	}

	return append(out, text...)
}

// A Decoder converts ids to text one by one, while Decode needs all ids at once. It is not safe for
// concurrent use.
type Decoder struct {
	t       *Tokenizer
	special bool // decode special tokens instead of skipping them
	begun   bool
	strip   int    // number of characters that may still be removed
	held    []byte // bytes of an incomplete character
	out     []byte
}

// NewDecoder returns a decoder at the beginning of a text. The decoder either skips special tokens, such
// as the end of a turn, or writes their text.
func (t *Tokenizer) NewDecoder(skipSpecial bool) *Decoder {
	return &Decoder{t: t, special: !skipSpecial, strip: t.decoding.strip}
}

// Next returns the bytes that an id adds to the text. They are valid until the next call. Next holds
// back the bytes of an incomplete character, so that each result is valid UTF-8 if the text is. An id
// in a gap of the vocabulary adds nothing. For an id outside the vocabulary, Next returns an error
// and changes nothing.
func (d *Decoder) Next(id int) ([]byte, error) {
	if d.t.isGap(id) {
		return nil, nil
	}

	if err := d.t.check(id); err != nil {
		return nil, fmt.Errorf("hf: Decoder.Next: %w", err)
	}

	d.add(id)
	whole := len(d.held) - incomplete(d.held)
	d.out = append(d.out[:0], d.held[:whole]...)
	d.held = append(d.held[:0], d.held[whole:]...)
	return d.stripped(d.out), nil
}

// Prime continues after ids that the caller has already written, such as a prompt. If their text ends
// within a character, the following bytes complete it.
func (d *Decoder) Prime(ids []int) error {
	for _, id := range ids {
		if _, err := d.Next(id); err != nil {
			return err
		}
	}
	d.held = d.held[:0]
	return nil
}

// Flush returns the bytes that were held back and starts a new text.
func (d *Decoder) Flush() []byte {
	d.out = append(d.out[:0], d.held...)
	out := d.stripped(d.out)
	*d = Decoder{t: d.t, special: d.special, strip: d.t.decoding.strip, held: d.held[:0],
		out: d.out}
	return out
}

func (d *Decoder) add(id int) {
	if !d.special && d.t.skipped[id] {
		return
	}
	d.held = d.t.decoding.appendToken(d.held, d.t.written(id), !d.begun)
	d.begun = true
}

// Bytes returns the bytes that a token adds to a text that has begun, as decoded by a [Decoder] that skips
// special tokens. It returns nil for special tokens, and for ids in gaps of the vocabulary or outside it.
func (t *Tokenizer) Bytes(id int) []byte {
	if t.check(id) != nil || t.isGap(id) || t.skipped[id] {
		return nil
	}
	return t.decoding.appendToken(nil, t.written(id), false)
}

// stripped removes the characters to be stripped from the beginning of the text.
func (d *Decoder) stripped(out []byte) []byte {
	for d.strip > 0 && len(out) > 0 {
		r, n := utf8.DecodeRune(out)
		if r != d.t.decoding.stripped {
			d.strip = 0
			break
		}
		out = out[n:]
		d.strip--
	}
	return out
}

// incomplete returns the length of the incomplete character at the end of a text.
func incomplete(text []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(text); n++ {
		if end := text[len(text)-n:]; utf8.RuneStart(end[0]) {
			if utf8.FullRune(end) {
				return 0
			}
			return n
		}
	}
	return 0
}
