// Package hf reads the tokenizer.json of Hugging Face and gives the ids that Rust's tokenizers
// gives. It has byte-pair encodings at byte level (GPT-2, Llama 3, Qwen, SmolLM, Mistral's Tekken)
// and of characters with byte fallback (Llama 2, Mistral, Gemma). What a file asks for and this
// package does not do is an error that names it.
package hf

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/kasmina-go/kasmina/internal/regular"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// A Tokenizer is a [tokenizer.Tokenizer] that a tokenizer.json describes. All methods may be called
// at the same time.
//
// It is lossless except where the file is not. A normalizer such as NFC (Qwen) changes the text
// before it is encoded, and tokens that take the space around them give none back. The text of
// special tokens comes back from DecodeWhole alone.
type Tokenizer struct {
	name        string
	model       *model
	normalizers []normalizer
	raw         *matcher // tokens that are found before the text is normalized,
	normalized  *matcher // and those that are found after
	special     map[int]bool
	skipped     map[int]bool // special, and written as the file writes it or another such token
	added       map[string]int
	rewritten   map[int]string // added tokens as the normalizers write them
	template    template
	decoding    decoding
	begin, end  int // none if not known

	encoders sync.Pool // of *encoder, so that goroutines share no cache and need no lock
}

var (
	_ tokenizer.Tokenizer     = (*Tokenizer)(nil)
	_ tokenizer.DocumentEnder = (*Tokenizer)(nil)
)

const (
	fileName   = "tokenizer.json"
	configName = "tokenizer_config.json"

	maxFile   = 64 << 20 // bytes; the largest known, Gemma 3's, has 33 MB
	maxConfig = 16 << 20
)

// Load reads a tokenizer.json, or the one of a folder. The folder's tokenizer_config.json, if there
// is one, says which tokens begin and end a text.
func Load(path string) (*Tokenizer, error) {
	file, folder := path, ""
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		file, folder = filepath.Join(path, fileName), path
	}
	text, err := regular.Read(file, maxFile, "a tokenizer.json has")
	if err != nil {
		return nil, fmt.Errorf("hf: Load: %w", err)
	}
	var config []byte
	if folder != "" {
		config, err = regular.Read(filepath.Join(folder, configName), maxConfig,
			"a tokenizer_config.json has")
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("hf: Load: %w", err)
		}
	}
	t, err := parse(text, config)
	if err != nil {
		return nil, fmt.Errorf("hf: Load: %s: %w", path, err)
	}
	return t, nil
}

// Parse reads what a tokenizer.json holds, and the tokenizer_config.json beside it, which may be
// nil.
func Parse(text, config []byte) (*Tokenizer, error) {
	t, err := parse(text, config)
	if err != nil {
		return nil, fmt.Errorf("hf: Parse: %w", err)
	}
	return t, nil
}

func parse(text, config []byte) (*Tokenizer, error) {
	if len(text) > maxFile {
		return nil, fmt.Errorf("it has %d bytes, and a tokenizer.json at most %d", len(text),
			maxFile)
	}
	root, err := parseJSON(text)
	if err != nil {
		return nil, err
	}
	o := newObject("", root)
	t := &Tokenizer{special: map[int]bool{}, added: map[string]int{}, rewritten: map[int]string{}}
	if err := t.read(o); err != nil {
		return nil, err
	}
	if err := t.readConfig(config); err != nil {
		return nil, fmt.Errorf("%s: %w", configName, err)
	}
	sum := sha256.New()
	sum.Write(text)
	t.name = fmt.Sprintf("hf-%d-%x", t.VocabSize(), sum.Sum(fmt.Append(nil, t.begin, t.end))[:8])
	return t, nil
}

