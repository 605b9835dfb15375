package store

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/kasmina-go/kasmina/board/api"
)

// A Cursor records how much of a run a viewer has received.
type Cursor struct {
	changed        int64
	started        bool
	history        int
	thinned        int
	step, eval     int
	group, sampled int
	version        int
}

// delta caches the most recently sent section of the curves, because most viewers need the same one.
type delta struct {
	from Cursor
	step int
	eval int
	text []byte
}

// sentStatus caches the last status that was sent.
type sentStatus struct {
	changed int64 // Run.changed when the status was taken
	text    []byte
}

// News appends the changes of the run since the previous call with the same cursor to b, as server-sent
// events, and advances the cursor. Viewers need no queues of their own: a slow viewer calls News less
// often and simply receives more at a time.
func (r *Run) News(b *bytes.Buffer, c *Cursor) error {
	changed := r.changed.Load()
	if c.started && changed == c.changed {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()

	if c.history != r.history {
		if c.started {
			if err := Send(b, "again", runMessage{r.id}); err != nil {
				return err
			}
		}
		*c = Cursor{history: r.history}
	}
	if err := r.sendStatus(b, changed); err != nil {
		return err
	}
	if err := r.sendCurves(b, c); err != nil {
		return err
	}

	if c.version != r.version {
		c.version = r.version
		if err := Send(b, "lattice", versionMessage{Run: r.id, Version: r.version}); err != nil {
			return err
		}
	}
	if c.group != r.groups.revision {
		fresh := r.groups.since(c.group)
		c.group = r.groups.revision
		if err := Send(b, "groups", groupsMessage{r.id, fresh}); err != nil {
			return err
		}
	}
	if c.sampled < r.sampled {
		fresh := r.samples[max(0, len(r.samples)-(r.sampled-c.sampled)):]
		c.sampled = r.sampled
		if err := Send(b, "samples", samplesMessage{r.id, fresh}); err != nil {
			return err
		}
	}

	c.started, c.changed = true, changed
	return nil
}

// sendStatus sends the status of the run.
func (r *Run) sendStatus(b *bytes.Buffer, changed int64) error {
	if r.sent.text == nil || r.sent.changed != changed {
		var own bytes.Buffer
		if err := Send(&own, "run", r.status()); err != nil {
			return err
		}
		r.sent = sentStatus{changed, own.Bytes()}
	}
	b.Write(r.sent.text)
	return nil
}

// runMessage instructs a viewer to discard all data of a run, because the whole run follows again.
type runMessage struct {
	Run string `json:"run"`
}

// versionMessage announces a new picture of the seeds.
type versionMessage struct {
	Run     string `json:"run"`
	Version int    `json:"version"`
}

type groupsMessage struct {
	Run    string      `json:"run"`
	Groups []api.Group `json:"groups"`
}

type samplesMessage struct {
	Run     string       `json:"run"`
	Samples []api.Sample `json:"samples"`
}

type seriesMessage struct {
	Run string `json:"run"`
	All bool   `json:"all"` // the points replace those sent before
	api.Series
}

// sendCurves sends the points that the viewer has not received, or all points if they have been
// merged since.
func (r *Run) sendCurves(b *bytes.Buffer, c *Cursor) error {
	all := !c.started || c.thinned != r.steps.thinned
	if all {
		c.step, c.eval, c.thinned = 0, 0, r.steps.thinned
	} else if c.step == len(r.steps.points) && c.eval == len(r.evals) {
		return nil
	}

	d := &r.deltas
	if d.text == nil || d.from.step != c.step || d.from.eval != c.eval ||
		d.from.thinned != c.thinned || d.step != len(r.steps.points) || d.eval != len(r.evals) {
		var own bytes.Buffer
		message := seriesMessage{r.id, all, r.series(c.step, c.eval)}
		if err := Send(&own, "series", message); err != nil {
			return err
		}
		r.deltas = delta{*c, len(r.steps.points), len(r.evals), own.Bytes()}
	}
	c.step, c.eval = len(r.steps.points), len(r.evals)
	b.Write(r.deltas.text)
	return nil
}

// Send appends a server-sent event to b.
func Send(b *bytes.Buffer, kind string, v any) error {
	text, err := json.Marshal(v)
	if err == nil {
		_, err = fmt.Fprintf(b, "event: %s\ndata: %s\n\n", kind, text)
	}
	return err
}
