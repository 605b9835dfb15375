package grammar

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm/sampler"
)

// endToken is the end token of vocabulary.
const endToken = 256

// vocabulary has all bytes, an end token, a token without bytes, and some tokens of several bytes, like the
// vocabularies of models.
var vocabulary = func() *Vocabulary {
	var texts [][]byte
	for b := range 256 {
		texts = append(texts, []byte{byte(b)})
	}
	texts = append(texts, []byte("</s>"), nil)
	for _, s := range []string{`{"`, `":`, `": `, `",`, `", "`, `"}`, `"]`, "}}", "]]", "[[", "{}", "[]", "true", "false",
		"null", "12", "123", "0.5", ".5", "-1", "e1", " ", "  ", "\n", "\n  ", "a", "ab", "abc", `\"`, `\\`, `\u`, "00", "é", "日本",
		"😀", "\xe6\x97", "\xa5x", `a":`, `"a`, `"b`, `"c"`, "name", `name":`, "2026", "-0", "-01", "T1", "@a"} {
		texts = append(texts, []byte(s))
	}
	return NewVocabulary(texts, []int{endToken})
}()

// draw generates a text of up to n tokens with random logits, and reports whether it is complete. Logits that
// prefer the ends of strings, arrays and objects keep the texts short.
func draw(t testing.TB, m *Matcher, r *rand.Rand, n int) (text string, complete bool) {
	t.Helper()
	s, err := sampler.New(sampler.Config{Temperature: 1, Seed: r.Uint64()})
	require.NoError(t, err)
	c := m.New()
	s.Constrain(c)
	var b bytes.Buffer
	logits := make([]float32, len(vocabulary.texts))
	eager := float32(r.IntN(8))
	for range n {
		for i := range logits {
			logits[i] = float32(3 * r.NormFloat64())
		}
		for _, end := range []byte(`"]}`) {
			logits[end] += eager
		}
		id, err := sampler.Draw(s, logits)
		require.NoError(t, err, "after %q", b.String())
		if id == endToken {
			require.True(t, c.Done())
			return b.String(), true
		}
		b.Write(vocabulary.texts[id])
		if s.Done() {
			return b.String(), true
		}
	}

	return b.String(), c.Complete()
}

// validator returns a validator of a schema.
func validator(t testing.TB, schema string) *jsonschema.Schema {
	t.Helper()
	v, err := jsonschema.UnmarshalJSON(strings.NewReader(schema))
	require.NoError(t, err)
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	require.NoError(t, c.AddResource("schema.json", v))
	compiled, err := c.Compile("schema.json")
	require.NoError(t, err, schema)
	return compiled
}

// requireValid checks that texts of the grammar of a schema match the schema.
func requireValid(t *testing.T, schema string, r *rand.Rand, texts int) {
	t.Helper()
	g, err := Schema([]byte(schema))
	require.NoError(t, err, schema)
	m, err := vocabulary.Matcher(g)
	require.NoError(t, err, schema)
	v := validator(t, schema)
	completed := 0
	for range 4 * texts {
		text, complete := draw(t, m, r, 400)
		if !complete {
			continue
		}
		completed++
		value, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
		require.NoError(t, err, "%s\n%q", schema, text)
		require.NoError(t, v.Validate(value), "%s\n%s", schema, text)
		if completed == texts {
			return
		}
	}

	require.Positive(t, completed, "no text is complete: %s", schema)
}

