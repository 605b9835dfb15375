package serve

import (
	"encoding/json"
	"errors"
	"slices"
	"sync"

	"github.com/kasmina-go/kasmina/llm/grammar"
)

// matchers holds the matchers of the grammars that a model's requests used last.
type matchers struct {
	model      *Model
	mu         sync.Mutex
	vocabulary *grammar.Vocabulary
	recent     []namedMatcher // most recently used first
}

type namedMatcher struct {
	name string
	*grammar.Matcher
}

// mostMatchers is the number of matchers that a model keeps, one for each grammar.
const mostMatchers = 16

// matcher returns the matcher for a grammar. Grammars with equal names are equal.
func (s *matchers) matcher(name string, g *grammar.Grammar) (*grammar.Matcher, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := slices.IndexFunc(s.recent, func(n namedMatcher) bool { return n.name == name })
	if at >= 0 {
		found := s.recent[at]
		s.recent = slices.Insert(slices.Delete(s.recent, at, at+1), 0, found)
		return found.Matcher, nil
	}

	if s.vocabulary == nil {
		s.vocabulary = grammar.VocabularyOf(s.model.Tokenizer, s.model.Vocab, s.model.End)
	}
	made, err := s.vocabulary.Matcher(g)
	if err != nil {
		return nil, err
	}
	s.recent = slices.Insert(s.recent, 0, namedMatcher{name, made})
	s.recent = s.recent[:min(len(s.recent), mostMatchers)]
	return made, nil
}

// A wanted describes the texts that a request permits.
type wanted struct {
	param   string // parameter of the request that sets the limit
	name    string // name of the grammar
	grammar *grammar.Grammar
}

// want records that a request permits only the texts of a grammar. Its source identifies it.
func (p *params) want(w *wanted, param, source string, g *grammar.Grammar, err error) {
	switch {
	case p.err != nil:
	case w.grammar != nil:
		p.fail(param, "the request restricts the answer with %s already", w.param)
	case err != nil:
		p.fail(param, "%s", reason(err))
	default:
		*w = wanted{param, source, g}
	}
}

// reason returns the message of an error of package grammar without the name of the function.
func reason(err error) string {
	if inner := errors.Unwrap(err); inner != nil {
		return inner.Error()
	}
	return err.Error()
}

// wantSchema records that a request permits only JSON of a schema.
func (p *params) wantSchema(w *wanted, param string, schema json.RawMessage) {
	if isNull(schema) {
		p.fail(param, "the schema is missing")
		return
	}
	g, err := grammar.Schema(schema)
	p.want(w, param, "schema "+string(schema), g, err)
}

// wantObject records that a request permits only JSON objects.
func (p *params) wantObject(w *wanted, param string) {
	p.want(w, param, "object", grammar.Object(), nil)
}

// An answerFormat describes the form of an answer. The APIs use different members for its schema.
type answerFormat struct {
	Type       string
	Schema     json.RawMessage
	JSONSchema struct{ Schema json.RawMessage } `json:"json_schema"`
}

// readFormat reads a parameter with the form of the answer.
func (p *params) readFormat(w *wanted, param string, f answerFormat) {
	schema := f.Schema
	if isNull(schema) {
		schema = f.JSONSchema.Schema
	}
	switch {
	case f.Type == "text":
	case f.Type == "json_object" && isNull(schema):
		p.wantObject(w, param)
	case f.Type == "json_object", f.Type == "json_schema":
		p.wantSchema(w, param, schema)
	default:
		p.fail(param, `its type is %.40q, want "text", "json_object" or "json_schema"`, f.Type)
	}
}

