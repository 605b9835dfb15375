package comm

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Times after which a waiting rank reports why it waits. Tests change them.
var (
	firstReport = 3 * time.Second
	laterReport = 30 * time.Second
)

// reportWaiting calls Options.Waiting while this rank waits for more ranks to join, until stop is called.
func (w *World) reportWaiting(c *caller) (stop func()) {
	if w.options.Waiting == nil {
		return func() {}
	}

	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for pause := firstReport; ; pause = laterReport {
			select {
			case <-done:
				return
			case <-time.After(pause):
			}
			if text := w.awaited(c); text != "" {
				w.options.Waiting(text)
			}
		}
	}()

	return func() {
		close(done)
		<-ended
	}
}

// awaited describes the ranks this rank is waiting for, or returns "" if it cannot tell.
func (w *World) awaited(c *caller) string {
	if w.store != nil {
		missing := w.store.missing()
		// This rank joins its own store last of all.
		missing = slices.DeleteFunc(missing, func(m member) bool { return m.Rank == 0 })
		if len(missing) == 0 {
			return ""
		}
		ranks := make([]string, len(missing))
		for i, m := range missing {
			ranks[i] = fmt.Sprint(m.Rank)
		}
		noun := "rank"
		if len(missing) > 1 {
			noun = "ranks"
		}
		return fmt.Sprintf("for %s %s of %d to join at %s (port %d); a process with another secret cannot join",
			noun, strings.Join(ranks, ", "), w.place.Size, w.place.MasterAddr, w.store.port)
	}

	refusals := c.refusals()
	if refusals == nil {
		return "for the other ranks to join"
	}

	text := fmt.Sprintf("for rank 0 at %s, ports %d to %d", c.place.MasterAddr, c.place.ports()[0],
		c.place.ports()[PortWindow-1])
	for _, err := range informative(refusals) {
		text += fmt.Sprintf("; %v", err)
	}

	return text
}

// refusals returns why the latest attempts to reach rank 0 failed, and nil once one has succeeded.
func (c *caller) refusals() (failures []error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, err := range c.failed {
		if err != nil {
			failures = append(failures, err)
		}
	}
	return failures
}

// setRefusal records why the latest attempt at a target failed.
func (c *caller) setRefusal(target int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failed == nil {
		c.failed = make([]error, len(c.targets))
	}
	c.failed[target] = err
}

// clearRefusals forgets the failed attempts after one has succeeded.
func (c *caller) clearRefusals() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failed = nil
}