// schemas are schemas as users and programs write them.
var schemas = []string{
	`true`, `{}`,
	`{"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer","minimum":0,"maximum":150}},"required":["name","age"],"additionalProperties":false}`,
	`{"properties":{"a":{"type":"null"},"b":{"type":"boolean"},"c":{"enum":["x","y",3,null,{"k":[1]}]}}}`,
	`{"type":"object","properties":{"a":{"type":"integer"},"ab":{"const":"é\"\n"}},"additionalProperties":{"type":"boolean"},"required":["ab"]}`,
	`{"type":"object","additionalProperties":{"type":"number"}}`,
	`{"type":"object","required":["z","y"],"properties":{"y":{"type":"string","maxLength":2}}}`,
	`{"type":"array","items":{"type":"string","minLength":1,"maxLength":3},"minItems":1,"maxItems":4}`,
	`{"type":"array","prefixItems":[{"type":"integer"},{"type":"string"}],"items":false}`,
	`{"type":"array","prefixItems":[{"type":"null"},{"type":"boolean"}],"minItems":3,"maxItems":5}`,
	`{"$schema":"http://json-schema.org/draft-07/schema#","type":"array","items":[{"type":"null"},{"type":"boolean"}],"additionalItems":{"type":"integer"}}`,
	`{"type":["string","null"]}`,
	`{"type":"string","pattern":"^[A-Z]{2,3}-\\d+$","maxLength":9}`,
	`{"type":"string","pattern":"b+c","minLength":4}`, `{"type":"string","pattern":"[é\\x{65e5}-\\x{672c}]$"}`,
	`{"type":"string","pattern":"^(a|日|😀)*$","minLength":2,"maxLength":5}`,
	`{"type":"string","pattern":"^[^a-z\"]+$"}`, `{"type":"string","pattern":"^.$"}`, `{"type":"string","pattern":"^(?i:aé)$"}`,
	`{"type":"integer","minimum":-5,"exclusiveMaximum":17}`, `{"type":"integer","minimum":100}`,
	`{"type":"integer","maximum":-100}`, `{"type":"number","minimum":0,"maximum":1}`,
	`{"type":"number","exclusiveMinimum":0.25,"exclusiveMaximum":0.5}`, `{"type":"number","multipleOf":0.01,"minimum":-1,"maximum":99.5}`,
	`{"anyOf":[{"type":"integer"},{"type":"object","properties":{"a":{"$ref":"#"}}}]}`,
	`{"oneOf":[{"type":"object","properties":{"kind":{"const":"cat"},"lives":{"type":"integer"}},"required":["kind"]},{"type":"object","properties":{"kind":{"const":"dog"}},"required":["kind"]}]}`,
	`{"oneOf":[{"type":"string"},{"type":"integer"},{"type":"null"}]}`,
	`{"$defs":{"tree":{"type":"object","properties":{"value":{"type":"integer"},"children":{"type":"array","items":{"$ref":"#/$defs/tree"}}},"required":["value","children"]}},"$ref":"#/$defs/tree"}`,
	`{"$defs":{"a/b":{"type":"boolean"}},"type":"array","items":{"$ref":"#/$defs/a~1b","description":"flag"}}`,
	`{"allOf":[{"type":"object","properties":{"a":{"type":"number","minimum":1}},"required":["a"]},{"properties":{"a":{"type":"integer","maximum":3},"b":{"type":"null"}}}]}`,
	`{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"integer"}},"anyOf":[{"required":["a"]},{"required":["b"]}],"additionalProperties":false}`,
	`{"enum":[1,2,"a"],"type":"integer","minimum":2}`, `{"const":{"b":1,"a":[true]}}`,
	`{"type":"string","format":"date"}`, `{"type":"string","format":"time"}`, `{"type":"string","format":"date-time"}`,
	`{"type":"string","format":"duration"}`, `{"type":"string","format":"email"}`, `{"type":"string","format":"hostname"}`,
	`{"type":"string","format":"ipv4"}`, `{"type":"string","format":"ipv6"}`, `{"type":"string","format":"uuid"}`,
	`{"type":"object","properties":{"a":false,"b":{"type":"integer"}}}`,
	`{"type":"object","properties":{"next":{"anyOf":[{"$ref":"#"},{"type":"null"}]}},"required":["next"]}`,
}

func TestSchemas(t *testing.T) {
	for i, schema := range schemas {
		t.Run(fmt.Sprint(i), func(t *testing.T) { requireValid(t, schema, rand.New(rand.NewPCG(uint64(i), 1)), 15) })
	}
}

// TestRandomSchemas checks texts of random schemas.
func TestRandomSchemas(t *testing.T) {
	count := 150
	if testing.Short() {
		count = 20
	}

	for i := range count {
		r := rand.New(rand.NewPCG(uint64(i), 2))
		schema, err := json.Marshal(randomSchema(r, 3))
		require.NoError(t, err)
		if g, err := Schema(schema); err != nil {
			require.ErrorContains(t, err, "no value matches", "%s", schema)
		} else if _, err := vocabulary.Matcher(g); err != nil {
			require.NoError(t, err)
		} else {
			requireValid(t, string(schema), r, 5)
		}
	}
}

