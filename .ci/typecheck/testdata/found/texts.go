package found

import (
	"encoding/gob"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"strings"
)

func texts(m map[string]int, w io.Writer, h hash.Hash, e *gob.Encoder) (s string) {
	var b strings.Builder
	for k, v := range m {
		s += k                    // want "s is extended in the order of a map"
		s = s + "," + k           // want "s is extended"
		b.WriteString(k)          // want "b.WriteString writes in the order of a map"
		fmt.Fprintln(&b, k, v)    // want "fmt.Fprintln writes"
		fmt.Fprintf(w, "%s\n", k) // want "fmt.Fprintf writes"
		h.Write([]byte(k))        // want "h.Write writes"
		fmt.Println(k)            // want "fmt.Println writes"
		if e.Encode(v) != nil {   // want "e.Encode writes"
			return ""
		}
	}
	return s + b.String()
}

func draws(m map[string][]float64, r *rand.Rand) {
	for _, x := range m {
		x[0] = r.Float64() // want "r draws random numbers in the order of a map"
	}
}
