package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/kasmina-go/kasmina/llm/baseline"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

const (
	tokenizerText = 64 << 20 // bytes of text that a byte-pair encoding is trained on, at most
	quickBytes    = 64 << 10 // of held-out text, for evaluations before the last step
)

// dataset is what a run learns from and what it is scored on.
type dataset struct {
	train     *data.Text
	held      *data.Text
	heldOut   []byte // a sample of it
	tokenizer tokenizer.Tokenizer
	tokens    data.Tokens
}

// openData finds the text to train on and the held-out text to score.
func openData(o options, stderr io.Writer) (d dataset, err error) {
	path := o.data
	opts := []data.Option{}
	if path == "" {
		if path, err = data.GoSource(); err != nil {
			return d, err
		}
		opts = append(opts, data.WithExtensions(".go"))
	}
	if o.maxBytes > 0 {
		opts = append(opts, data.WithMaxBytes(o.maxBytes))
	}
	corpus, err := data.Open(path, opts...)
	if err != nil {
		return d, fmt.Errorf("-data: %w", err)
	}
	d.train, d.held = corpus.Train, corpus.HeldOut
	if d.heldOut, err = corpus.HeldOut.Sample(int(o.heldOut)); err != nil {
		return d, err
	}
	fmt.Fprintf(stderr, "data      %s: %s in %d files to train on, %s held out\n",
		path, sizeOf(d.train.Size()), d.train.Documents(), sizeOf(int64(len(d.heldOut))))
	return d, nil
}

// sizeOf says how many bytes there are.
func sizeOf(bytes int64) string {
	if bytes < 1e6 {
		return fmt.Sprintf("%.1f kB", float64(bytes)/1e3)
	}
	return fmt.Sprintf("%.1f MB", float64(bytes)/1e6)
}

// tokenize turns the text into tokens: bytes, or those of a byte-pair encoding, which is trained on
// the text. Encoding and tokens are kept on the disk, for the next run.
func (d *dataset) tokenize(ctx context.Context, o options, stderr io.Writer) (err error) {
	m := newMeter(ctx, stderr, "data      reading "+sizeOf(d.train.Size()))
	fingerprint, err := d.train.Fingerprint(ctx,
		func(done, of int64) error { return m.at(float64(done), float64(of)) })
	if err != nil {
		return err
	}
	if o.vocab == 0 {
		d.tokenizer = tokenizer.Bytes{}
		d.tokens, err = data.Tokenize(ctx, d.train, d.tokenizer)
		return err
	}
	bpe, err := d.trainTokenizer(ctx, o, fingerprint, stderr)
	if err != nil {
		return err
	}
	d.tokenizer = bpe
	path := filepath.Join(o.cache, fmt.Sprintf("%.16s-%s.tokens", fingerprint, bpe.Name()))
	m = newMeter(ctx, stderr, "tokens    encoding "+sizeOf(d.train.Size()))
	file, err := data.CacheTokens(ctx, path, d.train, bpe, func(done,
		of int64) error {
		return m.at(float64(done), float64(of))
	})
	if err != nil {
		return withRemedy(ctx, err, path)
	}
	d.tokens = file
	fmt.Fprintf(stderr, "tokens    %.1f million, %s\n", float64(file.Len())/1e6, m.origin(path))
	return nil
}

// trainTokenizer returns the byte-pair encoding that stands beside the checkpoint of a resumed run,
// or else that of the text.
func (d *dataset) trainTokenizer(ctx context.Context, o options, fingerprint string,
	stderr io.Writer) (*tokenizer.BPE, error) {
	if o.resume.set {
		path := filepath.Join(filepath.Dir(o.resume.path), tokenizerName)
		bpe, err := tokenizer.LoadBPE(path)
		if err == nil {
			return bpe, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, withRemedy(ctx, err, path)
		}
	}
	sample := min(d.train.Size(), tokenizerText)
	path := filepath.Join(o.cache, fmt.Sprintf("%.16s-%d-%d.bpe", fingerprint, o.vocab, sample))
	m := newMeter(ctx, stderr, fmt.Sprintf("tokenizer learning %d entries from %s", o.vocab,
		sizeOf(sample)))
	progress := func(done, of int) error { return m.at(float64(done), float64(of)) }
	bpe, err := tokenizer.LoadOrTrainBPE(ctx, path, d.train, o.vocab, int(sample), progress)
	if err != nil {
		return nil, withRemedy(ctx, err, path)
	}
	fmt.Fprintf(stderr, "tokenizer %s, %s\n", bpe.Name(), m.origin(path))
	if n := bpe.VocabSize(); n < o.vocab {
		fmt.Fprintf(stderr,
			"vocab     the text has pairs for %d of %d entries: -vocab %d does, with a smaller model\n", n, o.vocab, n)
	}
	return bpe, nil
}

