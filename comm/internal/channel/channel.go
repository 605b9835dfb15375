// Package channel authenticates and encrypts the connections between the ranks of a run.
//
// Every rank knows the run's secret. Both ends of a connection use TLS 1.3 and present a certificate
// for the same ed25519 key, which is derived from the secret with HKDF-SHA-256. Each end accepts only
// this public key, so certificate authorities, host names and clocks are irrelevant.
//
// # Why TLS
//
// The alternative would be an HMAC over every message, with separate keys for each connection and
// direction and a sequence number in each message. It would require our own key exchange and wire
// format, and would leave the data readable. TLS 1.3 provides all of this and is thoroughly analyzed.
// It rejects modified, repeated, reordered and reflected records. Each connection uses fresh keys, so
// a recorded connection cannot be replayed, and leaking the secret later does not decrypt it.
//
// # Limits
//
// Every process that knows the secret is trusted and may claim to be any rank. The caller must check
// that both ends belong to the same run.
//
// A listener presents its certificate to any client, which allows a stranger to test guesses of the
// secret offline. Guessing is hopeless for a random secret (see [MinSecret]) but easy for a
// dictionary word.
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

// MinSecret is the minimum length, in characters, of an unguessable random secret: 128 bits in
// base64. Code that accepts secrets from outside must reject shorter ones.
const MinSecret = 22

// ErrStranger reports that the peer did not prove knowledge of the secret.
var ErrStranger = errors.New("the peer does not know this run's secret: it is another run, another " +
	"program, or a process with another secret")

// HandshakeTimeout limits the time for a peer to prove knowledge of the secret. Tests change it.
var HandshakeTimeout = 10 * time.Second

// protocol identifies the protocol spoken over a connection. Peers with different versions reject
// each other.
const protocol = "kasmina-comm/2"

// KeepAlive lets the kernel detect a dead host within 15 seconds, no matter how busy the peer process
// is.
var KeepAlive = net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second,
	Interval: 5 * time.Second, Count: 2}

// An Identity proves knowledge of a secret. Its methods are safe for concurrent use.
type Identity struct {
	config  *tls.Config
	timeout time.Duration // HandshakeTimeout except in tests
}

// New derives the identity shared by all holders of the secret.
func New(secret string) (*Identity, error) {
	if secret == "" {
		return nil, errors.New("the secret is empty")
	}

	seed, err := hkdf.Key(sha256.New, []byte(secret), nil, "kasmina comm: ed25519 key of all ranks",
		ed25519.SeedSize)
	if err != nil {
		return nil, err
	}

	private := ed25519.NewKeyFromSeed(seed)
	public := private.Public().(ed25519.PublicKey)

	// Only the key in the certificate matters.
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

		// VerifyConnection replaces verification of the certificate chain on both sides. TLS
		// still verifies that the peer has the private key.
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

// Dial connects to an address and verifies that the listener knows the secret. If the listener in
// turn rejects this side, the first Read from the connection fails.
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

// explain wraps TLS errors caused by an unrelated program or another secret in ErrStranger.
func explain(err error) error {
	var record tls.RecordHeaderError
	var alert tls.AlertError
	if errors.As(err, &record) || errors.As(err, &alert) {
		return fmt.Errorf("%w (%w)", ErrStranger, err)
	}
	return err
}
