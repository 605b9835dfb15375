package gguf

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/processor"
)

// TestDescribe checks that Describe reports what Save wrote.
func TestDescribe(t *testing.T) {
	f, m := load(t, tiny)
	path := filepath.Join(t.TempDir(), "m.gguf")
	require.NoError(t, Save(t.Context(), path, f, m, Q80, nil))
	d, err := Describe(path)
	require.NoError(t, err)
	fields, tensors := read(t, path)
	require.Len(t, d.Fields, len(fields))
	values := map[string]string{}
	for _, x := range d.Fields {
		values[x.Name] = x.Value
	}

	require.Equal(t, "llama", values["general.architecture"])
	require.Equal(t, "2", values["llama.block_count"])
	require.Equal(t, "true", values["tokenizer.ggml.add_bos_token"])
	require.Equal(t, "400 elements", values["tokenizer.ggml.tokens"])
	require.Equal(t, "1e-06", values["llama.attention.layer_norm_rms_epsilon"])
	require.Len(t, d.Tensors, len(tensors))
	for _, x := range d.Tensors {
		require.Equal(t, tensors[x.Name].shape, x.Shape)
		require.Equal(t, tensors[x.Name].dtype.String(), x.Type)
	}
}

// TestDescribeHostile checks that Describe returns promptly for any prefix of a file and for a header
// with any single byte changed.
func TestDescribeHostile(t *testing.T) {
	f, m := load(t, tiny)
	path := filepath.Join(t.TempDir(), "m.gguf")
	require.NoError(t, Save(t.Context(), path, f, m, F16, nil))
	whole, err := os.ReadFile(path)
	require.NoError(t, err)
	begin := processor.Time(t)
	for _, n := range []int{0, 3, 4, 8, 20, 24, 30, 100, 1000, 5000} {
		require.NoError(t, os.WriteFile(path, whole[:n], 0o666))
		_, err := Describe(path)
		require.Error(t, err, n)
	}

	for at := range 600 {
		damaged := append([]byte(nil), whole...)
		damaged[at] ^= 0xff
		require.NoError(t, os.WriteFile(path, damaged, 0o666))
		_, _ = Describe(path) // must not panic; either result is fine
	}

	require.Less(t, processor.Time(t)-begin, time.Minute)
	require.NoError(t, os.WriteFile(path, append([]byte("GGML"), whole[4:]...), 0o666))
	_, err = Describe(path)
	require.ErrorContains(t, err, `want "GGUF"`)
	_, err = Describe(t.TempDir())
	require.Error(t, err)
}
