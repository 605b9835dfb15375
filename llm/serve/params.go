package serve

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"github.com/kasmina-go/kasmina/llm/sampler"
)

// params are the parameters of a request. The first error is kept.
type params struct {
	all map[string]json.RawMessage
	err error
}

// fail records an error, unless there is one already.
func (p *params) fail(name, format string, args ...any) {
	if p.err == nil {
		p.err = invalid(name, format, args...)
	}
}

// isNull reports whether a value is missing or null.
func isNull(raw json.RawMessage) bool {
	return len(raw) == 0 || string(bytes.TrimSpace(raw)) == "null"
}

// has reports whether a parameter is given and not null.
func (p *params) has(name string) bool { return !isNull(p.all[name]) }

// decode decodes a parameter, if it is given.
func (p *params) decode(name, want string, to any) {
	if !p.has(name) {
		return
	}
	if err := json.Unmarshal(p.all[name], to); err != nil {
		p.fail(name, "it is %.40s, want %s", p.all[name], want)
	}
}

func (p *params) text(name string) (s string) {
	p.decode(name, "a string", &s)
	return s
}

func (p *params) bool(name string, usual bool) bool {
	p.decode(name, "true or false", &usual)
	return usual
}

// number returns a parameter from low to high.
func (p *params) number(name string, usual, low, high float64) float64 {
	x := usual
	p.decode(name, fmt.Sprintf("a number from %v to %v", low, high), &x)
	if p.has(name) && !(x >= low && x <= high) {
		p.fail(name, "it is %v, want a number from %v to %v", x, low, high)
	}
	return x
}

// integer is like number, for integers.
func (p *params) integer(name string, usual, low, high int) int {
	x := float64(usual)
	p.decode(name, "an integer", &x)
	if p.has(name) && !(x >= float64(low) && x <= float64(high)) {
		want := fmt.Sprintf("from %d to %d", low, high)
		if high == math.MaxInt32 { // which is no limit in practice
			want = fmt.Sprintf("of at least %d", low)
		}
		p.fail(name, "it is %v, want an integer %s", x, want)
	}
	if x != math.Trunc(x) {
		p.fail(name, "it is %v, want an integer", x)
	}
	return int(x)
}

// seed returns the seed, or a random one.
func (p *params) seed() uint64 {
	if !p.has("seed") {
		return rand.Uint64()
	}
	text := string(p.all["seed"])
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		return uint64(n)
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		p.fail("seed", "it is %.40s, want an integer of 64 bits", text)
	}
	return n
}

// texts returns a parameter that is a string or an array of strings.
func (p *params) texts(name string) (all []string) {
	if !p.has(name) {
		return nil
	}
	var one string
	if json.Unmarshal(p.all[name], &one) == nil {
		return []string{one}
	}
	p.decode(name, "a string or an array of strings", &all)
	return all
}

// Limits for hostile requests. OpenAI allows 4 stop texts and 128 choices.
const (
	maxStops    = 64
	maxStopSize = 1024
	maxChoices  = 128
	maxTop      = 20
)

// stops returns the stop texts.
func (p *params) stops(name string) []string {
	all := p.texts(name)
	if len(all) > maxStops {
		p.fail(name, "there are %d texts, want at most %d", len(all), maxStops)
	}
	for _, s := range all {
		if s == "" || len(s) > maxStopSize {
			p.fail(name, "a text has %d bytes, want 1 to %d", len(s), maxStopSize)
		}
	}
	return all
}

// ids returns a parameter that is an array of tokens of a model.
func (p *params) ids(name string, m *Model) (all []int) {
	p.decode(name, "an array of tokens", &all)
	for _, id := range all {
		if id < 0 || id >= m.Vocab {
			p.fail(name, "there is no token %d: the model has %d tokens", id, m.Vocab)
		}
	}
	return all
}

// bias returns the biases of tokens, which OpenAI limits to 100.
func (p *params) bias(m *Model) map[int]float64 {
	var all map[string]float64
	p.decode("logit_bias", "an object with numbers by token", &all)
	if len(all) == 0 {
		return nil
	}

	biases := map[int]float64{}
	for _, key := range slices.Sorted(maps.Keys(all)) {
		x := all[key]
		id, err := strconv.Atoi(key)
		switch {
		case err != nil || id < 0 || id >= m.Vocab:
			p.fail("logit_bias", "there is no token %.40q: the model has %d tokens", key, m.Vocab)
		case !(x >= -100 && x <= 100):
			p.fail("logit_bias", "the bias of token %d is %v, want -100 to 100", id, x)
		case x == -100:
			x = math.Inf(-1) // OpenAI: bans the token
		}
		biases[id] = x
	}
	return biases
}

// sampling returns the settings for drawing tokens.
func (p *params) sampling(m *Model) sampler.Config {
	c := m.Sampling
	c.Vocab = m.Vocab
	c.Temperature = p.number("temperature", c.Temperature, 0, 100)
	if p.has("top_p") {
		c.TopP = sampler.Nucleus(p.number("top_p", 1, 0, 1))
	}
	if p.has("top_k") { // -1 and 0 mean all
		c.TopK = max(0, p.integer("top_k", 0, -1, math.MaxInt32))
	}
	c.MinP = p.number("min_p", c.MinP, 0, 1)
	c.Seed = p.seed()
	return c
}

// penalties adds the settings that only OpenAI's API has.
func (p *params) penalties(m *Model, c *sampler.Config) {
	c.Presence = p.number("presence_penalty", c.Presence, -2, 2)
	c.Frequency = p.number("frequency_penalty", c.Frequency, -2, 2)
	if p.has("repetition_penalty") {
		c.Repetition = p.number("repetition_penalty", 1, 0.01, 100)
	}
	c.Bias = p.bias(m)
}

// refuse records an error if the request sets an unsupported parameter to a value that would affect the
// answer. The map neutral lists the values of each such parameter that have no effect, as JSON separated
// by spaces.
func (p *params) refuse(neutral map[string]string) {
	for _, name := range slices.Sorted(maps.Keys(neutral)) {
		if !p.has(name) {
			continue
		}

		var compact bytes.Buffer
		if json.Compact(&compact, p.all[name]) == nil && !contains(neutral[name], compact.String()) {
			p.fail(name, "this server does not support %.60s: leave it out", compact.String())
		}
	}
}

// contains reports whether a value is among values separated by spaces.
func contains(values, value string) bool {
	return strings.Contains(" "+values+" ", " "+value+" ")
}
