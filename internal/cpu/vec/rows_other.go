//go:build !amd64

package vec

import "github.com/kasmina-go/kasmina/internal/cpu"

func kernelsFor(cpu.ISA) *kernels { return nil }
