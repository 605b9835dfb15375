// Package enum names the constants of small types.
package enum

import "fmt"

// Name returns the name of a constant, or its type and number, such as "Stage(12)", if it has no
// name.
func Name[T ~uint8](v T, kind string, names []string) string {
	if int(v) < len(names) && names[v] != "" {
		return names[v]
	}
	return fmt.Sprintf("%s(%d)", kind, uint8(v))
}
