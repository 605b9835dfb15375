package memory

import (
	"math"
	"strings"
	"testing"
)

func TestCheck(t *testing.T) {
	if err := Check("nothing takes", 0); err != nil {
		t.Error(err)
	}

	if ofComputer() == 0 {
		t.Skip("it is not known how much memory this computer has")
	}

	if err := Check("all of it takes", ofComputer()); err != nil {
		t.Error(err)
	}

	if err := Check("everything takes", math.MaxUint64); err == nil ||
		!strings.Contains(err.Error(), "everything takes 17179869184.0 GiB, but") {
		t.Errorf("got %v", err)
	}
}
