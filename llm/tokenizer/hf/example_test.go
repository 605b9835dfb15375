package hf_test

import (
	"fmt"
	"log"

	"github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

// file is a small tokenizer.json. Programs usually load one from a folder with hf.Load.
const file = `{
	"added_tokens": [{"id": 5, "content": "<|end|>", "normalized": false, "special": true}],
	"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
	"decoder": {"type": "ByteLevel"},
	"model": {"type": "BPE", "vocab": {"G": 0, "o": 1, "Go": 2, "Ġ": 3, "ĠGo": 4},
		"merges": ["G o", "Ġ Go"]}
}`

func ExampleTokenizer() {
	tok, err := hf.Parse([]byte(file), []byte(`{"eos_token": "<|end|>"}`))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(tok.Encode([]byte("Go Go<|end|>")), tok.EndOfDocument())
	text, err := tok.Decode([]int{2, 4, 5})
	fmt.Printf("%q %v\n", text, err)
	// Output:
	// [2 4 5] 5
	// "Go Go" <nil>
}

// This example decodes ids one at a time, as a model generates them.
func ExampleDecoder() {
	tok, err := hf.Parse([]byte(file), nil)
	if err != nil {
		log.Fatal(err)
	}

	d := tok.NewDecoder(true) // skips special tokens
	for _, id := range []int{0, 1, 3, 5} {
		part, err := d.Next(id)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%q ", part)
	}

	fmt.Printf("%q\n", d.Flush())
	// Output: "G" "o" " " "" ""
}
