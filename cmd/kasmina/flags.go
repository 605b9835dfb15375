package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// A rule checks whether a flag that is given has an effect in combination with the other flags. If not, it
// returns the reason and what to do about it, which follow the name of the flag in an error message.
type rule func(f *pflag.FlagSet) string

// always is the rule of flags that always have an effect.
func always(*pflag.FlagSet) string { return "" }

// checkedLater is the rule of flags whose effect depends on more than the other flags, such as the model or the
// device. The command checks them when it knows enough.
func checkedLater(*pflag.FlagSet) string { return "" }

// flagRules contains the rules of all flags, by command and flag, so that a flag without effect is never
// accepted silently. The file of each command adds its own rules.
var flagRules = map[string]map[string]rule{}

// newModelOnly is the rule of flags that describe a new model.
func newModelOnly(f *pflag.FlagSet) string {
	return notWith("model", "", "whose architecture and tokenizer stay as they are")(f)
}

// needsLoRA is the rule of --grow-rank.
func needsLoRA(f *pflag.FlagSet) string {
	if method := f.Lookup("method").Value.String(); method != methodLoRA && method != methodRSLoRA {
		return "has no effect without --method lora or rslora: use one of these methods"
	}
	return ""
}

// notRecompute is the rule of --recompute-mlps.
func notRecompute(f *pflag.FlagSet) string {
	return notWith("recompute", "false", "which recomputes whole blocks")(f)
}

// adaptersOnly is the rule of flags that describe adapters.
func adaptersOnly(f *pflag.FlagSet) string {
	if why := notWithValue(f, "method", methodSeeds, "which has no adapters"); why != "" {
		return why
	}
	return ranksOnly(f)
}

// ranksOnly is the rule of --rank.
func ranksOnly(f *pflag.FlagSet) string {
	if why := notWithValue(f, "method", methodFull, "which has no adapters"); why != "" {
		return why
	}
	return notWithValue(f, "method", methodLast, "which has no adapters")
}

// lastBlocksOnly is the rule of --blocks.
func lastBlocksOnly(f *pflag.FlagSet) string {
	if f.Lookup("method").Value.String() == methodLast {
		return ""
	}
	return "has no effect without --method last: add that"
}

// tasksOnly is the rule of the flags of eval that have an effect only with tasks.
func tasksOnly(f *pflag.FlagSet) string { return onlyWith("tasks", "[]", "add --tasks")(f) }

// onlyWith returns the rule of a flag that has no effect unless the other flag is given. The value none of the other
// flag means that it is not. The advice tells users what to do.
func onlyWith(other, none, advice string) rule {
	return func(f *pflag.FlagSet) string {
		if f.Lookup(other).Value.String() != none {
			return ""
		}
		return fmt.Sprintf("has no effect without --%s: %s", other, advice)
	}
}

// notWith returns the rule of a flag that has no effect together with another flag, whose value is none if it
// is not given. The reason why is a clause about the other flag.
func notWith(other, none, why string) rule {
	return func(f *pflag.FlagSet) string {
		if f.Lookup(other).Value.String() == none {
			return ""
		}
		return fmt.Sprintf("has no effect with --%s, %s: leave one of them out", other, why)
	}
}

// needsEvaluations is the rule of --keep-best, which needs evaluations.
func needsEvaluations(f *pflag.FlagSet) string {
	return notWithValue(f, "eval-every", "0", "which evaluates the last model only")
}

// notWithValue returns why a flag has no effect if another flag has the given value.
func notWithValue(f *pflag.FlagSet, other, value, why string) string {
	if f.Lookup(other).Value.String() != value {
		return ""
	}
	return fmt.Sprintf("has no effect with --%s %s, %s: leave one of them out", other, value, why)
}

// directedRule is the rule of --directed. Adapters that grow always start along the gradients.
func directedRule(f *pflag.FlagSet) string {
	if f.Lookup("adapters").Value.String() == "grow" {
		return "has no effect with --adapters grow, which always initializes adapters along the gradients: leave it out"
	}
	return onlyWith("adapters", "", "add --adapters")(f)
}

// nameOf returns the name of a command, after the names of its parent commands.
func nameOf(c *cobra.Command) string {
	_, name, _ := strings.Cut(c.CommandPath(), " ")
	return name
}

// checkFlags returns an error if a flag is given but has no effect, or if the value of a required flag is
// empty. The value of --out "$OUT" is empty if the variable is not set.
func checkFlags(c *cobra.Command) (err error) {
	rules := flagRules[nameOf(c)]
	c.Flags().Visit(func(f *pflag.Flag) {
		if err != nil {
			return
		}
		if f.Annotations[cobra.BashCompOneRequiredFlag] != nil && f.Value.String() == "" {
			err = fmt.Errorf("--%s is empty", f.Name)
			return
		}

		applies := rules[f.Name]
		if applies == nil || f.Value.String() == f.DefValue && isSwitch(f) {
			return
		}
		if why := applies(c.Flags()); why != "" {
			err = fmt.Errorf("--%s %s", f.Name, why)
		}
	})

	return err
}

// flagError adds a reference to the help to an error of the flag parser.
func flagError(c *cobra.Command, err error) error {
	return fmt.Errorf("%w; see %q", err, c.CommandPath()+" --help")
}

// noArguments returns an error if a command is followed by a word that belongs to no flag, such as the folder of
// a model without --model.
func noArguments(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}

	hint := ""
	switch f := c.Flags().Lookup("model"); {
	case f == nil:
	case f.Changed && f.Value.String() == "odel": // -model is -m with the value odel
		hint = ": long options start with two dashes, as in --model"
	case len(given(c, "model", "preset", "layers")) == 0:
		hint = ": a model is given as --model " + quoted(args[0])
	}
	return flagError(c, fmt.Errorf("unexpected argument %.40q%s", args[0], hint))
}

// isSwitch reports whether a flag is boolean. Turning off a switch that is off by default is never an error.
func isSwitch(f *pflag.Flag) bool { return f.Value.Type() == "bool" }

// given returns the named flags that are on the command line and not turned off, in the form used there.
func given(c *cobra.Command, names ...string) (all []string) {
	c.Flags().Visit(func(f *pflag.Flag) {
		off := isSwitch(f) && f.Value.String() == "false"
		if slices.Contains(names, f.Name) && !off {
			all = append(all, "--"+f.Name)
		}
	})
	return all
}

// have returns a list of flags with the verb "has" or "have".
func have(flags []string) string {
	if len(flags) == 1 {
		return strings.Join(flags, "") + " has"
	}
	return strings.Join(flags, " and ") + " have"
}
