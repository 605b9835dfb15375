// Command kasmina works with language models in the folders of Hugging Face's transformers.
//
//	kasmina inspect -model DIR                           # what a folder holds, and what training takes
//	kasmina eval -model DIR -data FILE -seq 512          # loss and bits per byte on a text
//	kasmina generate -model DIR -prompt 'Once' -n 100    # text on standard output, nothing else
//	kasmina train -model DIR -data FILE -out NEW         # goes on from a model
//	kasmina convert -model DIR -out NEW -precision bf16  # another type of weights
//	kasmina board runs/*                                 # runs side by side in a browser, by their logs
//	kasmina report runs/one                              # a run as one page of HTML
//	kasmina completion bash                              # for the shell
//
// Options take one dash or two.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/comm/launch"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

func main() {
	stderr := launch.Teller{File: os.Stderr}
	launched, err := launchRanks(os.Args[1:], os.Stdout, stderr)
	if !launched && err == nil {
		err = run(launch.UntilInterrupt(stderr), os.Args[1:], os.Stdout, os.Stderr)
	}
	if err != nil {
		fmt.Fprintln(stderr, "kasmina:", err)
	}
	os.Exit(comm.ExitCode(err))
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	root := newRoot()
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetArgs(twoDashes(root, args))
	return root.ExecuteContext(ctx)
}

func newRoot() *cobra.Command {
	root := &cobra.Command{Use: "kasmina",
		Short:         "Load, measure, train and convert language models",
		SilenceErrors: true, SilenceUsage: true,
		PersistentPreRunE: func(c *cobra.Command, args []string) error { return checkFlags(c) }}
	root.AddCommand(newInspect(), newEval(), newGenerate(), newTrain(), newConvert(),
		newBoard(), newReport())
	root.PersistentFlags().SortFlags = false
	for _, c := range append(root.Commands(), root) {
		c.Flags().SortFlags = false
		c.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
			return fmt.Errorf("%w; %s -help lists the options", err, c.CommandPath())
		})
	}
	root.SetUsageFunc(usage)
	return root
}

// twoDashes gives long options with one dash their second one: the library takes -model for five
// options of one letter.
func twoDashes(root *cobra.Command, args []string) []string {
	known := map[string]bool{"help": true}
	for _, c := range root.Commands() {
		c.Flags().VisitAll(func(f *pflag.Flag) { known[f.Name] = true })
	}
	completing := len(args) > 0 && strings.HasPrefix(args[0], "__complete")
	out := make([]string, len(args))
	for i, a := range args {
		out[i] = a
		if a == "--" {
			copy(out[i:], args[i:])
			break
		}
		name, _, _ := strings.Cut(strings.TrimPrefix(a, "-"), "=")
		single := len(a) > 1 && a[0] == '-' && a[1] != '-'
		if single && (known[name] || completing) {
			out[i] = "-" + a
		}
	}
	return out
}

// usage prints options as they are documented: with one dash.
func usage(c *cobra.Command) error {
	w := c.OutOrStderr()
	if c.HasAvailableSubCommands() {
		fmt.Fprintf(w, "Usage: %s COMMAND [options]\n\n", c.CommandPath())
		for _, sub := range c.Commands() {
			if sub.IsAvailableCommand() {
				fmt.Fprintf(w, "  %-12s%s\n", sub.Name(), sub.Short)
			}
		}
		fmt.Fprintf(w, "\n%s COMMAND -help lists its options.\n", c.CommandPath())
		return nil
	}
	fmt.Fprintf(w, "Usage: kasmina %s\n\n", c.Use)
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Hidden {
			return
		}
		kind, text := pflag.UnquoteUsage(f)
		initial := ""
		if f.DefValue != "" && f.DefValue != "0" && f.DefValue != "false" {
			initial = fmt.Sprintf(" (default %s)", f.DefValue)
		}
		fmt.Fprintf(w, "  -%s %s\n    \t%s%s\n", f.Name, kind, text, initial)
	})
	return nil
}

// required wants options without which a command has nothing to do.
func required(c *cobra.Command, names ...string) error {
	for _, name := range names {
		if f := c.Flags().Lookup(name); f.Value.String() == "" {
			_, text := pflag.UnquoteUsage(f)
			return fmt.Errorf("-%s is missing: name the %s", name, text)
		}
	}
	return nil
}

// withoutWords refuses arguments that are no options.
func withoutWords(c *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("%q is no option: every option begins with a dash, and %s -help lists "+
			"them",
			args[0], c.CommandPath())
	}
	return nil
}
