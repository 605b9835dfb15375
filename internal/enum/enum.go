// Package enum names the constants of small types.
package enum

import "fmt"

// Name returns the name of a constant by its number, or its type and number, such as "Stage(12)",
// where it has none.
func Name[T ~uint8](v T, kind string, names []string) string {
	if int(v) < len(names) && names[v] != "" {
		return names[v]
	}
	return fmt.Sprintf("%s(%d)", kind, uint8(v))
}
