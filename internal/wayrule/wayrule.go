// Package wayrule holds the rules by which a user forces or forbids ways to compute ops, for the
// machines of packages cudaops and cpuops.
package wayrule

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
)

// Variable is the environment variable with further rules.
const Variable = "KASMINA_WAYS"

// Host is the way to compute an op of Gorgonia's own on the CPU although there is a kernel for it.
const Host = "host"

// Rule forces a way upon an op, or forbids it. Both are patterns of [path.Match].
type Rule struct {
	Op, Way string
	Forbid  bool
}

// Rules are several, of which later ones have precedence.
type Rules []Rule

// Parse reads rules of the form OP=WAY or OP!=WAY.
func Parse(texts []string) (Rules, error) {
	var rules Rules
	for _, text := range texts {
		op, way, ok := strings.Cut(text, "=")
		r := Rule{Op: strings.TrimSpace(op), Way: strings.TrimSpace(way)}
		if strings.HasSuffix(r.Op, "!") {
			r.Op, r.Forbid = strings.TrimSpace(strings.TrimSuffix(r.Op, "!")), true
		}
		_, opErr := path.Match(r.Op, "")
		_, wayErr := path.Match(r.Way, "")
		if !ok || r.Op == "" || r.Way == "" || opErr != nil || wayErr != nil {
			return nil, fmt.Errorf("the rule is %q, want OP=WAY or OP!=WAY", text)
		}
		rules = append(rules, r)
	}
	return rules, nil
}

// WithEnvironment returns the rules and, behind them, those of [Variable].
func (rules Rules) WithEnvironment() (Rules, error) {
	v := os.Getenv(Variable)
	if v == "" {
		return rules, nil
	}
	more, err := Parse(strings.Split(v, ","))
	if err != nil {
		return nil, fmt.Errorf("the environment variable %s: %w", Variable, err)
	}
	return slices.Concat(rules, more), nil
}

// Applies reports whether the rule is about an op.
func (r Rule) Applies(op string) bool { return matches(r.Op, op) }

// Names reports whether the rule is about a way.
func (r Rule) Names(way string) bool { return matches(r.Way, way) }

func matches(pattern, name string) bool {
	ok, _ := path.Match(pattern, name)
	return ok
}

// Allowed returns the ways that the rules leave of those of an op, by their numbers, and whether
// the rules force one. A rule that would leave none is ignored, and warn is told so.
func (rules Rules) Allowed(op string, ways []string, warn func(string)) (left []int, forced bool) {
	for i := range ways {
		left = append(left, i)
	}
	for _, r := range rules {
		if !r.Applies(op) || r.Way == Host {
			continue
		}
		kept := slices.DeleteFunc(slices.Clone(left), func(i int) bool {
			return r.Names(ways[i]) == r.Forbid
		})
		if len(kept) == 0 {
			if !r.Forbid { // it overrules those before
				for i := range ways {
					if r.Names(ways[i]) {
						kept = append(kept, i)
					}
				}
			}
			if len(kept) == 0 {
				warn(fmt.Sprintf("%s: a rule about %s leaves none of the ways %v, and is ignored",
					op, r.Way, ways))
				continue
			}
		}
		left, forced = kept, forced || len(kept) < len(ways)
	}
	return left, forced
}

// OnHost reports whether the rules want an op on the CPU.
func (rules Rules) OnHost(op string) bool {
	host := false
	for _, r := range rules {
		if r.Applies(op) && r.Way == Host {
			host = !r.Forbid
		}
	}
	return host
}

// Ask reports whether a rule asks for a way.
func (rules Rules) Ask(op, way string) bool {
	return slices.ContainsFunc(rules, func(r Rule) bool {
		return !r.Forbid && r.Applies(op) && r.Names(way)
	})
}
