//go:build !unix

package regular

// nonBlocking is not needed where pipes do not stand in folders.
const nonBlocking = 0
