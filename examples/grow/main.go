// Command grow trains a language model twice in equal time, from one random seed on the same text.
// One has all its blocks from the start. The other has few blocks, whose steps are quick, and gets
// as many when the controller sees the loss flatten. It compares the held-out losses, and draws
// them over the time with the stack of blocks below.
//
//	go run ./examples/grow                    # under three minutes on two cores, on the Go sources
//	go run ./examples/grow -data ~/notes -time 5m -lr 0.01,0.02,0.03
//	go run ./examples/grow -runs 1 -replay runs/grow/grown-1.record.jsonl
//
// The command bench compares many recipes of growth with tuned static models, on budgets that are
// counted in tokens per parameter, and keeps a record of each run:
//
//	go run ./examples/grow bench -h
//
// Beside each model lie a log and, of a grown one, the record of the decisions by which it grew,
// which -replay follows. The last line that it prints is a JSON object with the results.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/kasmina-go/kasmina/board"
	"github.com/kasmina-go/kasmina/cudaops"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "grow:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
	if len(args) > 0 && args[0] == "bench" {
		return runBench(ctx, args[1:], stdout, stderr)
	}
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(o.out, 0o777); err != nil {
		return err
	}
	text, err := openCorpus(ctx, o, stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, text.Close()) }()
	device, err := openDevice(o.device, stderr)
	if err != nil {
		return err
	}
	if device != nil {
		defer device.Close()
	}
	e := &experiment{options: o, ctx: ctx, text: text, device: device, w: stderr}
	if o.board != "" {
		var opts []board.Option
		if o.boardControl {
			opts = append(opts, board.WithControl())
		}
		if e.board, err = board.New(opts...); err != nil {
			return err
		}
		defer e.board.Close()
		url, err := e.board.Listen(o.board)
		if err != nil {
			return fmt.Errorf("-board: %w", err)
		}
		fmt.Fprintf(stderr, "board     %s\n", url)
	}
	var all results
	for r := range o.runs {
		c, err := e.compare(o.seed+uint64(r), r == 0)
		if err != nil {
			return err
		}
		all = append(all, c)
		path := filepath.Join(o.out, fmt.Sprintf("growth-%d.png", c.seed))
		if err := drawComparison(path, c); err != nil {
			return err
		}
		fmt.Fprintf(stderr, "picture   %s\n", path)
	}
	return all.report(stdout)
}

func openDevice(device string, stderr io.Writer) (*cudaops.Device, error) {
	if device == "cpu" {
		return nil, nil
	}
	d, err := cudaops.Open()
	switch {
	case err == nil:
		fmt.Fprintf(stderr, "device    %v\n", d)
		return d, nil
	case device == "auto":
		if !errors.Is(err, cudaops.ErrNoDevice) {
			fmt.Fprintf(stderr, "device    the CPU, as the GPU cannot be used: %v\n", err)
		}
		return nil, nil
	}
	return nil, err
}
