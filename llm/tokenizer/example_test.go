package tokenizer_test

import (
	"context"
	"fmt"
	"log"
	"strings"

	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

func ExampleBytes() {
	var tok tokenizer.Bytes
	ids := tok.Encode([]byte("Go!"))
	fmt.Println(ids)
	text, err := tok.Decode(append(ids, 10))
	fmt.Printf("%q %v\n", text, err)
	_, err = tok.Decode([]int{71, 256})
	fmt.Println(err)
	// Output:
	// [71 111 33]
	// "Go!\n" <nil>
	// tokenizer: Bytes.Decode: ids[1] is 256, outside the vocabulary [0, 256)
}

func ExampleTrainBPE() {
	text := strings.Repeat("if err != nil {\n\treturn err\n}\n", 100)
	bpe, err := tokenizer.TrainBPE(context.Background(), strings.NewReader(text), 50257, nil)
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
