//go:build !unix

package regular

// nonBlocking is not needed on systems without named pipes in folders.
const nonBlocking = 0
