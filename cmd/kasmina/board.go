package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/board"
)

func newBoard() *cobra.Command {
	addr := "127.0.0.1:6060"
	c := &cobra.Command{
		Use:   "board RUN...",
		Short: "Show runs side by side in a browser",
		Long: `Show runs side by side in a browser: their curves, seeds and samples, and the settings in which
they differ. A RUN is a folder with a log.jsonl, or such a log. Runs that are still in progress are
followed. Ctrl-C ends the command.`,
		Example: "  kasmina board runs/*",
		Args:    oneDashHint(cobra.MinimumNArgs(1)),
		RunE: func(c *cobra.Command, runs []string) error {
			b, err := board.Logs(runs)
			if err != nil {
				return err
			}
			defer b.Close()
			url, err := b.Listen(addr)
			if err != nil {
				return err
			}
			fmt.Fprintln(c.OutOrStdout(), url)
			<-c.Context().Done()
			return nil
		},
	}
	c.Flags().StringVar(&addr, "addr", addr,
		"`address` of the page; with port 0 the system chooses a port")
	return c
}

func newReport() *cobra.Command {
	out := ""
	c := &cobra.Command{
		Use:   "report RUN",
		Short: "Write a run as one HTML page",
		Long: `Write a run as one HTML page that needs no other files: its curves, its seeds over time, what
happened and why, settings and samples. RUN is a folder with a log.jsonl, or such a log.

An earlier report of the same run is replaced. Any other file with that name is left alone, and the
command fails.`,
		Args: oneDashHint(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, runs []string) error {
			path, err := board.WriteReport(out, runs[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(c.OutOrStdout(), path)
			return err
		},
	}
	c.Flags().StringVarP(&out, "out", "o", "",
		"`file` to write (default: the name of the run's folder, with .html)")
	return c
}
