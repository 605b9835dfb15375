package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/board"
)

func init() {
	flagRules["board"] = map[string]rule{"addr": always}
}

func newBoard() *cobra.Command {
	addr := "127.0.0.1:6060"
	c := &cobra.Command{
		Use:   "board RUN...",
		Short: "Show runs side by side in a browser",
		Long: `Show runs side by side in a browser, with their curves, seeds and samples and the differences between
their settings. RUN is a folder with a log.jsonl, or the log itself. Folders without a log are skipped.
The page follows runs that are still in progress. Ctrl-C stops the command.`,
		Example: "  kasmina board runs/*",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, runs []string) error {
			runs, err := withLogs(c.ErrOrStderr(), runs)
			if err != nil {
				return err
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
			return context.Cause(c.Context())
		},
	}

	c.Flags().StringVar(&addr, "addr", addr,
		"`address` of the page; with port 0 the system chooses a port")
	return c
}

// withLogs returns the runs that have a log. It reports runs without a log, or with an empty one, to w,
// and returns an error if no run has a log.
func withLogs(w io.Writer, runs []string) (found []string, err error) {
	var missing []string
	for _, run := range runs {
		log, size := logOf(run)
		switch {
		case log == "":
			missing = append(missing, run)
			continue
		case size == 0:
			fmt.Fprintf(w, "board     %s is empty, and appears on the page once the run has started\n", log)
		}
		found = append(found, run)
	}

	if len(found) == 0 {
		return nil, fmt.Errorf("no log.jsonl in %s: want folders written by \"kasmina train --out\", or "+
			"logs", strings.Join(missing, ", "))
	}

	for _, run := range missing {
		fmt.Fprintf(w, "board     skipping %s, which has no log.jsonl\n", run)
	}

	return found, nil
}

// logOf returns the path and the size of a run's log, given the path of the log or of its folder. The
// path is "" if the log does not exist. Any other error is left for the board to report.
func logOf(run string) (path string, size int64) {
	for _, path := range []string{filepath.Join(run, logName), filepath.Join(run, runFolder, logName), run} {
		info, err := os.Stat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist) || err == nil && info.IsDir():
			continue
		case err != nil:
			return path, -1
		}
		return path, info.Size()
	}

	return "", 0
}

func init() {
	flagRules["report"] = map[string]rule{"out": always}
}

func newReport() *cobra.Command {
	out := ""
	c := &cobra.Command{
		Use:   "report RUN",
		Short: "Write a run as a single HTML page",
		Long: `Write a run as a single HTML page, with its curves, its seeds over time, its events and their reasons,
its settings and its samples. RUN is a folder with a log.jsonl, or the log itself.

The report replaces an earlier report of the same run. If any other file has the name of the report, the
command fails and does not change the file.`,
		Args: cobra.ExactArgs(1),
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
