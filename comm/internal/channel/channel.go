// Package channel authenticates and encrypts the connections between the ranks of a run.
//
// Every rank knows the run's secret. Both ends of a connection speak TLS 1.3 and present a
// certificate for the same ed25519 key, which HKDF-SHA-256 derives from the secret. Each end
// accepts this one public key and nothing else, so certificate authorities, host names and clocks
// play no part.
//
// # Why TLS
//
// The alternative is an HMAC over every message, with a key for each connection and direction and a
// number for each message. It would need a key exchange, a transcript of it, a nonce from either
// side and a wire format of our own, and would leave the data readable. TLS 1.3 has all of these
// and has been analyzed far more than our protocol would be. It rejects a changed, repeated,
// reordered or reflected record. Both sides contribute fresh keys, so a recording of one connection
// is worthless in another, and a secret that leaks later does not decrypt it.
//
// # What it does not do
//
// Whoever knows the secret is trusted: it may claim to be any rank. The caller has to check that
// two of them belong to the same run.
//
// The certificate of a listener goes to anybody who asks for it. It lets a stranger test guesses of
// the secret offline, which is hopeless against a random secret (see [MinSecret]) and easy against
// a word.
package channel

import (
	"context"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/big"
	"net"
	"time"
)

// MinSecret is the least number of characters in a secret: 128 random bits in base64.
const MinSecret = 22

// ErrStranger is the error of a connection whose other end does not prove that it knows the secret.
var ErrStranger = errors.New("what answers there does not know this run's secret: it is " +
	"another run, another program, or a process with another secret")

// HandshakeTimeout is how long either end of a connection waits for the other to prove that it
// knows the secret.
const HandshakeTimeout = 10 * time.Second

// protocol names what is spoken inside of the connection. Ends that speak different versions
// refuse each other.
const protocol = "kasmina-comm/2"

// KeepAlive lets the kernel notice within 15 seconds that a host is gone. It does not depend on how
// busy the process at the other end is.
var KeepAlive = net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second,
	Interval: 5 * time.Second, Count: 2}

// An Identity is the ability to prove knowledge of a secret. Its methods may be called from any
// goroutine.
type Identity struct {
	config  *tls.Config
	timeout time.Duration // HandshakeTimeout, but in tests
}

// New derives the identity that everybody with the secret shares.
func New(secret string) (*Identity, error) {
	if len(secret) < MinSecret {
		return nil, fmt.Errorf("a secret of %d characters, want at least %d", len(secret),
			MinSecret)
	}

	seed, err := hkdf.Key(sha256.New, []byte(secret), nil, "kasmina comm: ed25519 key of all ranks",
		ed25519.SeedSize)
	if err != nil {
		return nil, err
	}
	private := ed25519.NewKeyFromSeed(seed)
	public := private.Public().(ed25519.PublicKey)

	// Nobody looks at anything in the certificate but its key.
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0),
		NotAfter: time.Date(9999, time.December, 31, 0, 0, 0, 0, time.UTC)}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, public, private)
	if err != nil {
		return nil, err
	}

	return &Identity{timeout: HandshakeTimeout, config: &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{protocol},
		Certificates: []tls.Certificate{
			{Certificate: [][]byte{certificate}, PrivateKey: private}},
		ClientAuth:             tls.RequireAnyClientCert,
		SessionTicketsDisabled: true,

		// The usual verification asks who issued a certificate. VerifyConnection replaces it: it
		// runs on both sides, and TLS itself verifies that the peer has the private key.
		InsecureSkipVerify: true,
		VerifyConnection: func(s tls.ConnectionState) error {
			if s.NegotiatedProtocol != protocol || len(s.PeerCertificates) == 0 ||
				!public.Equal(s.PeerCertificates[0].PublicKey) {
				return ErrStranger
			}
			return nil
		},
	}}, nil
}

// Dial connects to an address and returns once the listener there has proved that it knows the
// secret. The listener may still find that this side does not: reading from the connection then
// fails.
func (id *Identity) Dial(ctx context.Context, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, id.timeout)
	defer cancel()

	dialer := net.Dialer{KeepAliveConfig: KeepAlive}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	secured := tls.Client(conn, id.config)
	if err := secured.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, explain(err)
	}
	return secured, nil
}

// explain replaces what TLS says of a peer that speaks something else, which helps nobody.
func explain(err error) error {
	var record tls.RecordHeaderError
	var alert tls.AlertError
	if errors.As(err, &record) || errors.As(err, &alert) {
		return fmt.Errorf("%w (%w)", ErrStranger, err)
	}
	return err
}