// withRemedy says what helps where a file that the program makes when it is missing is not what it
// should be, or cannot be made.
func withRemedy(ctx context.Context, err error, path string) error {
	var system syscall.Errno
	_, missing := os.Stat(path)
	switch {
	case ctx.Err() != nil:
		return err
	case missing == nil:
		return fmt.Errorf("%w; remove the file, and it is made again", err)
	case errors.As(err, &system):
		return fmt.Errorf("%w; -cache names another folder for it", err)
	}
	return err
}

// evaluations returns the held-out text, and less of it for evaluations before the last step.
func (d *dataset) evaluations(o options) (texts [2]*data.Evaluation, err error) {
	for i, text := range [][]byte{d.heldOut, thin(d.heldOut)} {
		if !o.model.Documents {
			texts[i], err = data.NewEvaluation(text, d.tokenizer, o.train.Batch, o.model.Seq)
		} else {
			var documents [][]byte
			if documents, err = d.held.SampleDocuments(len(text)); err == nil {
				texts[i], err = data.NewDocumentEvaluation(documents, d.tokenizer,
					o.train.Batch, o.model.Seq)
			}
		}
		if err != nil {
			return texts, err
		}
	}
	return texts, nil
}

// judging is held-out text by which blueprints are judged.
func (d *dataset) judging(o options) (*data.Evaluation, error) {
	text := d.heldOut[:min(len(d.heldOut), judgedBytes)]
	return data.NewEvaluation(text, d.tokenizer, min(2, o.train.Batch), o.model.Seq)
}

// close closes the file of tokens, if there is one.
func (d *dataset) close() error {
	if c, ok := d.tokens.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

// A meter tells how far a job is that may take long, and ends it when the context ends.
type meter struct {
	ctx         context.Context
	w           io.Writer
	what        string
	start, told time.Time
	worked      bool
}

func newMeter(ctx context.Context, w io.Writer, what string) *meter {
	now := time.Now()
	return &meter{ctx: ctx, w: w, what: what, start: now, told: now}
}

func (m *meter) at(done, of float64) error {
	m.worked = true
	if now := time.Now(); now.Sub(m.told) > 2*time.Second && done < of {
		left := ""
		if share := done / of; share > 0.1 { // before, the pace says little
			left = fmt.Sprintf(", %v left",
				time.Duration(float64(now.Sub(m.start))*(1/share-1)).Round(time.Second))
		}
		fmt.Fprintf(m.w, "%s: %.0f %%%s\n", m.what, 100*done/of, left)
		m.told = now
	}
	return context.Cause(m.ctx)
}

// origin says where the job's result is from.
func (m *meter) origin(path string) string {
	if !m.worked {
		return "from " + path
	}
	return fmt.Sprintf("made in %v, kept in %s", time.Since(m.start).Round(100*time.Millisecond),
		path)
}

// thin returns a text of at most quickBytes, or else so many of them in pieces spread evenly over
// it.
func thin(text []byte) []byte {
	const piece, pieces = 4 << 10, quickBytes / (4 << 10)
	if len(text) <= quickBytes {
		return text
	}
	thinned := make([]byte, 0, quickBytes)
	for i := range pieces {
		at := i * (len(text) - piece) / (pieces - 1)
		thinned = append(thinned, text[at:at+piece]...)
	}
	return thinned
}

type baselines struct{ order2, gzip float64 }

// score measures what simpler models make of the held-out text, in bits per byte.
func score(ctx context.Context, train *data.Text, heldOut []byte,
	stderr io.Writer) (b baselines, err error) {
	m, err := baseline.TrainOrder2(ctx, train.Reader(), nil)
	if err != nil {
		return b, err
	}
	if b.order2, err = m.BitsPerByte(ctx, heldOut); err != nil {
		return b, err
	}
	if b.gzip, err = baseline.GzipBitsPerByte(ctx, heldOut); err != nil {
		return b, err
	}
	fmt.Fprintf(stderr, "to beat   order-2 model %.3f bits per byte, gzip -9 %.3f\n", b.order2,
		b.gzip)
	return b, nil
}
