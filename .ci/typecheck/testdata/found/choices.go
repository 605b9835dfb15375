package found

import "fmt"

func choice(m map[string]int, want int) (string, error) {
	for name, n := range m {
		if n == want {
			return name, nil // want "name is returned for whichever key of a map comes first"
		}
		if err := check(n); err != nil {
			return "", err // want "err is returned"
		}
		if n < 0 {
			return "", fmt.Errorf("%s is %d", name, n) // want "is returned for whichever key"
		}
	}
	return "", nil
}

func check(n int) error { return fmt.Errorf("%d", n) }