// randomSchema returns a schema with up to depth levels.
func randomSchema(r *rand.Rand, depth int) any {
	kinds := 11
	if depth == 0 {
		kinds = 7
	}

	switch r.IntN(kinds) {
	case 0:
		return map[string]any{"type": []string{"null", "boolean"}[r.IntN(2)]}
	case 1:
		low := r.IntN(300) - 150
		s := map[string]any{"type": "integer", "minimum": low}
		if r.IntN(2) == 0 {
			s["maximum"] = low + r.IntN(1000)
		}
		return s
	case 2:
		low := float64(r.IntN(4000)-2000) / 16
		return map[string]any{"type": "number", "exclusiveMinimum": low, "maximum": low + float64(1+r.IntN(100))/8}
	case 3:
		least := r.IntN(4)
		return map[string]any{"type": "string", "minLength": least, "maxLength": least + r.IntN(6)}
	case 4:
		patterns := []string{"^a*b$", "x", "^[a-c]+é?$", `^\d{3}(-\d{2})?$`, "^(foo|bar|日本){1,3}$", `"|\\`}
		return map[string]any{"type": "string", "pattern": patterns[r.IntN(len(patterns))]}
	case 5:
		return map[string]any{"enum": []any{"a", "ab", 1, nil, true, "\x01é"}[r.IntN(3):]}
	case 6:
		return map[string]any{"type": []string{"string", "integer", "number"}[r.IntN(3)]}
	case 7:
		s := map[string]any{"type": "array", "items": randomSchema(r, depth-1), "maxItems": r.IntN(4)}
		if r.IntN(2) == 0 {
			s["minItems"] = r.IntN(3)
		}
		return s
	case 8:
		return map[string]any{"anyOf": []any{randomSchema(r, depth-1), randomSchema(r, depth-1)}}
	}

	properties, required := map[string]any{}, []string{}
	for _, name := range []string{"a", "ab", "name", "é\n", `"`} {
		if r.IntN(2) == 0 {
			properties[name] = randomSchema(r, depth-1)
		}
		if r.IntN(4) == 0 {
			required = append(required, name)
		}
	}

	s := map[string]any{"type": "object", "properties": properties, "required": required}
	switch r.IntN(3) {
	case 0:
		s["additionalProperties"] = false
	case 1:
		s["additionalProperties"] = randomSchema(r, depth-1)
	}

	return s
}

// TestSchemaErrors checks that nothing that a schema demands is ignored.
func TestSchemaErrors(t *testing.T) {
	for schema, want := range map[string]string{
		`{`:                                   "not JSON",
		`{} {}`:                               "more than one",
		`3`:                                   "at the root: it is 3",
		`{"type":"text"}`:                     `no type "text"`,
		`{"type":[]}`:                         "type is []",
		`{"requierd":["a"]}`:                  `the keyword "requierd" is not supported`,
		`{"type":"array","uniqueItems":true}`: `"uniqueItems" is not supported`,
		`{"type":"object","minProperties":1}`: `"minProperties" is not supported`,
		`{"properties":{"a":{"not":{}}}}`:     `at /properties/a: the keyword "not"`,
		`{"items":{"contains":{}}}`:           `at /items: the keyword "contains"`,
		`{"patternProperties":{"a":true}}`:    `"patternProperties"`,
		`{"$ref":"https://example.com/a"}`:    "want one within the schema",
		`{"$ref":"#/$defs/a"}`:                "nothing at the $ref",
		`{"$ref":"#"}`:                        "no value matches",
		`{"allOf":[{"$ref":"#"}]}`:            "refers to itself",
		`{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]}`:            "no value matches",
		`{"type":"integer","minimum":3,"maximum":2}`:                                    "no value matches",
		`{"type":"integer","multipleOf":3}`:                                             "multipleOf is 3",
		`{"type":"integer","minimum":"3"}`:                                              "minimum is \"3\", want a number",
		`{"minimum":1e999999999}`:                                                       "want a number",
		`{"type":"string","minLength":-1}`:                                              "minLength is -1",
		`{"type":"string","maxLength":1e6}`:                                             "supports up to",
		`{"type":"string","minLength":3,"maxLength":2}`:                                 "no value matches",
		`{"type":"string","pattern":"a(?=b)"}`:                                          "is not supported",
		`{"type":"string","pattern":"\\bword"}`:                                         `\b and \B`,
		`{"type":"string","pattern":"^a{1000}$","maxLength":5}`:                         "no value matches",
		`{"type":"string","pattern":"(((a{30}){30}){30}){30}"}`:                         "not supported",
		`{"type":"string","pattern":"^b$a"}`:                                            "no value matches",
		`{"type":"string","pattern":7}`:                                                 "pattern is 7",
		`{"type":"string","format":"regex"}`:                                            "the format \"regex\" is not supported",
		`{"oneOf":[{"type":"integer"},{"type":"number"}]}`:                              "oneOf forbids",
		`{"oneOf":[{"properties":{"a":{"const":1}}},{"properties":{"a":{"const":2}}}]}`: "oneOf forbids",
		`{"anyOf":[]}`:           "at least one schema",
		`{"enum":[]}`:            "at least one value",
		`{"enum":[1],"const":2}`: "no value matches",
		`{"required":"a"}`:       "required is",
		`{"properties":[]}`:      "properties is []",
		`{"type":"object","required":["a"],"additionalProperties":false}`: "no value matches",
		`{"properties":{"a":{"$id":"x"}}}`:                                "$id is only supported at the root",
	} {
		_, err := Schema([]byte(schema))
		require.ErrorContains(t, err, want, schema)
		require.ErrorContains(t, err, "grammar: Schema: ")
	}
}

