//go:build !amd64

package gemm

import "github.com/kasmina-go/kasmina/internal/cpu"

func compactKernelsFor(cpu.ISA) compactKernels { return portableCompact() }
