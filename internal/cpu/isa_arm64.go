package cpu

// detectISA returns Neon, which every arm64 CPU supports.
func detectISA() ISA { return Neon }
