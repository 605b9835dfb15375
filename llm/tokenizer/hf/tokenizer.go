// Package hf implements the tokenizers described by Hugging Face's tokenizer.json files. It produces
// the same ids as the Rust library tokenizers.
//
// The package supports byte-level encodings (GPT-2, Llama 3, Qwen, SmolLM, Mistral's Tekken) and
// character-level ones with byte fallback (Llama 2, Mistral, Gemma). If a file uses an unsupported
// feature, loading it returns an error that names the feature.
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

// A Tokenizer implements [tokenizer.Tokenizer] as described by a tokenizer.json. It is safe for
// concurrent use.
//
// The tokenizer is lossless if the file is. Normalizers such as NFC (Qwen) change the text before
// encoding, and tokens that absorb the space around them do not restore it. Only DecodeWhole returns the
// text of special tokens.
type Tokenizer struct {
	name        string
	model       *model
	normalizers []normalizer
	raw         *matcher // tokens matched before normalization
	normalized  *matcher // tokens matched after normalization
	special     map[int]bool
	skipped     map[int]bool // special tokens, and tokens with the same text
	added       map[string]int
	rewritten   map[int]string // added tokens after normalization
	template    template
	decoding    decoding
	begin, end  int // none if unknown

	encoders sync.Pool // holds *encoder, so that goroutines share no cache and need no lock
}

var (
	_ tokenizer.Tokenizer     = (*Tokenizer)(nil)
	_ tokenizer.DocumentEnder = (*Tokenizer)(nil)
)

const (
	fileName   = "tokenizer.json"
	configName = "tokenizer_config.json"

	maxFile   = 64 << 20 // bytes; the largest known file, Gemma 3's, takes 33 MB
	maxConfig = 16 << 20
)

// Load reads a tokenizer.json, given its path or the path of its folder. If the folder contains a
// tokenizer_config.json, that file defines the tokens at the beginning and the end of a text.
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

// Parse parses the contents of a tokenizer.json and of a tokenizer_config.json, which may be nil.
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

	// Ignore the recorded settings for truncation and padding, as does transformers, which truncates
	// and pads only on request.
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

// checkStages rejects a Metaspace that depends on the beginning of the text after a normalizer that
// adds text there. In this case, the result would depend on offsets.
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

// add adds the added tokens and checks that the vocabulary contains the template's tokens.
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

	for _, id := range slices.Concat(t.template.before, t.template.after) {
		if err := t.check(id); err != nil {
			return fmt.Errorf("post_processor: %w", err)
		}
	}

	return nil
}

// readConfig determines the tokens at the beginning and the end of a text.
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
			return nil // used for models, chats and Python classes
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

// tokenText returns the text of a token, given as a string or as an object with its content.
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

// Name returns "hf-", the size of the vocabulary, and 16 hexadecimal digits of a hash of the file.
func (t *Tokenizer) Name() string { return t.name }

// VocabSize returns the largest id plus one. Some smaller ids may be unused.
func (t *Tokenizer) VocabSize() int {
	return len(t.model.tokens)
}

// BeginningOfText returns the id of bos_token, or a negative number if it is undefined.
func (t *Tokenizer) BeginningOfText() int { return t.begin }

// EndOfDocument returns the id of eos_token, or a negative number if it is undefined.
func (t *Tokenizer) EndOfDocument() int { return t.end }

// Affixes returns the tokens that the file's template adds before and after a text, such as the
// beginning-of-text token. Encode does not add them.
func (t *Tokenizer) Affixes() (before, after []int) {
	return slices.Clone(t.template.before), slices.Clone(t.template.after)
}

// ID returns the id of a token, given as written in the file, such as "<|im_end|>".
func (t *Tokenizer) ID(token string) (int, bool) {
	if id, ok := t.model.find(token); ok {
		return int(id), true
	}
	id, ok := t.added[token]
	return id, ok
}

// Token returns a token as written in the file. It returns false if the id has no token.
func (t *Tokenizer) Token(id int) (string, bool) {
	if t.check(id) != nil {
		return "", false
	}
	return t.model.tokens[id].text, true
}

// IsSpecial reports whether id belongs to a special token.
func (t *Tokenizer) IsSpecial(id int) bool { return t.special[id] }

// isGap reports whether an id within the vocabulary is unused. Models can generate such ids. As in
// Rust's tokenizers, they add nothing to a text.
func (t *Tokenizer) isGap(id int) bool {
	return id >= 0 && id < len(t.model.tokens) && !t.model.tokens[id].ok
}

func (t *Tokenizer) check(id int) error {
	if id < 0 || id >= len(t.model.tokens) || !t.model.tokens[id].ok {
		return fmt.Errorf("id %d is not a token of the vocabulary [0, %d)", id,
			len(t.model.tokens))
	}
	return nil
}

// written returns a token as input for the decoders.
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

// Encode returns the tokens of a text without the tokens of the template, like encode(text,
// add_special_tokens=False) in Rust's tokenizers. The text of a special token becomes that token. For
// untrusted text, use EncodeOrdinary. Each byte that is not valid UTF-8 counts as a character.
func (t *Tokenizer) Encode(text []byte) []int { return t.encode(text, false) }

// EncodeOrdinary is like Encode, but treats special tokens as ordinary text.
func (t *Tokenizer) EncodeOrdinary(text []byte) []int { return t.encode(text, true) }

// EncodeWhole is like Encode, but adds the tokens of the template, like encode(text) in Rust's
// tokenizers.
func (t *Tokenizer) EncodeWhole(text []byte) []int {
	return slices.Concat(t.template.before, t.Encode(text), t.template.after)
}

func (t *Tokenizer) encode(text []byte, ordinary bool) []int {
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

// Decode returns the bytes of the tokens without special tokens, like decode(ids) in Rust's
// tokenizers. There are two differences: bytes that are not valid UTF-8 are preserved, and an id
// outside the vocabulary is an error. Unused ids within the vocabulary add nothing. To decode ids one
// by one, use a Decoder.
func (t *Tokenizer) Decode(ids []int) ([]byte, error) { return t.decode("Decode", ids, true) }

// DecodeWhole is like Decode, but includes special tokens as written in the file.
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
