package settings

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// maxControllerOptions limits the size of a controller's options in a checkpoint. Larger options are
// replaced by their fingerprint.
const maxControllerOptions = 4 << 10

// GrowthOf returns the growth settings that are compared when a run is resumed: the type of the
// controller and its exported fields as JSON, the number of epochs between comparisons of blueprints, and
// the fingerprint of the validation text.
//
// Options of more than 4 KiB are replaced by their fingerprint, and options that JSON cannot encode are
// omitted. Fields that the controller's JSON omits are not compared.
func GrowthOf(controller any, every int, validation string) *Growth {
	g := &Growth{Controller: fmt.Sprintf("%T", controller), Every: every, Validation: validation}
	options, err := json.Marshal(controller)
	switch {
	case err != nil: // only the type can be compared
	case len(options) > maxControllerOptions:
		g.Options = fmt.Appendf(nil, `"%x"`,
			sha256.Sum256(append([]byte("controller "), options...)))
	default:
		g.Options = options
	}

	return g
}

// renamed maps old names of controllers, found in older checkpoints, to the current names.
var renamed = map[string]string{"*state.Heuristic": "*control.Heuristic"}

// Differences describes how the growth of two runs differs.
func (here *Growth) Differences(there *Growth) []string {
	switch {
	case there == nil:
		return nil
	case renamed[there.Controller] != "":
		present := *there
		present.Controller = renamed[there.Controller]
		return here.Differences(&present)
	case here.Controller == "" && there.Controller != "":
		return []string{fmt.Sprintf("the run grew with a %q, and this trainer does not grow: call "+
			"Grow", there.Controller)}
	case here.Controller != "" && there.Controller == "":
		return []string{fmt.Sprintf("the run did not grow, and this trainer does, with a %q",
			here.Controller)}
	}

	var diff []string
	for _, d := range []struct{ what, here, there string }{
		{"the controller", strconv.Quote(here.Controller), strconv.Quote(there.Controller)},
		{"Growth.Every", fmt.Sprint(here.Every), fmt.Sprint(there.Every)},
		{"Growth.Rewarm", fmt.Sprint(here.Rewarm), fmt.Sprint(there.Rewarm)},
		{"Growth.FreshMoments", fmt.Sprint(here.FreshMoments), fmt.Sprint(there.FreshMoments)},
		{"the fingerprint of Growth.Validation", strconv.Quote(here.Validation),
			strconv.Quote(there.Validation)},
	} {
		if d.here != d.there {
			diff = append(diff, fmt.Sprintf("%s is %s here and %s there", d.what, d.here, d.there))
		}
	}

	if here.Controller == there.Controller {
		diff = append(diff, optionDifferences(here.Options, there.Options)...)
	}

	if there.Governor != nil && !bytes.Equal(here.Governor, there.Governor) {
		diff = append(diff, fmt.Sprintf("Growth.Governor is %s here and %s there",
			cmp.Or(printable(here.Governor), "none"), printable(there.Governor)))
	}

	return diff
}

// optionDifferences describes the fields that differ between the JSON of two controllers.
func optionDifferences(here, there json.RawMessage) []string {
	var fields [2]map[string]json.RawMessage
	for i, options := range []json.RawMessage{here, there} {
		if json.Unmarshal(options, &fields[i]) == nil {
			continue
		}
		if bytes.Equal(here, there) {
			return nil
		}
		return []string{fmt.Sprintf("the controller as JSON is %s here and %s there",
			printable(here), printable(there))}
	}

	all := maps.Clone(fields[0])
	maps.Copy(all, fields[1])
	var diff []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if x, y := fields[0][name], fields[1][name]; !bytes.Equal(x, y) {
			diff = append(diff, fmt.Sprintf("the controller's %q is %s here and %s there",
				name, cmp.Or(printable(x), "none"), cmp.Or(printable(y), "none")))
		}
	}

	return diff
}

// printable formats JSON for an error. It quotes JSON with control characters, which a terminal might
// interpret.
func printable(text json.RawMessage) string {
	s, strange := string(text), func(r rune) bool { return !unicode.IsPrint(r) }
	if utf8.ValidString(s) && !strings.ContainsFunc(s, strange) {
		return s
	}
	return strconv.Quote(s)
}
