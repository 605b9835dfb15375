package comm

import (
	"crypto/rand"
	"encoding"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"

	"github.com/kasmina-go/kasmina/comm/internal/channel"
)

// A Secret is shared by all processes of a run and authenticates them to each other. A Secret, or a
// Place containing one, is formatted and encoded as "(secret)". Use string(s) to get its text.
type Secret string

var (
	_ fmt.Formatter          = Secret("")
	_ encoding.TextMarshaler = Secret("")
)

// The environment variables that provide a [Secret]: either its text or the name of a file that
// contains it and is accessible only to its owner.
const (
	SecretVariable     = "KASMINA_SECRET"
	SecretFileVariable = "KASMINA_SECRET_FILE"
)

// ErrSecret reports that a run of several processes has no usable secret.
var ErrSecret = errors.New("no usable secret")

// secretHelp explains how to create and pass a secret.
const secretHelp = "the processes of a run must share a random one. Create it with `openssl rand -hex 32` " +
	"and pass it to all of them in " + SecretVariable + ", or in a file of mode 0600 that " +
	SecretFileVariable + " names"

// NewSecret returns a random secret of at least 128 bits.
func NewSecret() Secret { return Secret(rand.Text()) }

// SecretFromEnvironment returns the secret from the environment, or an empty secret if neither
// variable is set. Pass os.Getenv as getenv.
func SecretFromEnvironment(getenv func(string) string) (Secret, error) {
	if s := Secret(strings.TrimSpace(getenv(SecretVariable))); s != "" {
		return s, s.checkLength()
	}

	path := getenv(SecretFileVariable)
	if path == "" {
		return "", nil
	}

	info, err := os.Stat(path)
	if err != nil {
		return "", fmt.Errorf("%w: %s: %w", ErrSecret, SecretFileVariable, err)
	}

	if others := info.Mode() & 0o077; others != 0 && runtime.GOOS != "windows" {
		return "", fmt.Errorf("%w: %s: %s has mode %#o and is accessible to other users: chmod 600 %[3]s",
			ErrSecret, SecretFileVariable, path, info.Mode()&fs.ModePerm)
	}

	text, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("%w: %s: %w", ErrSecret, SecretFileVariable, err)
	}

	s := Secret(strings.TrimSpace(string(text)))
	if s == "" {
		return "", fmt.Errorf("%w: %s: %s is empty", ErrSecret, SecretFileVariable, path)
	}

	return s, s.checkLength()
}

// check returns an error if the secret is missing. It does not check the length: a program that sets a
// secret itself chooses its length, and SecretFromEnvironment has already called checkLength.
func (s Secret) check() error {
	if s == "" {
		return fmt.Errorf("%w: %s", ErrSecret, secretHelp)
	}
	return nil
}

// checkLength returns an error if the secret could be guessed.
func (s Secret) checkLength() error {
	if len(s) < channel.MinSecret {
		return fmt.Errorf("%w: it has %d characters, want at least %d, because anyone who can reach rank 0 "+
			"can test guesses: %s", ErrSecret, len(s), channel.MinSecret, secretHelp)
	}
	return nil
}

// redacted replaces secrets in output.
const redacted = "(secret)"

// Format prints "(secret)" for every verb, or nothing for an empty secret.
func (s Secret) Format(f fmt.State, _ rune) {
	if s != "" {
		fmt.Fprint(f, redacted)
	}
}

// MarshalText returns "(secret)", or nothing for an empty secret.
func (s Secret) MarshalText() ([]byte, error) { return fmt.Append(nil, s), nil }
