package data_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"

	"github.com/kasmina-go/kasmina/llm/baseline"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// exampleFile writes a text of 1000 bytes to a temporary file.
func exampleFile() (path string, remove func()) {
	dir, err := os.MkdirTemp("", "corpus")
	if err != nil {
		log.Fatal(err)
	}
	path = filepath.Join(dir, "digits.txt")
	if err := os.WriteFile(path, []byte(strings.Repeat("0123456789", 100)), 0o666); err != nil {
		log.Fatal(err)
	}
	return path, func() { os.RemoveAll(dir) }
}

// This example trains on one part of the text and evaluates on the other.
func ExampleOpen() {
	path, remove := exampleFile()
	defer remove()
	corpus, err := data.Open(path, data.WithHeldOut(0.1))
	if err != nil {
		log.Fatal(err)
	}

	fmt.Println(corpus.Train.Size(), "bytes to train on,", corpus.HeldOut.Size(), "held out")

	held, err := corpus.HeldOut.Sample(1 << 20)
	if err != nil {
		log.Fatal(err)
	}

	baseline, err := baseline.TrainOrder2(context.Background(), corpus.Train.Reader(), nil)
	if err != nil {
		log.Fatal(err)
	}

	bpb, err := baseline.BitsPerByte(context.Background(), held)
	if err != nil {
		log.Fatal(err)
	}

	fmt.Println("an order-2 model needs less than 0.2 bits per byte:", bpb < 0.2)
	// Output:
	// 900 bytes to train on, 100 held out
	// an order-2 model needs less than 0.2 bits per byte: true
}

// A loader that is set to the state of another loader continues with the same batches.
func ExampleLoader() {
	path, remove := exampleFile()
	defer remove()
	corpus, err := data.Open(path)
	if err != nil {
		log.Fatal(err)
	}

	tokens, err := data.Tokenize(context.Background(), corpus.Train, tokenizer.Bytes{})
	if err != nil {
		log.Fatal(err)
	}

	config := data.LoaderConfig{Batch: 2, Seq: 8, Seed: 1}
	loader, err := data.NewLoader(tokens, config)
	if err != nil {
		log.Fatal(err)
	}

	batch, err := loader.Next()
	if err != nil {
		log.Fatal(err)
	}

	fmt.Println(len(batch.Inputs), "inputs,", len(batch.Targets), "targets")
	fmt.Println("each target is the next input:", batch.Targets[0] == batch.Inputs[1])

	resumed, err := data.NewLoader(tokens, config)
	if err != nil {
		log.Fatal(err)
	}

	if err := resumed.SetState(loader.State()); err != nil {
		log.Fatal(err)
	}

	batch, err = loader.Next()
	if err != nil {
		log.Fatal(err)
	}

	again, err := resumed.Next()
	if err != nil {
		log.Fatal(err)
	}

	fmt.Println("resumed with the same batch:", fmt.Sprint(batch) == fmt.Sprint(again))
	// Output:
	// 16 inputs, 16 targets
	// each target is the next input: true
	// resumed with the same batch: true
}

// A run trains its vocabulary and encodes its text once. Later runs find both in files.
func ExampleCacheTokens() {
	path, remove := exampleFile()
	defer remove()
	corpus, err := data.Open(path)
	if err != nil {
		log.Fatal(err)
	}

	for range 2 {
		bpe, err := tokenizer.LoadOrTrainBPE(context.Background(),
			filepath.Join(filepath.Dir(path), "cache", "bpe"),
			corpus.Train, 50257, 32<<20, nil)
		if err != nil {
			log.Fatal(err)
		}

		tokens, err := data.CacheTokens(context.Background(), filepath.Join(filepath.Dir(path),
			"cache", "tokens"), corpus.Train, bpe, nil)
		if err != nil {
			log.Fatal(err)
		}

		fmt.Println(corpus.Train.Size(), "bytes,", tokens.Len(), "tokens of a vocabulary of",
			tokens.VocabSize())
		if err := tokens.Close(); err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// 950 bytes, 15 tokens of a vocabulary of 275
	// 950 bytes, 15 tokens of a vocabulary of 275
}
