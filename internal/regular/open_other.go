//go:build !unix

package regular

// nonBlocking is not needed on systems without named pipes in directories.
const nonBlocking = 0
