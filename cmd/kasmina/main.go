// Command kasmina inspects, evaluates, trains and converts language models, and generates text with them.
// It reads and writes the model folders of Hugging Face's transformers.
//
//	kasmina inspect --model DIR                            # configuration, tensors and memory needed for training
//	kasmina eval --model DIR --data FILE --seq 512         # loss and bits per byte of a text
//	kasmina generate --model DIR --prompt Once --n 100     # writes the text, and nothing else, to standard output
//	kasmina chat --model DIR                               # talks to a model in the terminal
//	kasmina serve --model DIR                              # serves a model over OpenAI's API, with a chat page
//	kasmina train --model DIR --data FILE --out NEW        # continues training a model
//	kasmina finetune --model DIR --data FILE --out NEW     # teaches a model chats or texts
//	kasmina convert --model DIR --out NEW --precision bf16 # converts the weights to another type
//	kasmina board runs/*                                   # compares runs in a browser
//	kasmina report runs/one                                # writes a run as an HTML page
//	kasmina data check chat.jsonl --model DIR              # shows chat data as the model will see it
//	kasmina completion bash                                # prints a completion script for the shell
//	kasmina version                                        # prints the version
//
// Long options start with two dashes. The common ones have a short form, such as -m for --model. The
// command "kasmina help" and the option --help describe all commands and options.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/comm/launch"
)

func main() {
	stderr := launch.Teller{File: os.Stderr}
	root := newRoot()
	root.SetOut(os.Stdout)
	root.SetErr(os.Stderr)
	root.SetArgs(os.Args[1:])
	manage(root, os.Args[1:], stderr)

	c, err := root.ExecuteC()
	silent := errors.As(err, new(launch.Interruption)) && !saves(c)    // an interrupt loses nothing
	if err != nil && strings.HasPrefix(err.Error(), "required flag") { // by cobra
		err = flagError(c, err)
	}
	if err != nil && !silent {
		fmt.Fprintln(stderr, "kasmina:", err)
	}

	os.Exit(launch.ExitCode(err))
}

// manage makes the subcommands of c, whose command line is args, handle interrupts, and makes training start
// one process per GPU. This happens once cobra has parsed and checked the command line, because it depends on
// the command and its options. Before that, an interrupt terminates the program.
func manage(c *cobra.Command, args []string, stderr io.Writer) {
	for _, sub := range c.Commands() {
		manage(sub, args, stderr)
	}

	run := c.RunE
	if run == nil {
		return
	}

	c.RunE = func(c *cobra.Command, rest []string) error {
		switch {
		case saves(c):
			job, err := ranksJob(c, args)
			if err != nil {
				return err
			}
			if job != nil {
				// The job forwards signals to its processes, which save and exit by themselves.
				job.Stdout, job.Stderr = unlabeled{os.Stdout}, stderr
				return launch.Run(context.Background(), *job)
			}
			c.SetContext(launch.UntilInterrupt(stderr))
		case c.Name() != "chat": // in which an interrupt stops an answer only
			c.SetContext(launch.UntilInterrupt(io.Discard))
		}
		return run(c, rest)
	}
}

// unlabeled removes the label of the process from each line. Only rank 0 writes to standard output, which other
// programs may read.
type unlabeled struct{ io.Writer }

// label matches the prefix that package launch adds to a line.
var label = regexp.MustCompile(`^\[\d+\] `)

func (u unlabeled) Write(line []byte) (int, error) {
	_, err := u.Writer.Write(line[len(label.Find(line)):])
	return len(line), err
}

// saves reports whether a command saves its state when it is interrupted.
func saves(c *cobra.Command) bool { return c.Name() == "train" || c.Name() == "finetune" }

// newRoot returns the command with all its subcommands.
func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:               "kasmina",
		Short:             "Load, measure, train and convert language models",
		Version:           buildVersion(),
		SilenceErrors:     true, // main prints them
		SilenceUsage:      true,
		PersistentPreRunE: func(c *cobra.Command, args []string) error { return checkFlags(c) },
	}

	root.AddCommand(newInspect(), newEval(), newGenerate(), newTrain(), newFinetune(), newConvert(), newBoard(), newServe(), newChat(),
		newReport(), newData(), newVersion())

	root.SetFlagErrorFunc(flagError)
	for _, c := range root.Commands() {
		c.Flags().SortFlags = false
	}

	return root
}

// markRequired marks flags as required. A flag that does not exist is a programming error.
func markRequired(c *cobra.Command, names ...string) {
	for _, name := range names {
		if err := c.MarkFlagRequired(name); err != nil {
			panic(err)
		}
	}
}

// completeFlag sets the values that the shell offers for a flag.
func completeFlag(c *cobra.Command, name string, values ...cobra.Completion) {
	choices := cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)
	if err := c.RegisterFlagCompletionFunc(name, choices); err != nil {
		panic(err)
	}
}
