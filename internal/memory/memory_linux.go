package memory

import "golang.org/x/sys/unix"

func ofComputer() uint64 {
	var s unix.Sysinfo_t
	if unix.Sysinfo(&s) != nil {
		return 0
	}
	return (uint64(s.Totalram) + uint64(s.Totalswap)) * uint64(s.Unit)
}
