package sampler_test

import (
	"fmt"
	"log"

	"github.com/kasmina-go/kasmina/llm/sampler"
)

func ExampleDraw() {
	logits := []float64{0.5, 2, -1, 2.5}
	greedy, err := sampler.New(sampler.Config{})
	if err != nil {
		log.Fatal(err)
	}

	id, err := sampler.Draw(greedy, logits)
	fmt.Println(id, err)

	warm, err := sampler.New(sampler.Config{Temperature: 0.8, TopK: 2, Seed: 1})
	if err != nil {
		log.Fatal(err)
	}

	var counts [4]int
	for range 1000 {
		id, err := sampler.Draw(warm, logits)
		if err != nil {
			log.Fatal(err)
		}
		counts[id]++
	}

	fmt.Println("only 1 and 3:", counts[0] == 0 && counts[2] == 0, "3 more often:",
		counts[3] > counts[1])
	// Output:
	// 3 <nil>
	// only 1 and 3: true 3 more often: true
}
