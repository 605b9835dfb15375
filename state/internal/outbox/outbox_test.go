package outbox

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestOutbox checks that listeners receive all events in order, including events that a listener
// adds, and none while events are held.
func TestOutbox(t *testing.T) {
	var box, network Outbox[int]
	box.Relay(&network, func(e *int) { *e += 100 })
	var heard, relayed []int
	stop := box.Listen(func(e int) {
		heard = append(heard, e)
		if e == 1 {
			box.Add(9)
			box.Deliver() // the outer call delivers it after the current events
		}
	})

	network.Listen(func(e int) { relayed = append(relayed, e) })
	box.Add(1, 2)
	require.Empty(t, heard)
	box.Hold(1)
	network.Hold(1)
	box.Deliver()
	require.Empty(t, append(heard, relayed...))
	box.Hold(-1)
	network.Hold(-1)
	box.Deliver()
	require.Equal(t, []int{1, 2, 9}, heard)
	require.Equal(t, []int{101, 102, 109}, relayed)
	stop()
	box.Add(3)
	box.Deliver()
	require.Len(t, heard, 3)
	require.Equal(t, 103, relayed[3])
}

// TestPanic checks that an outbox continues to work after a listener has panicked.
func TestPanic(t *testing.T) {
	var box Outbox[int]
	var heard []int
	box.Listen(func(e int) {
		if e == 0 {
			panic("boom")
		}
		heard = append(heard, e)
	})
	box.Add(0)
	require.Panics(t, box.Deliver)
	box.Add(4)
	box.Deliver()
	require.Equal(t, []int{4}, heard)
}
