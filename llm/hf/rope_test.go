package hf

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestBothSpellingsOfRope checks configurations that have rope_scaling or rope_theta together with
// rope_parameters. The wanted values are the rope_parameters of transformers 5.24.
func TestBothSpellingsOfRope(t *testing.T) {
	plain := func(theta float64) rope { return rope{theta: theta, kind: "default"} }
	linear := func(theta, factor float64) rope {
		return rope{theta: theta, kind: "linear", factor: factor}
	}
	for _, c := range []struct {
		folder, fields string
		full, local    rope
	}{
		{"llama2", `{"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_scaling":
			{"rope_type": "linear", "factor": 4}}`, linear(1e4, 4), plain(0)},
		{"llama2", `{"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3"}, "rope_theta": 3e4,
			"rope_scaling": {"type": "linear", "factor": 4}}`, linear(3e4, 4), plain(0)},
		{"llama2", `{"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
			"rope_scaling": {}}`, plain(5e5), plain(0)},
		{"llama2", `{"rope_parameters": {"rope_type": "linear", "factor": 2}, "rope_theta": 7e4,
			"rope_scaling": null}`, linear(7e4, 2), plain(0)},
		{"llama2", `{"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 8e4},
			"rope_theta": 7e4}`, linear(8e4, 2), plain(0)},
		{"llama2", `{"rope_parameters": null, "rope_theta": 7e4,
			"rope_scaling": {"rope_type": "linear", "factor": 2, "rope_theta": 9e4}}`,
			linear(9e4, 2), plain(0)},
		{"gemma3", `{"rope_parameters": {"full_attention": {"rope_theta": 5e5, "rope_type":
			"default"}, "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"}},
			"rope_scaling": {"rope_type": "linear", "factor": 8}}`, linear(5e5, 8), plain(2e4)},
		{"gemma3", `{"rope_parameters": null, "rope_theta": 3e5, "rope_local_base_freq": 2e4,
			"rope_scaling": {"rope_type": "linear", "factor": 8}}`, linear(3e5, 8), plain(2e4)},
		{"gemma3", `{"rope_parameters": {"full_attention": {"rope_theta": 5e5, "rope_type": "linear",
			"factor": 2}}, "rope_scaling": {"factor": 8}}`, linear(5e5, 8), plain(1e4)},
		{"gemma3", `{"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2},
			"sliding_attention": null}, "rope_theta": 3e5, "rope_local_base_freq": 2e4}`,
			linear(3e5, 2), plain(2e4)},
	} {
		got, err := parseConfig(configWith(t, c.folder, c.fields))
		require.NoError(t, err, c.fields)
		got.rope.original, got.localRope.original = 0, 0 // these kinds ignore original
		require.Equal(t, c.full, got.rope, c.fields)
		require.Equal(t, c.local, got.localRope, c.fields)
	}

	// transformers merges this with defaults that have a rope_type of default, and therefore scales
	// nothing.
	_, err := parseConfig(configWith(t, "gemma3", `{"rope_parameters": null,
		"rope_scaling": {"type": "linear", "factor": 8}}`))
	require.ErrorContains(t, err, "rope_scaling.type")
}

// TestZeroAndNullOfYarn checks zeros and nulls in YaRN's fields. transformers treats certain ones as
// missing.
func TestZeroAndNullOfYarn(t *testing.T) {
	got, err := parseConfig(configWith(t, "llama-yarn", `{"rope_parameters": null, "rope_scaling":
		{"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "beta_fast": 0,
		"beta_slow": 0, "truncate": null}}`))
	require.NoError(t, err)
	s := got.rope.scaling()
	require.EqualValues(t, 32, s.BetaFast)
	require.EqualValues(t, 1, s.BetaSlow)
	require.True(t, s.Unrounded)
}

// TestWrittenPattern checks that _sliding_window_pattern, which transformers writes next to layer_types
// but never reads, makes no layer windowed.
func TestWrittenPattern(t *testing.T) {
	got, err := parseConfig(configWith(t, "gemma3", `{"_sliding_window_pattern": 1,
		"layer_types": null}`))
	require.NoError(t, err)
	require.Contains(t, got.windowed, true)
}

// configWith returns the config.json of a folder with some fields replaced.
func configWith(t *testing.T, folder, fields string) []byte {
	text, err := os.ReadFile(filepath.Join("testdata", folder, configName))
	require.NoError(t, err)
	var all map[string]any
	require.NoError(t, json.Unmarshal(text, &all))
	require.NoError(t, json.Unmarshal([]byte(fields), &all))
	text, err = json.Marshal(all)
	require.NoError(t, err)
	return text
}
