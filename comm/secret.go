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

// A Secret is what all processes of a run know and nobody else does. Formatting and encoding a
// Secret, or a Place that holds one, gives "(secret)"; string(s) is its text.
type Secret string

var (
	_ fmt.Formatter          = Secret("")
	_ encoding.TextMarshaler = Secret("")
)

// The environment variables for a [Secret]: the secret itself, or the name of a file that holds it
// and that only its owner can read.
const (
	SecretVariable     = "KASMINA_SECRET"
	SecretFileVariable = "KASMINA_SECRET_FILE"
)

// ErrSecret is wrapped by the errors of a run of several processes without a usable secret.
var ErrSecret = errors.New("no usable secret")

// secretHelp says how to give one to a run.
const secretHelp = "the processes of a run must share a random one. Make it with `openssl rand -hex 32` " +
	"and give it to all of them in " + SecretVariable + ", or in a file of mode 0600 that " +
	SecretFileVariable + " names"

// NewSecret returns a random secret of at least 128 bits.
func NewSecret() Secret { return Secret(rand.Text()) }

// SecretFromEnvironment reads the secret that the environment gives, getenv being os.Getenv. It is
// empty if the environment gives none.
func SecretFromEnvironment(getenv func(string) string) (Secret, error) {
	if getenv == nil {
		return "", errors.New("comm: SecretFromEnvironment: the function is nil, want os.Getenv")
	}
	if s := strings.TrimSpace(getenv(SecretVariable)); s != "" {
		return Secret(s), nil
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
		return "", fmt.Errorf("%w: %s: %s has mode %#o, so others may read or change it: chmod 600 %[3]s",
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
	return s, nil
}

// check returns an error if the secret is missing or could be guessed.
func (s Secret) check() error {
	if s == "" {
		return fmt.Errorf("%w: %s", ErrSecret, secretHelp)
	}
	if len(s) < channel.MinSecret {
		return fmt.Errorf("%w: it has %d characters, want at least %d, since anybody who reaches rank 0 can "+
			"test guesses: %s", ErrSecret, len(s), channel.MinSecret, secretHelp)
	}
	return nil
}

// redacted stands for a secret wherever one would be printed.
const redacted = "(secret)"

// Format prints "(secret)" for every verb, or nothing for an empty secret.
func (s Secret) Format(f fmt.State, _ rune) {
	if s != "" {
		fmt.Fprint(f, redacted)
	}
}

// MarshalText returns "(secret)", or nothing for an empty secret.
func (s Secret) MarshalText() ([]byte, error) { return fmt.Append(nil, s), nil }
