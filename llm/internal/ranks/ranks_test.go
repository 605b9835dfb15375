package ranks

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestWithNews checks that WithNews omits an error that is already reported, and no other.
func TestWithNews(t *testing.T) {
	died := errors.New("rank 1 died")
	step := errors.Join(errors.New("step 7"), died)
	require.NoError(t, WithNews(nil, nil))
	require.Equal(t, died, WithNews(nil, died, died))
	require.Equal(t, step, WithNews(step, died, nil, died))
	full := errors.New("the disk is full")
	err := WithNews(step, died, full, died)
	require.EqualError(t, err, step.Error()+"\n"+full.Error())
	require.ErrorIs(t, err, full)
	require.ErrorIs(t, err, died)
}