// TestConstraint checks that a text cannot end too early or go on after its end.
func TestConstraint(t *testing.T) {
	g, err := Schema([]byte(`{"type":"integer"}`))
	require.NoError(t, err)
	m, err := vocabulary.Matcher(Sequence(Text("<"), g, Text(">")))
	require.NoError(t, err)
	c := m.New()
	allowed := func() (all []int) {
		mask, err := c.Allowed()
		require.NoError(t, err)
		for id := range vocabulary.texts {
			if mask[id/64]>>(id%64)&1 != 0 {
				all = append(all, id)
			}
		}
		return all
	}

	require.Equal(t, []int{'<'}, allowed())
	require.Error(t, c.Accept(endToken))
	require.Error(t, c.Accept('>'))
	require.NoError(t, c.Accept('<'))
	require.NoError(t, c.Accept('0'))
	require.Equal(t, []int{'>'}, allowed())
	require.False(t, c.Complete())
	require.NoError(t, c.Accept('>'))
	require.True(t, c.Done())
	require.Equal(t, []int{endToken}, allowed())
	require.NoError(t, c.Accept(endToken))
	require.Error(t, c.Accept(endToken))

	// A vocabulary without the needed bytes is an error, and not an empty choice.
	m, err = NewVocabulary([][]byte{[]byte("a"), nil}, nil).Matcher(g)
	require.NoError(t, err)
	_, err = m.New().Allowed()
	require.ErrorContains(t, err, "no token that can follow")

	_, err = vocabulary.Matcher(Choice())
	require.ErrorIs(t, err, ErrNothing)
}

// TestMemory checks that a matcher frees cached states when there are too many, and that texts still
// continue correctly.
func TestMemory(t *testing.T) {
	g, err := Schema([]byte(`{"type":"string","minLength":3000,"maxLength":9000}`))
	require.NoError(t, err)
	m, err := vocabulary.Matcher(g)
	require.NoError(t, err)
	text, complete := draw(t, m, rand.New(rand.NewPCG(1, 1)), 8000)
	require.True(t, complete)
	require.NoError(t, json.Unmarshal([]byte(text), new(string)))
	require.LessOrEqual(t, len(m.automaton.states), mostStates+vocabulary.longest)
}

// FuzzSchema compiles arbitrary schemas, and generates a text of each.
func FuzzSchema(f *testing.F) {
	for _, s := range schemas {
		f.Add(s)
	}

	f.Fuzz(func(t *testing.T, schema string) {
		g, err := Schema([]byte(schema))
		if err != nil {
			return
		}
		m, err := vocabulary.Matcher(g)
		require.NoError(t, err)
		text, complete := draw(t, m, rand.New(rand.NewPCG(1, 1)), 50)
		require.True(t, !complete || json.Valid([]byte(text)), "%q permits %q", schema, text)
	})
}

