// Package seedtest corrupts seeds for tests, as faulty memory does.
package seedtest

import (
	"math"
	"reflect"
	"sync"
	"testing"

	"github.com/kasmina-go/kasmina/state"
)

// FlipAlpha flips bit 3 of a seed's α. It writes to the field's memory, because all methods of a
// lattice renew the checksum.
func FlipAlpha(t testing.TB, l *state.Lattice, seed int) {
	t.Helper()
	fields := reflect.ValueOf(l).Elem()
	mu := (*sync.RWMutex)(fields.FieldByName("mu").Addr().UnsafePointer())
	seeds := fields.FieldByName("seeds").Elem()
	alpha := *(*[]float32)(seeds.FieldByName("alpha").Addr().UnsafePointer())
	mu.Lock()
	defer mu.Unlock()
	alpha[seed] = math.Float32frombits(math.Float32bits(alpha[seed]) ^ 1<<3)
}
