package blueprints

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOrder(t *testing.T) {
	for _, c := range []struct {
		kind         Kind
		blocks, size int
		want         []int
	}{
		{Stack, 2, 3, []int{0, 1, 0, 1, 0, 1}},
		{Interleave, 2, 3, []int{0, 0, 0, 1, 1, 1}},
		{NewBlocks, 2, 1, []int{0, 1, NewBlock}},
		{Middle, 6, 2, []int{0, 1, 2, 3, 2, 3, 4, 5}},
		{Middle, 4, 3, []int{0, 1, 2, 1, 2, 1, 2, 3}},
		{Middle, 2, 2, []int{0, 1, 0, 1}},
	} {
		order, err := Order(c.kind, c.blocks, c.size)
		require.NoError(t, err)
		require.Equal(t, c.want, order)
	}

	for _, bad := range [][3]int{{int(Stack), 2, 1}, {int(Stack), 0, 2},
		{int(Stack), 1 << 16, 1 << 16},
		{int(Middle), 6, 1}, {int(Middle), 1 << 16, 1 << 16},
		{int(Interleave), 2, 0}, {int(LowRank), 2, 2}} {
		_, err := Order(Kind(bad[0]), bad[1], bad[2])
		require.ErrorIs(t, err, ErrInvalid, "%v", bad)
	}
}

// TestRegisterDepth checks that the order of a user-defined kind is validated and that its panics
// become errors.
func TestRegisterDepth(t *testing.T) {
	register := func(name string, order func(blocks, size int) []int) Kind {
		k, err := Register(Blueprint{Name: name, Site: Depth, Order: order})
		require.NoError(t, err)
		return k
	}
	mirror := register("Mirror", func(blocks, _ int) (order []int) {
		order = stack(blocks, 2)
		for i := range blocks {
			order[blocks+i] = blocks - 1 - i
		}
		return order
	})

	order, err := Order(mirror, 3, 1)
	require.NoError(t, err)
	require.Equal(t, []int{0, 1, 2, 2, 1, 0}, order)
	require.Contains(t, KindsAt(Depth), mirror)
	require.NotContains(t, KindsAt(Chunk), mirror)
	for name, bad := range map[string]func(blocks, size int) []int{
		"Panics":  func(int, int) []int { panic("no") },
		"Loses":   func(blocks, _ int) []int { return make([]int, blocks+1) },
		"Strange": func(blocks, _ int) []int { return append(stack(blocks, 1), blocks) },
	} {
		_, err := Order(register(name, bad), 3, 1)
		require.Error(t, err, name)
	}

	_, err = Register(Blueprint{Name: "Nothing", Site: Depth})
	require.ErrorIs(t, err, ErrInvalid)
	_, err = Size(Stack, 1, 1)
	require.ErrorIs(t, err, ErrInvalid)
}