// BenchmarkTokens times the tokens of an array of persons with a vocabulary of 128,000 tokens. The first text of a
// matcher computes the masks, and later texts use them.
func BenchmarkTokens(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	texts := slices.Clone(vocabulary.texts)
	for len(texts) < 128_000 {
		word := make([]byte, 1+r.IntN(9))
		letters := " etaoinshrdlucmfwypvbgkqjxzETAOIN0123456789_-./\xc3\xa9"
		if len(texts)%50 == 0 { // one in 50 has the marks of JSON
			letters = " etaoin\",:{}[]\n"
		}
		for i := range word {
			word[i] = letters[r.IntN(len(letters))]
		}
		texts = append(texts, word)
	}

	v := NewVocabulary(texts, []int{endToken})
	g, err := Schema([]byte(`{"type":"array","items":{"type":"object","properties":{"name":{"type":"string","maxLength":40},` +
		`"age":{"type":"integer","minimum":0},"tags":{"type":"array","items":{"enum":["red","green","blue"]}}},` +
		`"required":["name","age","tags"]},"minItems":20,"maxItems":20}`))
	require.NoError(b, err)

	for _, warm := range []bool{false, true} {
		b.Run(fmt.Sprintf("warm=%v", warm), func(b *testing.B) {
			tokens := 0
			var m *Matcher
			for b.Loop() {
				if m == nil || !warm {
					m, err = v.Matcher(g)
					require.NoError(b, err)
				}
				c := m.New()
				for !c.Done() {
					mask, err := c.Allowed()
					require.NoError(b, err)
					word := r.IntN(len(mask))
					for mask[word] == 0 {
						word = (word + 1) % len(mask)
					}
					id := 64*word + bits.TrailingZeros64(mask[word])
					require.NoError(b, c.Accept(id))
					tokens++
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(tokens), "ns/token")
		})
	}
}

// TestParse checks texts of grammars in GBNF.
func TestParse(t *testing.T) {
	for source, want := range map[string]string{
		`root ::= "a"{5}`:       "^aaaaa$",
		`root ::= "yes" | "no"`: "^(yes|no)$",
		"root ::= list # a comment\n\nlist ::= \"[\" item (\",\" item){0,3} \"]\"\nitem ::= [a-c]+ | [^a-z\\n\\]]": `^\[([a-c]+|[^a-z\n\]])(,([a-c]+|[^a-z\n\]])){0,3}\]$`,
		"root ::= (\n  \"x\"? |\n  \"y\"\n) . \"\\u00e9\\x41\\\"\"":                                                `^(?s:(x?|y).éA")$`,
		`root ::= "(" root? ")"`: `^\(+\)+$`,
		`root ::= [-+]{2,}`:      `^[-+]{2,}$`,
	} {
		g, err := Parse(source)
		require.NoError(t, err, source)
		m, err := vocabulary.Matcher(g)
		require.NoError(t, err)
		complete := 0
		for seed := range uint64(40) {
			r := rand.New(rand.NewPCG(seed, 0))
			if text, ok := draw(t, m, r, 60); ok && utf8.ValidString(text) {
				complete++
				require.Regexp(t, want, text)
			}
		}
		require.Positive(t, complete, source)
	}

	for source, want := range map[string]string{
		``:                        "root is missing",
		`root ::= a`:              `"a" is used but not defined`,
		`root ::= root "a" | "b"`: "can start with itself",
		"root ::= a\na ::= b? a \"x\"\nb ::= \"b\"": "can start with itself",
		`root ::= "a`:                    "line 1: a literal or a class is not closed",
		`root ::= [a`:                    "not closed",
		`root ::= [b-a]`:                 "is empty",
		`root ::= ("a"`:                  "parenthesis",
		"root ::= \"a\"\nroot ::= \"b\"": "defined twice",
		`root = "a"`:                     "want ::=",
		`root ::= "a"{3,2}`:              "repetition",
		`root ::= "a")`:                  "end of the line",
		`root ::= "\q"`:                  "escape sequence",
		`root ::= "(" root ")"`:          "no text follows",
		"root ::= \"\xff\"":              "UTF-8",
	} {
		_, err := Parse(source)
		require.ErrorContains(t, err, want, source)
	}
}

// FuzzParse compiles arbitrary grammars in GBNF, and generates a text of each.
func FuzzParse(f *testing.F) {
	for _, s := range []string{`root ::= "a"{5}`, "root ::= a | b*\na ::= [^x-z]\nb ::= (\"c\" d)? .\nd ::= a+", "root ::= root \"a\""} {
		f.Add(s)
	}

	f.Fuzz(func(t *testing.T, source string) {
		g, err := Parse(source)
		if err != nil {
			return
		}
		m, err := vocabulary.Matcher(g)
		require.NoError(t, err)
		draw(t, m, rand.New(rand.NewPCG(1, 1)), 30)
	})
}
