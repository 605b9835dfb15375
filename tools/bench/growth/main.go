// Package growth measures the benefit of growing a model, for the program bench.
//
// [Pairs] trains a grown model and a static one in equal time, and draws their losses. [Study] compares
// many recipes of growth with tuned static models, on budgets counted in tokens per parameter, and keeps
// a record of each run.
package growth

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/kasmina-go/kasmina/board"
	"github.com/kasmina-go/kasmina/cudaops"
)

// Pairs trains pairs of a static and a growing model, and writes a log of each run. The decisions of a
// growing model are recorded for -replay. The last line of output is a JSON object with the results.
func Pairs(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
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
			fmt.Fprintf(stderr, "device    the CPU, because the GPU cannot be used: %v\n", err)
		}
		return nil, nil
	}

	return nil, err
}
