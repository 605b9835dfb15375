// Package variantrule implements the rules with which users force or forbid variants of ops in the
// machines of packages cudaops and cpuops.
package variantrule

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
)

// Variable is the environment variable that holds further rules, separated by commas.
const Variable = "KASMINA_VARIANTS"

// Host is the variant that computes one of Gorgonia's own ops on the CPU although a kernel exists.
const Host = "host"

// Rule forces or forbids a variant of an op. Op and Variant are patterns as in [path.Match].
type Rule struct {
	Op, Variant string
	Forbid      bool
}

// Rules is a list of rules. Later rules take precedence.
type Rules []Rule

// Parse parses rules of the form OP=VARIANT or OP!=VARIANT.
func Parse(texts []string) (Rules, error) {
	var rules Rules
	for _, text := range texts {
		op, variant, ok := strings.Cut(text, "=")
		r := Rule{Op: strings.TrimSpace(op), Variant: strings.TrimSpace(variant)}
		if strings.HasSuffix(r.Op, "!") {
			r.Op, r.Forbid = strings.TrimSpace(strings.TrimSuffix(r.Op, "!")), true
		}
		_, opErr := path.Match(r.Op, "")
		_, variantErr := path.Match(r.Variant, "")
		if !ok || r.Op == "" || r.Variant == "" || opErr != nil || variantErr != nil {
			return nil, fmt.Errorf("the rule is %q, want OP=VARIANT or OP!=VARIANT", text)
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

// Names reports whether the rule applies to a variant.
func (r Rule) Names(variant string) bool { return matches(r.Variant, variant) }

// matches reports whether name matches pattern.
func matches(pattern, name string) bool {
	ok, _ := path.Match(pattern, name)
	return ok
}

// Allowed returns the indices of the variants of an op that the rules allow, and whether the rules
// force a choice. A rule that would exclude all variants is ignored and passed to warn.
func (rules Rules) Allowed(op string, variants []string, warn func(string)) (left []int, forced bool) {
	for i := range variants {
		left = append(left, i)
	}

	for _, r := range rules {
		if !r.Applies(op) || r.Variant == Host {
			continue
		}

		kept := slices.DeleteFunc(slices.Clone(left), func(i int) bool {
			return r.Names(variants[i]) == r.Forbid
		})
		if len(kept) == 0 {
			if !r.Forbid { // a forcing rule overrides earlier rules
				for i := range variants {
					if r.Names(variants[i]) {
						kept = append(kept, i)
					}
				}
			}
			if len(kept) == 0 {
				warn(fmt.Sprintf("%s: the rule for %s excludes all variants %v and is ignored",
					op, r.Variant, variants))
				continue
			}
		}

		left, forced = kept, forced || len(kept) < len(variants)
	}

	return left, forced
}

// OnHost reports whether the rules demand that an op run on the CPU.
func (rules Rules) OnHost(op string) bool {
	host := false
	for _, r := range rules {
		if r.Applies(op) && r.Variant == Host {
			host = !r.Forbid
		}
	}
	return host
}

// Ask reports whether a rule demands a variant.
func (rules Rules) Ask(op, variant string) bool {
	return slices.ContainsFunc(rules, func(r Rule) bool {
		return !r.Forbid && r.Applies(op) && r.Names(variant)
	})
}
