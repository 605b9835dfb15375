package hf

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/bounded"
)

// file returns a tokenizer.json with a model that can encode a and b, and with the given members.
func file(members string) string {
	if members != "" {
		members += ","
	}
	return `{` + members + `"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}}`
}

// withModel returns a tokenizer.json that consists of a model only.
func withModel(members string) string { return `{"model":{"type":"BPE",` + members + `}}` }

const smallVocab = `"vocab":{"a":0,"b":1,"ab":2}`

func added(members string) string {
	return file(`"added_tokens":[{"id":3,"content":"<s>"},{` + members + `}]`)
}

func splitBy(pattern string) string {
	return file(fmt.Sprintf(`"pre_tokenizer":{"type":"Split","pattern":{"Regex":%q},`+
		`"behavior":"Isolated","invert":false}`, pattern))
}

func TestParseErrors(t *testing.T) {
	sequence := func(list, item string, n int) string {
		return fmt.Sprintf(`{"type":"Sequence",%q:[%s]}`, list,
			strings.Join(slices.Repeat([]string{item}, n), ","))
	}
	double := `{"type":"Replace","pattern":{"String":"a"},"content":"aa"}`
	for _, c := range []struct{ name, text, want string }{
		{"empty", "", "ends inside of a value"},
		{"not JSON", "kasmina", "want a value"},
		{"cut off", file("")[:50], "ends inside of a value"},
		{"two values", file("") + "{}", "after the value"},
		{"deep", strings.Repeat("[", 1<<20), "nested deeper than 64"},
		{"deep inside", file(`"normalizer":` + strings.Repeat(`{"a":`, 1<<16)), "nested deeper"},
		{"not UTF-8", "{\"\xff\":1}", "not UTF-8"},
		{"half a surrogate", withModel(`"vocab":{"\ud800":1},"merges":[]`), "not a character"},
		{"a key twice", file(`"model":{}`), `"model" occurs twice`},
		{"an unknown key", file(`"extra":{"x":1}`), "extra: it is unknown"},
		{"another version", file(`"version":"2.0"`), `version: "2.0" is not supported`},
		{"truncation", file(`"truncation":8`), "truncation"},
		{"padding", file(`"padding":[]`), "padding"},
		{"no model", `{"version":"1.0"}`, "model: it is missing"},

		{"Unigram", `{"model":{"type":"Unigram","vocab":[]}}`, `type "Unigram" is not supported`},
		{"dropout", withModel(smallVocab + `,"merges":[],"dropout":0.1`), "model.dropout: 0.1"},
		{"prefix", withModel(smallVocab + `,"merges":[],"continuing_subword_prefix":"##"`),
			"continuing_subword_prefix"},
		{"suffix", withModel(smallVocab + `,"merges":[],"end_of_word_suffix":"</w>"`), "</w>"},
		{"an unknown trait", withModel(smallVocab + `,"merges":[],"sorcery":true`),
			"model.sorcery: it is unknown"},
		{"unknown token", withModel(smallVocab + `,"merges":[],"unk_token":"?"`),
			`unk_token: "?" is not in the vocabulary`},
		{"one id twice", withModel(`"vocab":{"a":0,"b":0},"merges":[]`), "both have id 0"},
		{"one token twice", withModel(`"vocab":{"a":0,"\u0061":1},"merges":[]`), "occurs twice"},
		{"a huge id", withModel(`"vocab":{"a":4294967295},"merges":[]`), "want an integer from 0"},
		{"ids with holes", withModel(`"vocab":{"a":1000000},"merges":[]`), "but ids up to 1000000"},
		{"a negative id", withModel(`"vocab":{"a":-1},"merges":[]`), "want an integer from 0"},
		{"half an id", withModel(`"vocab":{"a":0.5},"merges":[]`), "want an integer from 0"},
		{"a vocabulary of pairs", withModel(`"vocab":[["a",0]],"merges":[]`), "want an object"},
		{"a merge of what is not", withModel(smallVocab + `,"merges":["a b","ab c"]`),
			`merge 1, "ab c", names "c"`},
		{"a merge to what is not", withModel(smallVocab + `,"merges":[["ab","ab"]]`),
			`names "abab"`},
		{"a merge with itself", withModel(smallVocab + `,"merges":["a a"]`), `names "aa"`},
		{"a merge that loops", withModel(`"vocab":{"a":0,"":1},"merges":[["a",""],["","a"]]`),
			"an empty token"},
		{"half a merge", withModel(smallVocab + `,"merges":["ab"]`), "want two tokens"},
		{"a merge of three", withModel(smallVocab + `,"merges":[["a","b","a"]]`), "more than two"},
		{"merges of numbers", withModel(smallVocab + `,"merges":[7]`), "want an array"},
		{"fallback at byte level", `{"pre_tokenizer":{"type":"ByteLevel"},"model":{` + smallVocab +
			`,"merges":[],"byte_fallback":true}}`, "byte_fallback"},

		{"a token twice", added(`"id":4,"content":"<s>"`), "occurs twice"},
		{"an id of another", added(`"id":1,"content":"</s>"`), "its place in the vocabulary is 4"},
		{"a huge added id", added(`"id":2000000000,"content":"</s>"`), "its place"},
		{"an empty token", added(`"id":4,"content":""`), "want 1 to 512"},
		{"a long token", added(`"id":4,"content":"` + strings.Repeat("x", 513) + `"`), "1 to 512"},
		{"an unknown flag", added(`"id":4,"content":"x","fancy":true`), "fancy: it is unknown"},
		{"one pattern twice", file(`"normalizer":{"type":"NFC"},"added_tokens":[` +
			`{"id":3,"content":"\u00e9"},{"id":4,"content":"e\u0301"}]`), "matches the same text as"},

		{"normalizer", file(`"normalizer":{"type":"NFKC"}`), `normalizer: type "NFKC"`},
		{"one inside", file(`"normalizer":{"type":"Sequence","normalizers":[{"type":"NFC"},` +
			`{"type":"Lowercase"}]}`), `normalizer.normalizers[1]: type "Lowercase"`},
		{"a pattern there", file(`"normalizer":{"type":"Replace","pattern":{"Regex":"a"},` +
			`"content":""}`), "normalizer.pattern.Regex: regular expressions"},
		{"growth", file(`"normalizer":` + sequence("normalizers", double, 20)),
			"more than 64 times"},
		{"too many", file(`"normalizer":` + sequence("normalizers", `{"type":"NFC"}`, 1<<16)),
			"more than 32 components"},
		{"pre-tokenizer", file(`"pre_tokenizer":{"type":"Whitespace"}`), `type "Whitespace"`},
		{"after bytes", file(`"pre_tokenizer":{"type":"Sequence","pretokenizers":[` +
			`{"type":"ByteLevel"},{"type":"Digits"}]}`), "type Digits after ByteLevel"},
		{"scheme", file(`"pre_tokenizer":{"type":"Metaspace","replacement":"_",` +
			`"prepend_scheme":"last"}`), "prepend_scheme"},
		{"behavior", strings.Replace(splitBy("a"), "Isolated", "Isolating", 1), "Isolating"},
		{"first after Prepend", file(`"normalizer":{"type":"Prepend","prepend":"_"},` +
			`"pre_tokenizer":{"type":"Metaspace","replacement":"_","prepend_scheme":"first"}`),
			"with a Prepend normalizer"},

		{"exponential", splitBy(`(?:a+)+b`), "a repetition of a repetition"},
		{"exponential count", splitBy(`(?:a*){50}`), "this quantifier"},
		{"exponential choice", splitBy(`(?:a|aa)+b`), "a repetition of a choice"},
		{"exponential option", splitBy(`(?:aa?)+b`), "a repetition of a choice"},
		{"exponential options", splitBy(`(?:a|aa?){30}b`), "a repetition of a choice"},
		{"of a high power", splitBy(`[a-z]+[a-y]+[a-x]+[a-w]+b`), "more than 3 successive repetitions"},
		{"of a high power by counts", splitBy(`a{1,500}a{1,500}a{1,500}a{1,500}b`),
			"more than 3 successive repetitions"},
		{"nothing", splitBy(`a*`), "an empty match"},
		{"lookahead alone", splitBy(`(?=a)`), "an empty match"},
		{"possessive", splitBy(`\s++`), "a quantifier of a quantifier"},
		{"anchor", splitBy(`^a`), `'^' is not supported`},
		{"boundary", splitBy(`\bfoo`), "this escape"},
		{"hexadecimal", splitBy(`\h`), "this escape"},
		{"lookbehind", splitBy(`(?<=a)b`), "this kind of group"},
		{"case", splitBy(`(?i:strasse)`), "this kind of group"},
		{"intersection", splitBy(`[a-z&&[^b]]`), "a class in a class"},
		{"category", splitBy(`\p{Cn}`), "this category"},
		{"open class", splitBy(`[a`), "a class without an end"},
		{"open group", splitBy(`(a`), "a group without an end"},
		{"deep groups", splitBy(strings.Repeat("(", 100)), "groups nested deeper than 16"},
		{"a long pattern", splitBy(strings.Repeat("a", 5000)), "want at most 4096"},

		{"post-processor", file(`"post_processor":{"type":"RobertaProcessing"}`), "Roberta"},
		{"template", file(`"post_processor":{"type":"TemplateProcessing","single":[` +
			`{"SpecialToken":{"id":"x","type_id":0}},{"Sequence":{"id":"A","type_id":0}}]}`),
			`"x" is not among the special_tokens`},
		{"template id", file(`"post_processor":{"type":"TemplateProcessing","single":[` +
			`{"SpecialToken":{"id":"x","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],` +
			`"special_tokens":{"x":{"id":"x","ids":[9],"tokens":["x"]}}}`),
			"id 9 is not a token"},
		{"template without text", file(`"post_processor":{"type":"TemplateProcessing",` +
			`"single":[]}`), "no sequence A"},
		{"decoder", file(`"decoder":{"type":"WordPiece"}`), `decoder: type "WordPiece"`},
		{"order of decoders", file(`"decoder":{"type":"Sequence","decoders":[{"type":"Fuse"},` +
			`{"type":"ByteFallback"}]}`), "not supported at this place"},
		{"strip at the end", file(`"decoder":{"type":"Sequence","decoders":[{"type":"Fuse"},` +
			`{"type":"Strip","content":" ","start":1,"stop":1}]}`), "stop: 1 is not supported"},
	} {
		t.Run(c.name, func(t *testing.T) {
			bounded.Run(t, int64(len(c.text)), func() {
				tok, err := Parse([]byte(c.text), nil)
				require.ErrorContains(t, err, c.want)
				require.Nil(t, tok)
			})
		})
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	write(fileName, file(`"added_tokens":[{"id":3,"content":"<s>","special":true}]`))
	tok, err := Load(dir)
	require.NoError(t, err)
	require.Equal(t, -1, tok.EndOfDocument())
	write(configName, `{"bos_token":{"content":"<s>","lstrip":false},"eos_token":"b","other":[1]}`)
	withEnd, err := Load(dir)
	require.NoError(t, err)
	require.Equal(t, 3, withEnd.BeginningOfText())
	require.Equal(t, 1, withEnd.EndOfDocument())
	require.NotEqual(t, tok.Name(), withEnd.Name())
	require.True(t, withEnd.IsSpecial(3))
	require.Equal(t, 4, withEnd.VocabSize())
	token, ok := withEnd.Token(2)
	require.True(t, ok)
	require.Equal(t, "ab", token)
	write(configName, `{"eos_token":"</s>"}`)
	_, err = Load(dir)
	require.ErrorContains(t, err, `"</s>" is not in the vocabulary`)
	_, err = Load(filepath.Join(dir, "nothing"))
	require.ErrorIs(t, err, os.ErrNotExist)

	large := write("large.json", "{}")
	require.NoError(t, os.Truncate(large, 100<<20))
	bounded.Run(t, 0, func() {
		_, err = Load(large)
		require.ErrorContains(t, err, "has 104857600 bytes, but a tokenizer.json has at most")
	})
}

func TestUnknownIDs(t *testing.T) {
	tok, err := Parse([]byte(withModel(`"vocab":{"a":0,"b":2},"merges":[]`)), nil)
	require.NoError(t, err)
	for _, id := range []int{-1, 3, 1 << 40} {
		_, err := tok.Decode([]int{0, id})
		require.ErrorContains(t, err, fmt.Sprintf("ids[1]: id %d is not a token", id))
		d := tok.NewDecoder(false)
		_, err = d.Next(id)
		require.Error(t, err)
	}
}

// TestInvalidUTF8ComesBack checks that invalid UTF-8, which Rust's tokenizers don't accept, survives
// encoding and decoding.
func TestInvalidUTF8ComesBack(t *testing.T) {
	g := readGolden(t)
	text := "a\xff\xc3 \xe2\x82 b\xed\xa0\x80\n"
	for _, name := range []string{"gpt2", "llama3", "qwen", "gemma", "llama2", "mistral"} {
		tok := g.load(t, name)
		back, err := tok.Decode(tok.Encode([]byte(text)))
		require.NoError(t, err)
		require.Equal(t, text, string(back), name)
	}
}

// TestLongPieces encodes a single piece of a million letters, which takes time in O(n log n). A quadratic
// merge would take hours.
func TestLongPieces(t *testing.T) {
	g := readGolden(t)
	for _, name := range []string{"gpt2", "llama3", "gemma", "llama2"} {
		tok := g.load(t, name)
		text := []byte(strings.Repeat("a", 1<<20))
		back, err := tok.Decode(tok.Encode(text))
		require.NoError(t, err)
		require.Equal(t, text, back)
	}
}

func FuzzParse(f *testing.F) {
	g := readGolden(f)
	for _, t := range g.Tokenizers {
		f.Add([]byte(t.File), []byte(nil), "It's 1234 ▁\n<s>")
	}

	f.Add([]byte(file("")), []byte(`{"bos_token":"a","eos_token":{"content":"b"}}`), "ab")
	f.Fuzz(func(t *testing.T, file, config []byte, text string) {
		if len(config) == 0 {
			config = nil // no configuration
		}
		var tok *Tokenizer
		var err error
		bounded.Run(t, int64(len(file)+len(config)), func() { tok, err = Parse(file, config) })
		if err != nil {
			require.Nil(t, tok)
			return
		}
		ids := tok.EncodeWhole([]byte(text))
		_, err = tok.Decode(ids)
		require.NoError(t, err)
		d := tok.NewDecoder(true)
		for _, id := range ids {
			_, err := d.Next(id)
			require.NoError(t, err)
		}
		d.Flush()
		tok.EncodeOrdinary([]byte(text))
	})
}

// TestPrime checks that the decoder returns the text after a prompt even if the prompt ends within a
// character.
func TestPrime(t *testing.T) {
	g := readGolden(t)
	for _, name := range []string{"gpt2", "llama3", "gemma"} {
		tok := g.load(t, name)
		for _, text := range [][2]string{{"caf\xc3", "\xa9 au lait"}, {"\xf0\x9f", "\x98\x80"},
			{"a", "b"}, {"\xe9", "a"}} {
			d := tok.NewDecoder(true)
			require.NoError(t, d.Prime(tok.Encode([]byte(text[0]))))
			var got []byte
			for _, b := range []byte(text[1]) {
				for _, id := range tok.Encode([]byte{b}) {
					part, err := d.Next(id)
					require.NoError(t, err)
					got = append(got, part...)
				}
			}
			require.Equal(t, text[1], string(append(got, d.Flush()...)), name)
		}
	}
}

// TestGaps checks texts with ids in gaps of the vocabulary. The wanted texts come from Rust's tokenizers
// 0.23.3.
func TestGaps(t *testing.T) {
	for decoder, want := range map[string][6]string{
		`null`: {"a b", "a b", "▁c b", "▁c ▁c", "<0xC3> <0xA9>", ""},
		`{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}`: {"ab",
			"ab", "▁cb", "▁c▁c", "<0xC3><0xA9>", ""},
		`{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}`: {"ab", "ab",
			"cb", "c c", "<0xC3><0xA9>", ""},
		`{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},
			{"type":"ByteFallback"},{"type":"Fuse"},
			{"type":"Strip","content":" ","start":1,"stop":0}]}`: {"ab", "ab", "cb", "c c", "é", ""},
	} {
		tok, err := Parse([]byte(`{"decoder":`+decoder+`,"model":{"type":"BPE","merges":[],
			"vocab":{"a":0,"b":2,"▁c":4,"<0xC3>":6,"<0xA9>":8}}}`), nil)
		require.NoError(t, err)
		for i, ids := range [][]int{{1, 0, 3, 2}, {0, 1, 2}, {1, 4, 2}, {4, 1, 4}, {6, 1, 8}, {1}} {
			got, err := tok.DecodeWhole(ids)
			require.NoError(t, err)
			require.Equal(t, want[i], string(got), "%s of %v", decoder, ids)

			d, parts := tok.NewDecoder(false), []byte(nil)
			for _, id := range ids {
				part, err := d.Next(id)
				require.NoError(t, err)
				parts = append(parts, part...)
			}
			require.Equal(t, want[i], string(append(parts, d.Flush()...)), "%s of %v", decoder, ids)
		}
	}
}

// TestTruncationAndPadding checks that texts are encoded at their full length, as in transformers, even
// if the file has settings for truncation and padding.
func TestTruncationAndPadding(t *testing.T) {
	const model = `"model":{"type":"BPE","vocab":{"a":0,"b":1},"merges":[]}}`
	for _, c := range []string{
		`"truncation":{"direction":"Right","max_length":2,"strategy":"LongestFirst","stride":0}`,
		`"padding":{"strategy":{"Fixed":64},"direction":"Left","pad_to_multiple_of":null,"pad_id":0,
			"pad_type_id":0,"pad_token":"a"}`,
		`"truncation":{"direction":"Left","max_length":2,"strategy":"OnlyFirst","stride":1},
			"padding":{"strategy":"BatchLongest","direction":"Right","pad_to_multiple_of":8,"pad_id":0,
			"pad_type_id":0,"pad_token":"a"}`,
	} {
		tok, err := Parse([]byte(`{`+c+`,`+model), nil)
		require.NoError(t, err)
		require.Equal(t, []int{0, 1, 0, 1, 1}, tok.EncodeWhole([]byte("ababb")))
	}

	for _, key := range []string{"truncation", "padding"} {
		_, err := Parse([]byte(`{"`+key+`":5,`+model), nil)
		require.ErrorContains(t, err, key+": it is a number, want null or an object")
	}
}
