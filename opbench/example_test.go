package opbench_test

import (
	"fmt"
	"log"
	"time"

	"github.com/kasmina-go/kasmina/opbench"
)

// Compare RMSNorm of 256 rows of 512 features with the same function composed of Gorgonia's own ops. A
// program would print the figures with opbench.Table.
func ExampleTime() {
	figures, err := opbench.Time("RMSNorm", []int{256, 512}, opbench.Float32,
		opbench.WithSpan(20*time.Millisecond))
	if err != nil {
		log.Fatal(err)
	}

	for _, f := range figures {
		fmt.Println(f.Peer, "timed:", f.Forward > 0, "same result:", f.Distance < 1e-5)
	}
	// Output:
	// cpu timed: true same result: true
	// gorgonia timed: true same result: true
}