// read reads the members of the file.
func (t *Tokenizer) read(o *object) error {
	if version := o.textOr("version", "1.0"); version != "1.0" {
		o.fail("version", fmt.Errorf("%.40q is not supported, want \"1.0\"", version))
	}
	// The file keeps how somebody last truncated and padded texts. transformers does neither unless
	// a call asks for it, and nothing here does.
	for _, key := range []string{"truncation", "padding"} {
		if v, ok := o.take(key); ok && v[0] != '{' {
			o.fail(key, fmt.Errorf("it is %s, want null or an object", v.kind()))
		}
	}
	parts := map[string]value{}
	for _, key := range []string{"normalizer", "pre_tokenizer", "post_processor", "decoder",
		"added_tokens"} {
		if v, ok := o.take(key); ok {
			parts[key] = v
		}
	}
	modelValue, _ := o.must("model")
	err := o.done()
	if err != nil {
		return err
	}
	if v, ok := parts["normalizer"]; ok {
		if t.normalizers, err = readNormalizers(v); err != nil {
			return err
		}
	}
	var stages []stage
	byteLevel := false
	if v, ok := parts["pre_tokenizer"]; ok {
		if stages, byteLevel, err = readStages(v); err != nil {
			return err
		}
	}
	if err := t.checkStages(stages); err != nil {
		return err
	}
	if v, ok := parts["post_processor"]; ok {
		if t.template, err = readTemplate(v); err != nil {
			return err
		}
	}
	t.decoding = decoding{spaced: true}
	if v, ok := parts["decoder"]; ok {
		if t.decoding, err = readDecoding(v); err != nil {
			return err
		}
	}
	var added []addedToken
	if v, ok := parts["added_tokens"]; ok {
		if added, err = readAdded(v); err != nil {
			return err
		}
	}
	if t.model, err = readModel(modelValue, byteLevel); err != nil {
		return err
	}
	t.encoders.New = func() any { return newEncoder(t.model, stages) }
	return t.add(added)
}

// checkStages refuses a Metaspace that asks for the beginning of a text behind a normalizer that
// puts something there. Which piece is the first then depends on offsets.
func (t *Tokenizer) checkStages(stages []stage) error {
	for _, s := range stages {
		m, ok := s.(metaspace)
		if !ok || m.scheme != first {
			continue
		}
		for _, n := range t.normalizers {
			if _, ok := n.(prepend); ok {
				return errors.New("pre_tokenizer: prepend_scheme \"first\" with a Prepend " +
					"normalizer is not supported")
			}
		}
	}
	return nil
}

// add adds the added tokens, and checks that the template's are in the vocabulary.
func (t *Tokenizer) add(added []addedToken) error {
	if err := t.model.addTokens(added); err != nil {
		return err
	}
	t.raw, t.normalized = newMatcher(), newMatcher()
	for i := range added {
		a := &added[i]
		t.special[a.id], t.added[a.content] = a.special, a.id
		m, pattern := t.raw, []byte(a.content)
		if a.normalized {
			m, pattern = t.normalized, t.normalize(pattern)
			if string(pattern) != a.content {
				t.rewritten[a.id] = string(pattern)
			}
		}
		if err := m.add(a, pattern); err != nil {
			return fmt.Errorf("added_tokens[%d], %.60q: %w", i, a.content, err)
		}
	}
	t.skipped = map[int]bool{}
	for _, a := range added {
		other, ok := t.added[t.written(a.id)]
		t.skipped[a.id] = ok && t.special[other]
	}
	for _, id := range slices.Concat(t.template.before, t.template.behind) {
		if err := t.check(id); err != nil {
			return fmt.Errorf("post_processor: %w", err)
		}
	}
	return nil
}

// readConfig finds out which tokens begin and end a text.
func (t *Tokenizer) readConfig(config []byte) error {
	t.begin, t.end = none, none
	if config == nil {
		return nil
	}
	root, err := parseJSON(config)
	if err != nil {
		return err
	}
	return root.members(func(key []byte, member value) error {
		var id *int
		switch string(key) {
		case "bos_token":
			id = &t.begin
		case "eos_token":
			id = &t.end
		default:
			return nil // of models, chats and Python's classes
		}
		if member.isNull() {
			return nil
		}
		text, err := tokenText(member)
		if err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		ok := false
		if *id, ok = t.ID(text); !ok {
			return fmt.Errorf("%s: %.60q is not in the vocabulary", key, text)
		}
		return nil
	})
}

// tokenText returns the text of a token that is a string, or an object with its content.
func tokenText(v value) (string, error) {
	if v[0] == '"' {
		return v.text()
	}
	text := ""
	err := v.members(func(key []byte, member value) error {
		var err error
		if string(key) == "content" {
			text, err = member.text()
		}
		return err
	})
	return text, err
}

// Name returns "hf-", the size of the vocabulary and 16 hexadecimal digits that stand for the file.
func (t *Tokenizer) Name() string { return t.name }

// VocabSize returns the largest id plus one. Some ids below may stand for no token.
func (t *Tokenizer) VocabSize() int {
	if t.model == nil {
		return 0
	}
	return len(t.model.tokens)
}

// BeginningOfText returns the id of bos_token, or a negative number if there is none.
func (t *Tokenizer) BeginningOfText() int { return t.begin }

// EndOfDocument returns the id of eos_token, or a negative number if there is none.
func (t *Tokenizer) EndOfDocument() int { return t.end }

