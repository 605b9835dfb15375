package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

func TestPresets(t *testing.T) {
	shape := func(vocab, dim, layers, heads, ff, seq int) llm.Config {
		return llm.Config{Vocab: vocab, Dim: dim, Layers: layers, Heads: heads,
			FF: ff, Seq: seq}.Default()
	}
	for args, want := range map[string]struct {
		config    llm.Config
		batch     int
		lr        float64
		vocab     int
		optimizer string
		prompt    string
	}{
		"":                        {shape(256, 192, 4, 4, 512, 256), 8, 0.02, 0, "muon", "func "},
		"-optimizer adamw -ff 64": {shape(256, 192, 4, 4, 64, 256), 8, 3e-3, 0, "adamw", "func "},
		"-preset 124M": {shape(50304, 768, 12, 12, 2048, 1024), 32,
			6e-4, 50257, "adamw", ""},
		"-preset 350M": {shape(50304, 1024, 24, 16, 2816, 1024), 16,
			3e-4, 50257, "adamw", ""},
		"-preset 925M": {shape(50304, 2048, 16, 16, 5632, 2048), 8,
			2.5e-4, 50257, "adamw", ""},
		"-preset 925M -lr 0.5": {shape(50304, 2048, 16, 16, 5632, 2048), 8,
			0.5, 50257, "adamw", ""},
		"-batch 4 -preset 124M -optimizer muon -vocab 1000 -seq 512 -prompt x": {shape(1024, 768,
			12, 12, 2048, 512), 4, 0.02, 1000, "muon", "x"},
		"-preset 350M -vocab 0 -prompt x": {shape(256, 1024, 24, 16, 2816, 1024), 16,
			3e-4, 0, "adamw", "x"},
	} {
		t.Run(args, func(t *testing.T) {
			o, err := parse(strings.Fields(args), io.Discard)
			if err != nil {
				t.Fatal(err)
			}
			got := o.model
			if o.grow > 1 { // to what it is to be in the end
				got.Layers, got.Depth = o.grow*got.Layers, 0
			} else if len(got.Kasmina) != got.Layers {
				t.Errorf("Kasmina layers after blocks %v", got.Kasmina)
			}
			if got.Kasmina, got.Seeds, got.Slots = nil, 0, 0; !reflect.DeepEqual(got, want.config) {
				t.Errorf("the model is %+v, want %+v", got, want.config)
			}
			_, lr, err := newOptimizer(o)
			if err != nil || lr != want.lr || o.optimizer != want.optimizer {
				t.Errorf("%s at %v, %v, want %s at %v", o.optimizer, lr, err,
					want.optimizer, want.lr)
			}
			if o.train.Batch != want.batch || o.vocab != want.vocab || o.prompt != want.prompt {
				t.Errorf("batch %d, vocabulary %d, prompt %q, want %+v", o.train.Batch,
					o.vocab, o.prompt, want)
			}
		})
	}
	for args, want := range map[string]string{
		"-preset 7B":              "one of 124M, 350M, 925M, small",
		"-vocab 256":              "-vocab is 256, want 0, or 257",
		"-vocab -1":               "-vocab is -1",
		"-preset 124M -heads 11":  "multiple of Heads",
		"-preset 124M -vocab 0":   "-prompt is",
		"-preset 124M -precision": "precision",
		"-grad-precision f8":      "-grad-precision is f8, want f32 or bf16",
		"-precision f16 -grad-precision bf16": "-grad-precision is bf16, want f32 with " +
			"-precision f16",
	} {
		if _, err := parse(strings.Fields(args), io.Discard); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", args, err, want)
		}
	}
}

