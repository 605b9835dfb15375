package store

import (
	"cmp"
	"maps"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/state"
)

// Limits of the groups of events.
const (
	maxGroups     = 1 << 12 // groups kept per run
	maxNamedSeeds = 4       // seeds listed in a group
	recentGroups  = 200     // groups that a new viewer receives in any case
	maxMarkers    = 1000    // older groups that a new viewer receives because charts mark them
)

// A group is an api.Group that counts its changes.
type group struct {
	api.Group
	revision int // value of groups.revision at the last change
}

// groups summarizes the events of a run. Events of one step that differ only in their seed form a
// group, in whatever order they arrive.
//
// The grouping must happen here, on all events, rather than in the page: a page that is opened late
// does not receive all events, so it would count only a part of each group.
type groups struct {
	all      []group
	next     int // number of the next group
	revision int // counts changes
	open     map[groupKey]int
}

// A groupKey identifies a group within the current step.
type groupKey struct {
	step, epoch            int
	kind, from, to, reason string
	value                  uint64 // bits of the value, because NaN differs from itself
}

// add adds an event that happened after the given number of seconds. The board does not report
// opened gates: they are frequent and change nothing by themselves.
func (g *groups) add(e api.Event, seconds float64) {
	if e.Kind == state.GateOpened.String() {
		return
	}
	g.revision++

	if n := len(g.all); n == 0 || g.all[n-1].Step != e.Step {
		g.open = map[groupKey]int{}
	}
	key := groupKey{e.Step, e.Epoch, e.Kind, e.From, e.To, e.Reason,
		math.Float64bits(float64(e.Value))}
	ref := api.SeedRef{Layer: e.Layer, Seed: e.Seed, Place: e.Place}
	if number, found := g.open[key]; found && e.Layer >= 0 {
		at := &g.all[g.index(number)]
		at.Count++
		at.revision = g.revision
		if len(at.Seeds) < maxNamedSeeds {
			at.Seeds = append(at.Seeds, ref)
		}
		return
	}

	if len(g.all) >= 2*maxGroups {
		g.all = slices.Clone(g.all[maxGroups:])
		maps.DeleteFunc(g.open, func(_ groupKey, number int) bool {
			return number < g.all[0].Number
		})
	}

	added := api.Group{Number: g.next, Step: e.Step, Time: api.Float(seconds), Epoch: e.Epoch,
		Kind: e.Kind, From: e.From, To: e.To, Value: e.Value, Reason: e.Reason, Count: 1}
	if e.Layer >= 0 {
		added.Seeds = []api.SeedRef{ref}
	}
	g.all = append(g.all, group{added, g.revision})
	g.open[key] = g.next
	g.next++
}

// index returns the index of the first group with at least the given number. The numbers of removed
// groups are not reused, so numbers and indices differ.
func (g *groups) index(number int) int {
	at, _ := slices.BinarySearchFunc(g.all, number, func(one group, number int) int {
		return cmp.Compare(one.Number, number)
	})
	return at
}

// cut removes the groups at steps that satisfy beyond, and reports whether there were any.
func (g *groups) cut(beyond func(step int) bool) bool {
	before := len(g.all)
	g.all = slices.DeleteFunc(g.all, func(one group) bool { return beyond(one.Step) })
	g.open = map[groupKey]int{}
	return len(g.all) < before
}

// since returns the groups that changed after a revision, oldest first. A viewer that has seen
// nothing yet receives the latest groups as well as older ones marked in the charts.
func (g *groups) since(revision int) []api.Group {
	changed, markers := []api.Group{}, 0
	for i := len(g.all) - 1; i >= 0; i-- {
		one := &g.all[i]
		if one.revision <= revision {
			if g.all[len(g.all)-1].Step != one.Step {
				break // only groups of the latest step change
			}
			continue
		}
		if len(g.all)-i > recentGroups {
			if !marked(&one.Group) || markers >= maxMarkers {
				continue
			}
			markers++
		}
		changed = append(changed, copied(one.Group))
	}
	slices.Reverse(changed)
	return changed
}

// marked reports whether charts mark a group.
func marked(g *api.Group) bool { return g.Kind == Grown || g.Kind == state.StageChanged.String() }

// copied returns a copy that does not change with the original.
func copied(g api.Group) api.Group {
	g.Seeds = slices.Clone(g.Seeds)
	return g
}

// from returns up to n groups, starting with the given number.
func (g *groups) from(number, n int) []api.Group {
	at := g.index(number)
	found := []api.Group{}
	for _, one := range g.all[at:min(len(g.all), at+n)] {
		found = append(found, copied(one.Group))
	}
	return found
}
