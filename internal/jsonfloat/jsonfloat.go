// Package jsonfloat encodes floating-point numbers, including NaN and infinities, as JSON.
package jsonfloat

import (
	"encoding/json"
	"math"
)

// Float is encoded as null if it is NaN or infinite, which JSON cannot represent, and null is
// decoded as NaN.
type Float float64

// MarshalJSON implements json.Marshaler.
func (f Float) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(f)) || math.IsInf(float64(f), 0) {
		return []byte("null"), nil
	}
	return json.Marshal(float64(f))
}

// UnmarshalJSON implements json.Unmarshaler.
func (f *Float) UnmarshalJSON(text []byte) error {
	if string(text) == "null" {
		*f = Float(math.NaN())
		return nil
	}
	return json.Unmarshal(text, (*float64)(f))
}
