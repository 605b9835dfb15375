//go:build !amd64

package strip

import "github.com/kasmina-go/kasmina/internal/cpu"

func kernelsFor(cpu.ISA) *kernels { return nil }
