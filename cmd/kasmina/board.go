package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/board"
)

func newBoard() *cobra.Command {
	addr := "127.0.0.1:6060"
	c := &cobra.Command{Use: "board RUN...",
		Short: "Show runs side by side in a browser, by their logs",
		Long: `Show runs side by side in a browser: their curves, seeds, samples, and what differs in their
settings. A RUN is a folder with a log.jsonl, or such a log; runs that go on are followed. It ends with
Ctrl-C.`,
		RunE: func(c *cobra.Command, runs []string) error {
			if len(runs) == 0 {
				return errors.New("board: no run is named, want folders such as runs/*")
			}
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
		}}
	c.Flags().StringVar(&addr, "addr", addr,
		"address to serve the page at; with port 0 the system chooses one")
	return c
}

func newReport() *cobra.Command {
	out := ""
	c := &cobra.Command{Use: "report RUN", Short: "Write a run as one page of HTML",
		Long: `Write a run, a folder with a log.jsonl or such a log, as one page of HTML that needs nothing
else: curves, the seeds over time, what happened and why, settings and samples.

An earlier report of the same run is replaced. Any other file with that name is left alone, and the
command fails.`,
		RunE: func(c *cobra.Command, runs []string) error {
			if len(runs) != 1 {
				return fmt.Errorf("report: there are %d runs, want one", len(runs))
			}
			path, err := board.WriteReport(out, runs[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(c.OutOrStdout(), path)
			return err
		}}
	c.Flags().StringVar(&out, "out", "", "file to write (default: the name of the run's folder, with .html)")
	return c
}
