// Package wayrule implements the rules with which a user forces or forbids variants of ops, called
// ways, for the machines of packages cudaops and cpuops.
package wayrule

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
)

// Variable is the environment variable that holds further rules, separated by commas.
const Variable = "KASMINA_WAYS"

// Host is the variant that computes one of Gorgonia's own ops on the CPU although a kernel exists.
const Host = "host"

// Rule forces or forbids a variant of an op. Op and Way are patterns as in [path.Match].
type Rule struct {
	Op, Way string
	Forbid  bool
}

// Rules is a list of rules. Later rules take precedence.
type Rules []Rule

// Parse parses rules of the form OP=WAY or OP!=WAY.
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

// WithEnvironment returns the rules followed by the rules in [Variable].
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

// Applies reports whether the rule applies to an op.
func (r Rule) Applies(op string) bool { return matches(r.Op, op) }

// Names reports whether the rule is about a variant.
func (r Rule) Names(way string) bool { return matches(r.Way, way) }

// matches reports whether name matches pattern.
func matches(pattern, name string) bool {
	ok, _ := path.Match(pattern, name)
	return ok
}

// Allowed returns the indices of the variants of an op that the rules allow, and whether the rules
// force a choice. A rule that would exclude all variants is ignored and passed to warn.
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
			if !r.Forbid { // a forcing rule overrides earlier rules
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

// OnHost reports whether the rules demand that an op run on the CPU.
func (rules Rules) OnHost(op string) bool {
	host := false
	for _, r := range rules {
		if r.Applies(op) && r.Way == Host {
			host = !r.Forbid
		}
	}
	return host
}

// Ask reports whether a rule demands a variant.
func (rules Rules) Ask(op, way string) bool {
	return slices.ContainsFunc(rules, func(r Rule) bool {
		return !r.Forbid && r.Applies(op) && r.Names(way)
	})
}