// readWanted reads the parameters that restrict an answer: response_format of OpenAI's API, json_schema
// and grammar of llama.cpp, and guided_json and guided_choice of vLLM.
func (p *params) readWanted() (w wanted) {
	if p.has("response_format") {
		var f answerFormat
		p.decode("response_format", "an object with a type", &f)
		p.readFormat(&w, "response_format", f)
	}

	for _, name := range []string{"json_schema", "guided_json"} {
		if !p.has(name) {
			continue
		}
		schema := p.all[name]
		var text string
		if json.Unmarshal(schema, &text) == nil { // vLLM accepts the text of a schema
			schema = json.RawMessage(text)
		}
		p.wantSchema(&w, name, schema)
	}

	if source := p.text("grammar"); source != "" {
		g, err := grammar.Parse(source)
		p.want(&w, "grammar", "grammar "+source, g, err)
	}

	var choices []string
	p.decode("guided_choice", "an array of strings", &choices)
	if p.has("guided_choice") {
		var texts []*grammar.Grammar
		for _, c := range choices {
			if c == "" {
				p.fail("guided_choice", "a text is empty")
			}
			texts = append(texts, grammar.Text(c))
		}
		if len(texts) == 0 {
			p.fail("guided_choice", "want at least one text")
		}
		p.want(&w, "guided_choice", "choice "+string(p.all["guided_choice"]), grammar.Choice(texts...), nil)
	}
	return w
}

// constrain restricts the answers to a job.
func (s *Server) constrain(j *job, w wanted) error {
	if w.grammar == nil {
		return nil
	}
	m, err := s.matchers[j.model].matcher(w.name, w.grammar)
	if err != nil {
		return invalid(w.param, "%s", reason(err))
	}
	j.matcher = m
	return nil
}

// A tool is a function that a model can call.
type tool struct {
	Name       string
	Parameters json.RawMessage
}

// callGrammar returns the grammar of calls of the given tools, in a format that a finder recognizes. In the format of
// bareCalls, there is only one call.
func callGrammar(tools []tool, format callFormat, several bool) (*grammar.Grammar, error) {
	begin, middle, end := callBegin+"\n{\"name\": ", ", \"arguments\": ", "}\n"+callEnd
	if format == bareCalls {
		begin, middle, end, several = "{\"name\": ", ", \"parameters\": ", "}", false
	}
	var calls []*grammar.Grammar
	for _, t := range tools {
		parameters := grammar.Object()
		if !isNull(t.Parameters) && string(t.Parameters) != "{}" {
			var err error
			if parameters, err = grammar.Schema(t.Parameters); err != nil {
				return nil, invalid("tools", "the parameters of the function %.60q: %s", t.Name, reason(err))
			}
		}
		calls = append(calls, grammar.Sequence(
			grammar.Text(begin+string(encode(t.Name))+middle), parameters, grammar.Text(end)))
	}

	call, most := grammar.Choice(calls...), 0
	if several {
		most = -1
	}
	return grammar.Sequence(call, grammar.Repeat(grammar.Sequence(grammar.Text("\n"), call), 0, most)), nil
}

// readCalls permits tool calls. If a call is forced, nothing else is permitted; otherwise, calls are an
// alternative to the texts that another parameter permits.
func (p *params) readCalls(j *job, w *wanted, c *conversation) {
	forced := c.forced != nil
	if p.err != nil || c.tools == nil || !forced && w.grammar == nil {
		return
	}

	switch {
	case j.tools == unknownCalls && forced:
		p.fail("tool_choice", "the model's tool calls have a format that the server does not recognize, so it "+
			"cannot force one: want \"auto\" or \"none\"")
		return
	case j.tools == unknownCalls:
		p.fail(w.param, "the model's tool calls have a format that the server does not recognize, so they cannot be "+
			"permitted besides this form of the answer: leave out the tools or set tool_choice to \"none\"")
		return
	}

	tools := c.known
	if c.forced != nil && *c.forced != "" {
		tools = slices.DeleteFunc(slices.Clone(tools), func(t tool) bool { return t.Name != *c.forced })
		if len(tools) == 0 {
			p.fail("tool_choice", "there is no tool %.60q", *c.forced)
			return
		}
	}
	g, err := callGrammar(tools, j.tools, !j.oneTool)
	if err != nil {
		p.err = err
		return
	}

	name := "calls " + string(encode(tools))
	if j.oneTool {
		name = "call " + string(encode(tools))
	}
	if forced {
		*w = wanted{"tool_choice", name, g}
	} else {
		*w = wanted{w.param, name + " or " + w.name, grammar.Choice(w.grammar, g)}
	}
}
