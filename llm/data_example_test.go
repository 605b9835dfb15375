package llm_test

import (
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"

	"github.com/kasmina-go/kasmina/llm"
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

func ExampleByteTokenizer() {
	var tok llm.ByteTokenizer
	ids := tok.Encode([]byte("Go!"))
	fmt.Println(ids)
	text, err := tok.Decode(append(ids, 10))
	fmt.Printf("%q %v\n", text, err)
	_, err = tok.Decode([]int{71, 256})
	fmt.Println(err)
	// Output:
	// [71 111 33]
	// "Go!\n" <nil>
	// llm: ByteTokenizer.Decode: ids[1] is 256, outside the vocabulary [0, 256)
}

// Batches to train on come from one part of the text, and what the model is judged by from the other.
func ExampleOpenCorpus() {
	path, remove := exampleFile()
	defer remove()
	corpus, err := llm.OpenCorpus(path, llm.WithHeldOut(0.1))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(corpus.Train.Size(), "bytes to train on,", corpus.HeldOut.Size(), "held out")

	held, err := corpus.HeldOut.Sample(1 << 20)
	if err != nil {
		log.Fatal(err)
	}
	baseline, err := llm.TrainOrder2(corpus.Train.Reader(), nil)
	if err != nil {
		log.Fatal(err)
	}
	bpb, err := baseline.BitsPerByte(held)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("an order-2 model needs less than 0.2 bits per byte:", bpb < 0.2)
	// Output:
	// 900 bytes to train on, 100 held out
	// an order-2 model needs less than 0.2 bits per byte: true
}

// A loader that is set to the state of another continues with the same batches.
func ExampleLoader() {
	path, remove := exampleFile()
	defer remove()
	corpus, err := llm.OpenCorpus(path)
	if err != nil {
		log.Fatal(err)
	}
	tokens, err := llm.Tokenize(corpus.Train, llm.ByteTokenizer{})
	if err != nil {
		log.Fatal(err)
	}
	config := llm.LoaderConfig{Batch: 2, Seq: 8, Seed: 1}
	loader, err := llm.NewLoader(tokens, config)
	if err != nil {
		log.Fatal(err)
	}
	batch, err := loader.Next()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(len(batch.Inputs), "inputs,", len(batch.Targets), "targets")
	fmt.Println("each target is the next input:", batch.Targets[0] == batch.Inputs[1])

	resumed, err := llm.NewLoader(tokens, config)
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

func ExampleSample() {
	logits := []float64{0.5, 2, -1, 2.5}
	greedy, err := llm.NewSampler(llm.SamplerConfig{})
	if err != nil {
		log.Fatal(err)
	}
	id, err := llm.Sample(greedy, logits)
	fmt.Println(id, err)

	warm, err := llm.NewSampler(llm.SamplerConfig{Temperature: 0.8, TopK: 2, Seed: 1})
	if err != nil {
		log.Fatal(err)
	}
	var counts [4]int
	for range 1000 {
		id, err := llm.Sample(warm, logits)
		if err != nil {
			log.Fatal(err)
		}
		counts[id]++
	}
	fmt.Println("only 1 and 3:", counts[0] == 0 && counts[2] == 0, "3 more often:", counts[3] > counts[1])
	// Output:
	// 3 <nil>
	// only 1 and 3: true 3 more often: true
}
