package optime

import "time"

// Choice is the way in which a machine computes an op of some shape.
type Choice struct {
	Op     string   `json:"op"`    // as in RMSNorm
	Shape  string   `json:"shape"` // as in "4096x1024 bfloat16"
	Way    string   `json:"way"`   // as in rows-4; of a GPU's matrix product what cuBLASLt calls it
	Of     int      `json:"of"`    // how many ways there were
	Ways   []string `json:"-"`     // their names
	Source Source   `json:"source"`
	// Cold is what it took when it was timed, with nothing in the cache; 0 if it was not timed.
	Cold time.Duration `json:"cold_ns,omitempty"`
}

// Source says why a way was chosen.
type Source string

// The sources of a choice.
const (
	ByRule   Source = "rule"   // by rule of thumb
	Stored   Source = "stored" // timed before
	Measured Source = "timed"  // in this process
	Forced   Source = "forced" // by WithWays or KASMINA_WAYS
)
