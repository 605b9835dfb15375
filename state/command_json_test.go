package state

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state/graft"
)

// TestCommandsAreJSON wants every command to come back from a file as it was.
func TestCommandsAreJSON(t *testing.T) {
	for _, c := range []Command{
		{Action: Germinate, Layer: 1, Seed: 2, Why: "it is \"hungry\"",
			Request: GerminationRequest{Slot: 3,
				Kind: blueprints.ConvFilter, Strategy: graft.GradNormGated{Epochs: 9,
					Target: 0.5, High: 3}}},
		{Action: Germinate, Request: GerminationRequest{Kind: blueprints.Stack, Size: 4}},
		{Action: Move, Seed: 5, To: RolledBack},
		{Action: Recycle, Layer: 4},
		{Action: SetAlpha, Alpha: 0.3},
		{Action: Quarantine},
		{Action: Load, Kind: blueprints.LowRank,
			Params: SlotParams{Weights: []float64{1, -0.1}, Scale: 2}},
	} {
		text, err := json.Marshal(c)
		require.NoError(t, err)
		var again Command
		require.NoError(t, json.Unmarshal(text, &again), "%s", text)
		require.Equal(t, c, again, "%s", text)
	}
	for _, bad := range []string{`{}`, `{"action":"Grow"}`, `{"action":"Move","to":"Away"}`,
		`{"action":"Move","seed":-1,"to":"Culled"}`,
		`{"action":"Germinate","kind":"None"}`,
		`{"action":"Germinate","kind":"Stack","strategy":{"name":"no"}}`, `[]`} {
		require.Error(t, json.Unmarshal([]byte(bad), &Command{}), bad)
	}
}
