package llm_test

import (
	"context"
	"fmt"
	"log"
	"path/filepath"
	"strings"

	"github.com/kasmina-go/kasmina/llm"
)

func ExampleTrainBPE() {
	text := strings.Repeat("if err != nil {\n\treturn err\n}\n", 100)
	bpe, err := llm.TrainBPE(strings.NewReader(text), 50257, nil)
	if err != nil {
		log.Fatal(err)
	}
	ids := bpe.Encode([]byte("return err != io.EOF"))
	for _, id := range ids {
		token, err := bpe.Decode([]int{id})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%q ", token)
	}
	fmt.Println()
	// Output:
	// "return" " err" " !=" " " "i" "o" "." "E" "O" "F"
}

// A run trains its vocabulary and encodes its text once. Later runs find both in files.
func ExampleCacheTokens() {
	path, remove := exampleFile()
	defer remove()
	corpus, err := llm.OpenCorpus(path)
	if err != nil {
		log.Fatal(err)
	}
	for range 2 {
		bpe, err := llm.LoadOrTrainBPE(filepath.Join(filepath.Dir(path), "cache", "bpe"), corpus.Train, 50257, 32<<20, nil)
		if err != nil {
			log.Fatal(err)
		}
		tokens, err := llm.CacheTokens(context.Background(), filepath.Join(filepath.Dir(path), "cache",
			"tokens"), corpus.Train, bpe, nil)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(corpus.Train.Size(), "bytes,", tokens.Len(), "tokens of a vocabulary of", tokens.VocabSize())
		if err := tokens.Close(); err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// 950 bytes, 15 tokens of a vocabulary of 275
	// 950 bytes, 15 tokens of a vocabulary of 275
}
