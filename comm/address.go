package comm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/kasmina-go/kasmina/comm/internal/channel"
)

// loopback is the address that ranks on a single host use.
const loopback = "127.0.0.1"

// settling limits how long rank 0 retries resolving its host's name. A cluster's name servers may
// learn a container's address only after the container has started.
const settling = 30 * time.Second

// local reports whether all ranks run on the same host.
func (p Place) local() bool { return p.LocalSize == p.Size }

// ownLoopback returns the loopback address if MasterAddr explicitly names one.
func (p Place) ownLoopback() (host string, ok bool) {
	if ip := net.ParseIP(p.MasterAddr); ip != nil && ip.IsLoopback() {
		return p.MasterAddr, true
	}
	if strings.EqualFold(p.MasterAddr, "localhost") {
		return loopback, true
	}
	return "", false
}

// listen makes rank 0 listen on the first free port of the window.
func (p Place) listen(ctx context.Context, id *channel.Identity) (*channel.Listener, error) {
	ctx, cancel := context.WithTimeout(ctx, settling)
	defer cancel()
	for {
		hosts, err := p.listenHosts(ctx)
		if err == nil {
			var l *channel.Listener
			if l, err = p.listenAt(hosts, id); err == nil || !errors.Is(err, errForeign) {
				return l, err
			}
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(time.Second):
		}
	}
}

// errForeign reports that an address does not belong to this host.
var errForeign = errors.New("not an address of this host")

// listenHosts returns the addresses that rank 0 listens on.
func (p Place) listenHosts(ctx context.Context) ([]string, error) {
	host, ok := p.ownLoopback()
	switch {
	case p.Listen != "" && !p.local():
		return []string{p.Listen}, nil
	case ok:
		return []string{host}, nil
	case p.local():
		return []string{loopback}, nil
	}

	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", p.MasterAddr)
	if err != nil {
		return nil, fmt.Errorf("rank 0 cannot resolve the name of its own host, MASTER_ADDR=%s: "+
			"%w; set MASTER_ADDR to a name or an address that every host can resolve", p.MasterAddr, err)
	}

	var hosts []string
	for _, ip := range ips {
		// Debian resolves a machine's own name to 127.0.1.1.
		if ip = ip.Unmap(); !ip.IsLoopback() && !slices.Contains(hosts, ip.String()) {
			hosts = append(hosts, ip.String())
		}
	}

	if len(hosts) == 0 {
		return nil, fmt.Errorf("MASTER_ADDR=%s resolves to %v on the host of rank 0, which other hosts "+
			"cannot reach; %s", p.MasterAddr, ips, listenHelp())
	}

	return hosts, nil
}

// listenAt listens on the same port of every address in hosts that belongs to this machine.
func (p Place) listenAt(hosts []string, id *channel.Identity) (*channel.Listener, error) {
	var own []string
	for _, host := range hosts {
		l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
		if errors.Is(err, syscall.EADDRNOTAVAIL) {
			continue
		}
		if err == nil {
			l.Close()
		}
		own = append(own, host)
	}

	if len(own) == 0 {
		from := "MASTER_ADDR=" + p.MasterAddr
		if p.Listen != "" {
			from = ListenVariable + "=" + p.Listen
		}
		return nil, fmt.Errorf("%s is %v, %w; %s", from, hosts, errForeign, listenHelp())
	}

	var failures []error
	for _, port := range p.ports() {
		l, err := id.Listen(addresses(own, port)...)
		if err == nil {
			return l, nil
		}
		failures = append(failures, err)
	}

	return nil, fmt.Errorf("rank 0 found no free port; set MASTER_PORT to another: %w",
		errors.Join(failures...))
}

// listenHelp returns advice on choosing an address to listen on.
func listenHelp() string {
	help := "set " + ListenVariable + " on rank 0 to an address of its host that the other hosts can reach, " +
		"or to 0.0.0.0 for all addresses"
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return help
	}

	var own []string
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() {
			own = append(own, n.IP.String())
		}
	}

	return fmt.Sprintf("%s (this host has %s)", help, strings.Join(own, ", "))
}

// targets returns every address and port where rank 0 may be listening.
func (p Place) targets() (all []string) {
	hosts := []string{p.MasterAddr}
	if host, ok := p.ownLoopback(); ok {
		hosts = []string{host}
	} else if p.local() {
		// Without LOCAL_WORLD_SIZE, rank 0 cannot always tell that all ranks share its host.
		hosts = []string{loopback, p.MasterAddr}
	}

	for _, port := range p.ports() {
		all = append(all, addresses(hosts, port)...)
	}

	return all
}

// addresses joins each host with the port.
func addresses(hosts []string, port int) (all []string) {
	for _, host := range hosts {
		all = append(all, net.JoinHostPort(host, strconv.Itoa(port)))
	}
	return all
}

// portOf returns the port of an address.
func portOf(a net.Addr) int {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return tcp.Port
	}
	return 0
}
