package settings

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state/control"
)

// TestControllerOfOlderCheckpoint checks that a checkpoint that names a controller by its old name can be
// resumed.
func TestControllerOfOlderCheckpoint(t *testing.T) {
	here := GrowthOf(control.NewHeuristic(4, 1000), 1, "")
	there := *here
	there.Controller = "*state.Heuristic"
	require.Empty(t, here.Differences(&there))
	require.Equal(t, "*state.Heuristic", there.Controller)
	require.Len(t, GrowthOf(control.NewHeuristic(5, 1000), 1, "").Differences(&there), 1)
}

// TestStringsOfAFileAreQuoted checks that differences do not contain control characters from a file.
func TestStringsOfAFileAreQuoted(t *testing.T) {
	const hostile = "\x1b[2J\u009b2J\x7f"
	here := Settings{Plain: Plain{Tokenizer: "bytes", Engine: "cpu"}, Steps: 1,
		Rates: RatesOf(optim.Constant(1), 1)}
	there := here
	there.Tokenizer, there.Engine, there.Optimizer = hostile, hostile, hostile
	diff := here.Differences(there, optim.Constant(1))
	require.Len(t, diff, 3)

	grown := func(controller, options string) *Growth {
		return &Growth{Controller: controller, Options: json.RawMessage(options)}
	}
	for _, there := range []*Growth{
		grown(hostile, "{}"),
		{Controller: "C", Validation: hostile},
		grown("C", `{"`+hostile[4:]+`": 1}`),
		grown("C", `{"A": "`+hostile[4:]+`"}`),
		grown("C", "[\x1b]"),
	} {
		for _, here := range []*Growth{grown("C", `{"A": 2}`), {}} {
			found := here.Differences(there)
			require.NotEmpty(t, found)
			diff = append(diff, found...)
		}
	}

	diff = append(diff, grown("", "").Differences(grown(hostile, ""))...)
	for _, d := range diff {
		strange := func(r rune) bool { return !unicode.IsPrint(r) }
		require.False(t, strings.ContainsFunc(d, strange), "%q", d)
	}
}
