package growth

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/kasmina-go/kasmina/internal/regular"
	"github.com/kasmina-go/kasmina/llm"
)

// decisionsPath returns the path of the growth decisions of a run.
func (s *study) decisionsPath(j job) string {
	return filepath.Join(s.dir, "decisions", j.name()+".jsonl")
}

// createDecisions creates the file for the growth decisions of a run.
func (s *study) createDecisions(j job) (*os.File, error) {
	path := s.decisionsPath(j)
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return nil, err
	}
	return os.Create(path)
}

// readDecisions reads the growth decisions of a run.
func (s *study) readDecisions(j job) (r *llm.Record, err error) {
	f, _, err := regular.Open(s.decisionsPath(j))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("its decisions are missing, and without them it cannot be repeated; published studies lack "+
			"the folder decisions: %w", err)
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return llm.ReadRecord(f)
}

// replayAll repeats recorded runs that grew, with the decisions that were recorded. It repeats those whose names match
// only, or all of them if only is nil, one after the other on the first device.
//
// It prints a line for each run that ends like the recorded one, and returns an error for every other run.
func (b *bench) replayAll(ctx context.Context, only *regexp.Regexp, stdout io.Writer) error {
	var errs []error
	replayed := 0
	for _, name := range slices.Sorted(maps.Keys(b.records)) {
		recorded := b.records[name]
		if !recorded.Arm.grows() || recorded.Failed != "" || only != nil && !only.MatchString(name) {
			continue
		}

		decisions, err := b.readDecisions(recorded.job)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
			continue
		}

		again, err := b.train(ctx, recorded.job, b.devices[0], decisions)
		if err == nil {
			err = recorded.sameBits(again)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
			continue
		}

		replayed++
		compared := "held-out losses"
		if recorded.Weights != "" {
			compared += " and weights"
		}
		if _, err := fmt.Fprintf(stdout, "%s: replayed in %.1f s, the same %s: %v nats/byte after %d steps, weights %.16s\n",
			name, again.Seconds, compared, again.Loss, again.Steps, again.Weights); err != nil {
			return err
		}
	}

	if replayed == 0 && len(errs) == 0 {
		return errors.New("there are no records of growing runs to replay in " + b.dir)
	}

	return errors.Join(errs...)
}

// sameBits returns an error unless a run is bit-identical to r. Both must have the same number of steps and parameters and
// the same held-out losses. If r has a checksum of its weights, the weights must be the same, too.
func (r record) sameBits(again record) error {
	if again.Failed != "" {
		return fmt.Errorf("it %s after %d steps, and the recorded run did not", again.Failed, again.Steps)
	}

	if again.Steps != r.Steps || again.Parameters != r.Parameters {
		return fmt.Errorf("it ended after %d steps with %d parameters, and the record after %d with %d", again.Steps,
			again.Parameters, r.Steps, r.Parameters)
	}

	if len(again.Curve) != len(r.Curve) {
		return fmt.Errorf("it was evaluated %d times, and the recorded run %d times", len(again.Curve), len(r.Curve))
	}

	for i, want := range r.Curve {
		if got := again.Curve[i]; got.Tokens != want.Tokens || got.Blocks != want.Blocks || got.Loss != want.Loss {
			return fmt.Errorf("its held-out loss was %v after %d tokens with %d blocks, and the recorded one was %v after %d "+
				"tokens with %d blocks", got.Loss, got.Tokens, got.Blocks, want.Loss, want.Tokens, want.Blocks)
		}
	}

	switch {
	case again.Loss != r.Loss:
		return fmt.Errorf("it ended at a held-out loss of %v, and the recorded run at %v", again.Loss, r.Loss)
	case r.Weights != "" && again.Weights != r.Weights:
		return errors.New("it ended with other weights than the recorded run")
	}

	return nil
}
