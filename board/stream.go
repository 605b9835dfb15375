package board

import (
	"bytes"
	"net/http"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/board/internal/store"
)

// Times of a stream.
const (
	// at which a viewer is told what is new, for each of the viewers: all together take as much as one
	viewerEvery = 250 * time.Millisecond
	aliveEvery  = 15 * time.Second // at least, for proxies and to notice who has gone
)

// stream tells a viewer of what changes, until it goes or the board is closed.
func (b *Board) stream(w http.ResponseWriter, r *http.Request) {
	leave, ok := b.viewers.take(clientOf(r.RemoteAddr))
	if !ok {
		w.Header().Set("Retry-After", "10")
		refuse(w, http.StatusServiceUnavailable,
			"the board has as many viewers as it serves at a time")
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
		if err := v.tell(b.all(), b.gpus()); err != nil {
			return
		}
		select {
		case <-r.Context().Done():
			return
		case <-b.closing:
			<-b.drained
			v.tell(b.all(), nil)
			return
		case <-time.After(untilTold(time.Now(), b.viewers.count())):
		}
	}
}

// untilTold is how long one of n viewers waits. All wait for the same moments, since what they lack is
// then the same, and is written once.
func untilTold(now time.Time, n int) time.Duration {
	every := time.Duration(max(1, n)) * viewerEvery
	return every - time.Duration(now.UnixNano())%every
}

// viewer is one stream.
type viewer struct {
	response http.ResponseWriter
	control  *http.ResponseController
	seen     map[*store.Run]*store.Cursor
	news     bytes.Buffer
	cards    []api.Card
	told     time.Time
}

// tell sends what is new.
func (v *viewer) tell(runs []*store.Run, cards []api.Card) error {
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
	if v.news.Len() == 0 && time.Since(v.told) > aliveEvery {
		v.news.WriteString(":\n\n")
	}
	if v.news.Len() == 0 {
		return nil
	}
	v.told = time.Now()
	// A handler under a test's recorder has no deadlines.
	_ = v.control.SetWriteDeadline(v.told.Add(stalled))
	if _, err := v.response.Write(v.news.Bytes()); err != nil {
		return err
	}
	return v.control.Flush()
}
