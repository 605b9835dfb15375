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

// loopback is where the ranks of one host meet.
const loopback = "127.0.0.1"

// settling is how long rank 0 waits for the name of its own host to be known. The name servers of a
// cluster may learn of a container, or of its new address, only after the container has started.
const settling = 30 * time.Second

// local reports whether all ranks are on one host.
func (p Place) local() bool { return p.LocalSize == p.Size }

// ownLoopback returns MasterAddr if it names the loopback interface itself.
func (p Place) ownLoopback() (host string, ok bool) {
	if ip := net.ParseIP(p.MasterAddr); ip != nil && ip.IsLoopback() {
		return p.MasterAddr, true
	}
	if strings.EqualFold(p.MasterAddr, "localhost") {
		return loopback, true
	}
	return "", false
}

// listen has rank 0 listen at the first port of the place's window that is free.
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

// errForeign is wrapped by the error of an address that is not one of this host's.
var errForeign = errors.New("not an address of this host")

// listenHosts returns the addresses at which rank 0 is to listen.
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
		return nil, fmt.Errorf("rank 0 does not know the address of its own host, MASTER_ADDR=%s: "+
			"%w; set MASTER_ADDR to a name or an address that all hosts know", p.MasterAddr, err)
	}
	var hosts []string
	for _, ip := range ips {
		// Some systems give the host's own name the address 127.0.1.1.
		if ip = ip.Unmap(); !ip.IsLoopback() && !slices.Contains(hosts, ip.String()) {
			hosts = append(hosts, ip.String())
		}
	}
	if len(hosts) == 0 {
		return nil, fmt.Errorf("MASTER_ADDR=%s is %v on the host of rank 0, where the other hosts "+
			"cannot reach it; %s", p.MasterAddr, ips, listenHelp())
	}
	return hosts, nil
}

// listenAt listens at those of the hosts that are this one, all at the same port.
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

// listenHelp says how to choose an address to listen at.
func listenHelp() string {
	help := "set " + ListenVariable + " on rank 0 to the address of its host that the others reach, or to " +
		"0.0.0.0 for all of them"
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
	return fmt.Sprintf("%s (it has %s)", help, strings.Join(own, ", "))
}

// targets returns the addresses at which a rank looks for rank 0, all ports of the window.
func (p Place) targets() (all []string) {
	hosts := []string{p.MasterAddr}
	if host, ok := p.ownLoopback(); ok {
		hosts = []string{host}
	} else if p.local() {
		// Rank 0 may not know that it is alone on its host, where the launcher does not say so.
		hosts = []string{loopback, p.MasterAddr}
	}
	for _, port := range p.ports() {
		all = append(all, addresses(hosts, port)...)
	}
	return all
}

// addresses returns the addresses of a port at several hosts.
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
