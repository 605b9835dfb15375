package optime

// Ceiling holds the measured peak performance of a device.
type Ceiling struct {
	// Product is the number of operations per second of large matrix products, and Copy the number
	// of bytes per second, read plus written, of a copy within the device's memory. Either is 0 if
	// it was not measured.
	Product float64 `json:"product_flops_per_s,omitempty"`
	Copy    float64 `json:"copy_bytes_per_s,omitempty"`
	Type    string  `json:"type,omitempty"` // type of the products' operands
}
