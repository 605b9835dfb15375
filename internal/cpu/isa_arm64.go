package cpu

// detectISA needs not look: every arm64 CPU has NEON.
func detectISA() ISA { return Neon }