// Affixes returns the tokens that the file's template puts before and behind a text, such as the
// beginning of a text. Encode leaves them away.
func (t *Tokenizer) Affixes() (before, behind []int) {
	return slices.Clone(t.template.before), slices.Clone(t.template.behind)
}

// ID returns the id of a token as the file writes it, such as "<|im_end|>".
func (t *Tokenizer) ID(token string) (int, bool) {
	if t.model == nil {
		return 0, false
	}
	if id, ok := t.model.find(token); ok {
		return int(id), true
	}
	id, ok := t.added[token]
	return id, ok
}

// Token returns a token as the file writes it, or false for an id that stands for none.
func (t *Tokenizer) Token(id int) (string, bool) {
	if t.check(id) != nil {
		return "", false
	}
	return t.model.tokens[id].text, true
}

// IsSpecial reports whether an id is that of a special token.
func (t *Tokenizer) IsSpecial(id int) bool { return t.special[id] }

// isGap reports whether an id lies in the vocabulary and stands for no token. Models draw such ids,
// and as in Rust's tokenizers they add nothing to a text.
func (t *Tokenizer) isGap(id int) bool {
	return t != nil && t.model != nil && id >= 0 && id < len(t.model.tokens) && !t.model.tokens[id].ok
}

func (t *Tokenizer) check(id int) error {
	if t == nil || t.model == nil {
		return errors.New("the tokenizer is its zero value, want one that Load, Parse or Train " +
			"returns")
	}
	if id < 0 || id >= len(t.model.tokens) || !t.model.tokens[id].ok {
		return fmt.Errorf("id %d stands for no token of the vocabulary [0, %d)", id,
			len(t.model.tokens))
	}
	return nil
}

// written returns a token as the decoders take it.
func (t *Tokenizer) written(id int) string {
	if text, ok := t.rewritten[id]; ok {
		return text
	}
	return t.model.tokens[id].text
}

func (t *Tokenizer) normalize(text []byte) []byte {
	for _, n := range t.normalizers {
		text = n.normalize(text)
	}
	return text
}

// Encode returns the tokens of a text, without those of the template: encode(text,
// add_special_tokens=False) of Rust's tokenizers. The text of a special token becomes that token; a
// text that others wrote is for EncodeOrdinary. Bytes that are not UTF-8 count as characters of
// their own.
func (t *Tokenizer) Encode(text []byte) []int { return t.encode(text, false) }

// EncodeOrdinary is Encode where special tokens are text like any other.
func (t *Tokenizer) EncodeOrdinary(text []byte) []int { return t.encode(text, true) }

// EncodeWhole is Encode with the tokens of the template before and behind the text:
// encode(text) of Rust's tokenizers.
func (t *Tokenizer) EncodeWhole(text []byte) []int {
	return slices.Concat(t.template.before, t.Encode(text), t.template.behind)
}

func (t *Tokenizer) encode(text []byte, ordinary bool) []int {
	if t.model == nil {
		return nil
	}
	e := t.encoders.Get().(*encoder)
	defer t.encoders.Put(e)
	e.ids = make([]int, 0, len(text)/3)
	begin := true
	add := func(a *addedToken) {
		e.ids = append(e.ids, a.id)
		begin = false
	}
	t.raw.split(text, ordinary, func(a *addedToken, part []byte) {
		if a != nil {
			add(a)
			return
		}
		t.normalized.split(t.normalize(part), ordinary, func(a *addedToken, part []byte) {
			if a != nil {
				add(a)
				return
			}
			e.cut(part, begin)
			begin = false
		})
	})
	ids := e.ids
	e.ids = nil
	return ids
}

// Decode returns the bytes of the tokens, of special ones none. It is decode(ids) of Rust's
// tokenizers, except that bytes that are not UTF-8 stay what they are, and that an id outside the
// vocabulary is an error. An id in a gap of the vocabulary adds nothing. A Decoder does so as the ids
// come.
func (t *Tokenizer) Decode(ids []int) ([]byte, error) { return t.decode("Decode", ids, true) }

// DecodeWhole is Decode with special tokens as the file writes them.
func (t *Tokenizer) DecodeWhole(ids []int) ([]byte, error) {
	return t.decode("DecodeWhole", ids, false)
}

func (t *Tokenizer) decode(method string, ids []int, skipSpecial bool) ([]byte, error) {
	d := t.NewDecoder(skipSpecial)
	for i, id := range ids {
		if t.isGap(id) {
			continue
		}
		if err := t.check(id); err != nil {
			return nil, fmt.Errorf("hf: Tokenizer.%s: ids[%d]: %w", method, i, err)
		}
		d.add(id)
	}
	return slices.Clone(d.stripped(d.held)), nil
}
