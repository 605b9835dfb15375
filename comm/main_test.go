package comm

import (
	"flag"
	"testing"
)

// TestMain lets more tests run in parallel than there are processors, because they wait for deadlines.
func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "16"); err != nil {
		panic(err)
	}
	m.Run()
}
