package variantrule

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAllowed(t *testing.T) {
	variants := []string{"ring", "ring-2", "plain"}
	for _, c := range []struct {
		rules, environment, want string
		forced, warned           bool
	}{
		{"", "", "ring ring-2 plain", false, false},
		{"Kasmina*=plain", "", "plain", true, false},
		{"Kasmina*=plain,KasminaForward=ring*", "", "ring ring-2", true, false},
		{"KasminaForward != ring-?", "", "ring plain", true, false},
		{"KasminaForward=plain", "KasminaForward=ring", "ring", true, false},
		{"KasminaForward=tile", "", "ring ring-2 plain", false, true},
		{"*!=*", "", "ring ring-2 plain", false, true},
		{"RMSNorm=any,*=host", "", "ring ring-2 plain", false, false},
	} {
		t.Setenv(Variable, c.environment)
		var rules Rules
		var err error
		if c.rules != "" {
			rules, err = Parse(strings.Split(c.rules, ","))
			require.NoError(t, err)
		}

		rules, err = rules.WithEnvironment()
		require.NoError(t, err)
		warned := false
		left, forced := rules.Allowed("KasminaForward", variants, func(string) { warned = true })
		var names []string
		for _, i := range left {
			names = append(names, variants[i])
		}
		require.Equal(t, c.want, strings.Join(names, " "), c.rules)
		require.Equal(t, c.forced, forced, c.rules)
		require.Equal(t, c.warned, warned, c.rules)
	}
}

func TestParseRefuses(t *testing.T) {
	for _, text := range []string{"", "RMSNorm", "=any", "RMSNorm=", "!=any",
		"RMSNorm=[", "[=any"} {
		_, err := Parse([]string{text})
		require.ErrorContains(t, err, "want OP=VARIANT", text)
	}
	t.Setenv(Variable, "RMSNorm")
	_, err := Rules(nil).WithEnvironment()
	require.ErrorContains(t, err, Variable)
}
