package optime

// Ceiling is what a device reaches at best, as measured.
type Ceiling struct {
	// Product is the operations a second of large products of matrices. Copy is the bytes a second,
	// read and written ones together, of a copy in its memory. Either is 0 where it was not
	// measured.
	Product float64 `json:"product_flops_per_s,omitempty"`
	Copy    float64 `json:"copy_bytes_per_s,omitempty"`
	Type    string  `json:"type,omitempty"` // of the products' operands
}