// TestSubwords trains a small model as a large preset does: on subwords, with a vocabulary that is
// larger than theirs. It wants an interrupted run to go on to the same end, although what was kept
// between runs has gone.
func TestSubwords(t *testing.T) {
	dir, text := t.TempDir(), textFolder(t)
	cache, straight, broken := filepath.Join(dir, "cache"), filepath.Join(dir, "straight"),
		filepath.Join(dir, "broken")
	options := []string{"-vocab", "513", "-cache", cache, "-prompt", "", "-steps", "20",
		"-optimizer", "adamw"}
	result, told := train(t, small(text, straight, options...)...)
	if strings.Count(told, "made in") != 2 || !strings.Contains(told, cache) {
		t.Errorf("the user does not hear what is kept where:\n%s", told)
	}
	if bpb, ok := result["val_bpb"].(float64); !ok || bpb <= 0 || bpb > 8 {
		t.Errorf("val_bpb is %v", result["val_bpb"])
	}
	m, err := llm.LoadModel(context.Background(), filepath.Join(straight, checkpointName))
	if err != nil || m.Config.Vocab != 576 {
		t.Fatalf("%v, want a vocabulary of 576", err)
	}
	bpe, err := tokenizer.LoadBPE(filepath.Join(straight, tokenizerName))
	if err != nil || bpe.VocabSize() > 513 {
		t.Fatalf("the encoding beside the checkpoint: %v", err)
	}

	ctx, stderr := endsInTraining(20)
	err = run(ctx, small(text, broken, options...), io.Discard, stderr)
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if err := os.RemoveAll(cache); err != nil {
		t.Fatal(err)
	}
	_, told = train(t, "-resume", "-out", broken, "-data", text, "-cache", cache)
	if strings.Count(told, "made in") != 1 || !strings.Contains(told, "resuming") {
		t.Errorf("not the tokens alone were made anew:\n%s", told)
	}
	for _, name := range []string{checkpointName, "sample.txt", tokenizerName} {
		if !bytes.Equal(read(t, straight, name), read(t, broken, name)) {
			t.Errorf("%s differs", name)
		}
	}
	_, told = train(t, small(text, filepath.Join(dir, "again"), options...)...)
	if strings.Count(told, "made in") != 1 || strings.Count(told, "from "+cache) != 1 {
		t.Errorf("what the cache holds is made again:\n%s", told)
	}
	err = run(context.Background(), []string{"-resume", "-preset", "350M", "-out", broken, "-cache",
		cache}, io.Discard, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "-preset is 350M") ||
		!strings.Contains(err.Error(), `begun with "small"`) {
		t.Errorf("another preset on resumption: %v", err)
	}
	for _, kind := range []string{"*.tokens", "*.bpe"} {
		kept, err := filepath.Glob(filepath.Join(cache, kind))
		if err != nil || len(kept) == 0 {
			t.Fatalf("no %s: %v", kind, err)
		}
		for _, path := range kept {
			if err := os.Truncate(path, 50); err != nil {
				t.Fatal(err)
			}
		}
		err = run(context.Background(), small(text, filepath.Join(dir, "damaged"), options...),
			io.Discard, io.Discard)
		if err == nil || !strings.Contains(err.Error(), "remove the file") ||
			!strings.Contains(err.Error(), cache) {
			t.Errorf("a damaged %s: %v", kind, err)
		}
	}
	if err := os.Truncate(filepath.Join(broken, tokenizerName), 50); err != nil {
		t.Fatal(err)
	}
	err = run(context.Background(), []string{"-resume", "-data", text, "-out", broken, "-cache",
		cache}, io.Discard, io.Discard)
	if err == nil || !strings.Contains(err.Error(), tokenizerName) ||
		!strings.Contains(err.Error(), "remove the file") {
		t.Errorf("a damaged encoding beside the checkpoint: %v", err)
	}
}

// TestStopsWhileTokenizing wants an interrupt to end the training of the encoding.
func TestStopsWhileTokenizing(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	dir := t.TempDir()
	err := run(ctx, small(textFolder(t), filepath.Join(dir, "out"), "-vocab", "300", "-cache",
		filepath.Join(dir, "cache")), io.Discard, io.Discard)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	if left, _ := os.ReadDir(dir); len(left) > 1 { // the cache's folder may stand
		t.Errorf("%v is left", left)
	}
}

// TestTellPace wants a slow first step to be told once, with the time that the others will take,
// and a fast one not to be.
func TestTellPace(t *testing.T) {
	for _, c := range []struct {
		first time.Duration
		steps int
		want  string
	}{
		{95 * time.Second, 2000,
			"a step of 32768 tokens takes 1m35s on this CPU, and the 1999 to come 52h45m5s"},
		{time.Second, 2000, ""},
		{time.Minute, 1, ""},
	} {
		var told bytes.Buffer
		pace := tellPace(&told)
		for step := range min(3, c.steps) {
			e := llm.Event{Kind: llm.StepEnd, Step: step + 1, Steps: c.steps, StepTokens: 32768,
				Elapsed: time.Duration(step+1) * c.first}
			if err := pace(e); err != nil {
				t.Fatal(err)
			}
		}
		if got := told.String(); !strings.Contains(got, c.want) || c.want == "" && got != "" ||
			strings.Count(got, "\n") > 1 {
			t.Errorf("%v a step: told %q, want %q", c.first, got, c.want)
		}
	}
}

// capability is that of a GPU.
func TestHint(t *testing.T) {
	memory := withHint(fmt.Errorf("the graph needs 2 GiB: %w", cudaops.ErrOutOfMemory))
	if !errors.Is(memory, cudaops.ErrOutOfMemory) || !strings.Contains(memory.Error(), "-batch") {
		t.Errorf("got %v, want a hint", memory)
	}
	if other := errors.New("other"); withHint(other) != other || withHint(nil) != nil {
		t.Error("other errors change")
	}
}
