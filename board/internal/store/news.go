package store

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/kasmina-go/kasmina/board/api"
)

// Cursor is how far a viewer has seen a run.
type Cursor struct {
	changed        int64
	begun          bool
	history        int
	thinned        int
	step, eval     int
	event, sampled int
	version        int
}

// delta is the last piece of curves that viewers were sent: most ask for the same one.
type delta struct {
	from Cursor
	step int
	eval int
	text []byte
}

// newEvents bounds how many events a viewer gets at once.
const newEvents = 200

// News appends to the buffer, as server-sent events, what has changed in the run since a viewer has
// last asked, and moves its cursor. A viewer has no queue: who asks seldom gets more at once.
func (r *Run) News(b *bytes.Buffer, c *Cursor) error {
	changed := r.changed.Load()
	if c.begun && changed == c.changed {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if c.history != r.history {
		if c.begun {
			if err := Send(b, "again", again{r.id}); err != nil {
				return err
			}
		}
		*c = Cursor{history: r.history}
	}
	if err := r.standing(b, changed); err != nil {
		return err
	}
	if err := r.curves(b, c); err != nil {
		return err
	}
	if c.version != r.version {
		c.version = r.version
		if err := Send(b, "lattice", note{Run: r.run.ID, Version: r.version}); err != nil {
			return err
		}
	}
	if fresh := r.events[r.eventAt(c.event):]; len(fresh) > 0 {
		c.event = r.next
		fresh = fresh[max(0, len(fresh)-newEvents):]
		if err := Send(b, "events", happened{r.id, fresh}); err != nil {
			return err
		}
	}
	if c.sampled < r.sampled {
		fresh := r.samples[max(0, len(r.samples)-(r.sampled-c.sampled)):]
		c.sampled = r.sampled
		if err := Send(b, "samples", texts{r.run.ID, fresh}); err != nil {
			return err
		}
	}
	c.begun, c.changed = true, changed
	return nil
}

// standing sends where the run stands.
func (r *Run) standing(b *bytes.Buffer, changed int64) error {
	if r.told.text == nil || r.told.changed != changed {
		var own bytes.Buffer
		if err := Send(&own, "run", r.status()); err != nil {
			return err
		}
		r.told = standing{changed, own.Bytes()}
	}
	b.Write(r.told.text)
	return nil
}

// standing is the last status that viewers were sent, and the number of changes that it has.
type standing struct {
	changed int64
	text    []byte
}

type note struct {
	Run     string `json:"run"`
	Version int    `json:"version"`
}

// again tells a viewer to discard everything it has received of a run. The whole run follows.
type again struct {
	Run string `json:"run"`
}

type happened struct {
	Run    string      `json:"run"`
	Events []api.Event `json:"events"`
}

type texts struct {
	Run     string       `json:"run"`
	Samples []api.Sample `json:"samples"`
}

// curves sends the points that the viewer lacks, or all of them where they have been thinned.
func (r *Run) curves(b *bytes.Buffer, c *Cursor) error {
	all := !c.begun || c.thinned != r.steps.thinned
	if all {
		c.step, c.eval, c.thinned = 0, 0, r.steps.thinned
	} else if c.step == len(r.steps.points) && c.eval == len(r.evals) {
		return nil
	}
	d := &r.deltas
	if d.text == nil || d.from.step != c.step || d.from.eval != c.eval ||
		d.from.thinned != c.thinned ||
		d.step != len(r.steps.points) || d.eval != len(r.evals) {
		var own bytes.Buffer
		err := Send(&own, "series", struct {
			Run string `json:"run"`
			All bool   `json:"all"` // in place of what came before
			api.Series
		}{r.run.ID, all, r.series(c.step, c.eval)})
		if err != nil {
			return err
		}
		r.deltas = delta{*c, len(r.steps.points), len(r.evals), own.Bytes()}
	}
	c.step, c.eval = len(r.steps.points), len(r.evals)
	b.Write(r.deltas.text)
	return nil
}

// Send appends a server-sent event.
func Send(b *bytes.Buffer, kind string, v any) error {
	text, err := json.Marshal(v)
	if err == nil {
		_, err = fmt.Fprintf(b, "event: %s\ndata: %s\n\n", kind, text)
	}
	return err
}
