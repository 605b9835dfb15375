package board

import (
	"bytes"
	"net/http"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/board/internal/store"
)

// Intervals of a stream.
const (
	// The interval between updates grows with the number of viewers, so that all viewers together
	// cost no more than one does.
	viewerEvery = 250 * time.Millisecond

	// An idle stream sends a comment, so that proxies keep the connection and the board notices that
	// a viewer has disconnected.
	aliveEvery = 15 * time.Second
)

// stream sends updates to a viewer until the viewer disconnects or the board is closed.
func (b *Board) stream(w http.ResponseWriter, r *http.Request) {
	leave, ok := b.viewers.take(clientOf(r.RemoteAddr))
	if !ok {
		w.Header().Set("Retry-After", "10")
		refuse(w, http.StatusServiceUnavailable, "too many viewers: try again later")
		return
	}
	defer leave()

	w.Header().Set("Content-Type", "text/event-stream")
	v := viewer{response: w, control: http.NewResponseController(w),
		seen: map[*store.Run]*store.Cursor{}}
	if err := store.Send(&v.news, "board", b.identity); err != nil {
		return
	}

	for {
		if err := v.update(b.all(), b.gpus()); err != nil {
			return
		}
		select {
		case <-r.Context().Done():
			return
		case <-b.closing:
			<-b.drained
			v.update(b.all(), nil)
			return
		case <-time.After(untilUpdate(time.Now(), b.viewers.count())):
		}
	}
}

// untilUpdate returns how long one of n viewers waits. All viewers are updated at the same moments,
// so that they need the same data, which is encoded only once.
func untilUpdate(now time.Time, n int) time.Duration {
	every := time.Duration(max(1, n)) * viewerEvery
	return every - time.Duration(now.UnixNano())%every
}

// A viewer is the state of one stream.
type viewer struct {
	response http.ResponseWriter
	control  *http.ResponseController
	seen     map[*store.Run]*store.Cursor
	news     bytes.Buffer
	cards    []api.Card
	sent     time.Time // of the last update
}

// update sends all changes since the last update.
func (v *viewer) update(runs []*store.Run, cards []api.Card) error {
	defer v.news.Reset()
	for _, run := range runs {
		c := v.seen[run]
		if c == nil {
			c = &store.Cursor{}
			v.seen[run] = c
		}
		if err := run.News(&v.news, c); err != nil {
			return err
		}
	}
	if len(cards) > 0 && !slices.Equal(cards, v.cards) {
		v.cards = cards
		if err := store.Send(&v.news, "cards", cards); err != nil {
			return err
		}
	}

	if v.news.Len() == 0 && time.Since(v.sent) > aliveEvery {
		v.news.WriteString(":\n\n")
	}
	if v.news.Len() == 0 {
		return nil
	}

	v.sent = time.Now()
	_ = v.control.SetWriteDeadline(v.sent.Add(stalled)) // test recorders have no deadlines
	if _, err := v.response.Write(v.news.Bytes()); err != nil {
		return err
	}
	return v.control.Flush()
}
