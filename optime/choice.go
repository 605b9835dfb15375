package optime

import "time"

// Choice is the variant a machine uses to compute an op for a given shape.
type Choice struct {
	Op       string   `json:"op"`      // such as RMSNorm
	Shape    string   `json:"shape"`   // such as "4096x1024 bfloat16"
	Variant  string   `json:"variant"` // such as rows-4; for a GPU's matrix product, cuBLASLt's name
	Of       int      `json:"of"`      // number of available variants
	Variants []string `json:"-"`       // names of these variants
	Source   Source   `json:"source"`
	// Cold is the measured time with cold caches, or 0 if the variant was not timed.
	Cold time.Duration `json:"cold_ns,omitempty"`
}

// Source is the reason for choosing a variant.
type Source string

// Sources of choices.
const (
	ByRule   Source = "rule"   // chosen by a rule of thumb
	Stored   Source = "stored" // timed earlier, with the result stored in a file
	Measured Source = "timed"  // timed in this process
	Forced   Source = "forced" // forced by WithVariants or KASMINA_VARIANTS
)
