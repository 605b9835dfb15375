package parallel_test

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
)

// whole resumes a finished checkpoint in a single process and returns the file that it saves.
func (s setup) whole(t *testing.T, from string) []byte {
	t.Helper()
	s.resume, s.parts = from, false
	return s.file(t, 0)
}

// otherFiles returns the names of all other files in a checkpoint's directory.
func otherFiles(t *testing.T, path string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	for _, e := range entries {
		if e.Name() != filepath.Base(path) && !strings.HasSuffix(e.Name(), ".lock") {
			names = append(names, e.Name())
		}
	}
	return names
}

// TestParts checks that a checkpoint written by several ranks together has the same contents as one
// written by a single process, that any number of ranks can resume it, and that no older files remain
// in its directory.
func TestParts(t *testing.T) {
	for name, s := range randtest.Sample(t, 2, map[string]setup{
		"AdamW":     {config: small(), steps: 8, accumulate: 4, every: 2},
		"Muon":      {config: small(), steps: 8, accumulate: 4, every: 2, optimizer: muon},
		"Lion":      {config: small(), steps: 4, accumulate: 4, every: 2, optimizer: lion},
		"AdamW8bit": {config: small(), steps: 4, accumulate: 4, every: 2, optimizer: adamW8bit},
		"growing": {config: small(), steps: 14, accumulate: 4, every: 3,
			grow: true, commands: true},
	}, "growing") { // it does all that the others do
		t.Run(name, func(t *testing.T) {
			want := s.file(t, 0)
			s.parts, s.background = true, true
			pairs := [][2]int{{2, 3}, {3, 2}, {4, 1}, {1, 4}}
			if !randtest.Long() {
				pairs = pairs[rand.IntN(len(pairs)):][:1]
			}
			for _, sizes := range pairs {
				own := s
				own.save = filepath.Join(t.TempDir(), "run.safetensors")
				own.stop = s.steps / 2
				require.ErrorIs(t, own.run(t, sizes[0]), errStop)
				require.Len(t, otherFiles(t, own.save), sizes[0])
				_, err := llm.LoadModel(t.Context(), own.save)
				require.NoError(t, err)
				own.stop, own.resume = 0, own.save
				require.NoError(t, own.run(t, sizes[1]))
				require.Len(t, otherFiles(t, own.save), sizes[1])
				require.True(t, bytes.Equal(want, s.whole(t, own.save)), "%d ranks", sizes)
				own.parts, own.resume = false, own.save
				require.NoError(t, own.run(t, 2))
				require.Empty(t, otherFiles(t, own.save))
			}
		})
	}
}

// TestPartsTidy checks that a save removes the remains of killed saves and nothing else.
func TestPartsTidy(t *testing.T) {
	s := setup{config: small(), steps: 2, accumulate: 2, parts: true}
	s.save = filepath.Join(t.TempDir(), "run.safetensors")
	dir := filepath.Dir(s.save)
	const id = "0123456789abcdef"
	keep := []string{"run.safetensors." + id, "other.safetensors." + id + "-1of2",
		"run.safetensors." + id + "-1of2.tmp-" + id, "run.safetensors.bak-1of2"}
	for _, name := range append([]string{"run.safetensors." + id + "-1of2"}, keep...) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o666))
	}

	// A killed process may leave an unlocked temporary file of its part.
	part := filepath.Join(dir, "run.safetensors."+id+"-2of2")
	require.NoError(t, atomicfile.WritePart(part, s.save, func(f *os.File) error {
		hash, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(f.Name()), ".kasmina-"), "-")
		return os.WriteFile(filepath.Join(dir, ".kasmina-"+hash+"-"+id+".tmp"), nil, 0o666)
	}))
	require.NoError(t, s.run(t, 2))
	for _, name := range keep {
		require.FileExists(t, filepath.Join(dir, name))
	}

	require.Len(t, otherFiles(t, s.save), len(keep)+2)
}

// TestDamagedParts checks that an incomplete or corrupted set of files is rejected with an error that
// names the problem and the file, and that a sound set can be resumed.
func TestDamagedParts(t *testing.T) {
	s := setup{config: small(), steps: 2, accumulate: 2, parts: true}
	s.save = filepath.Join(t.TempDir(), "run.safetensors")
	require.NoError(t, s.run(t, 2))
	other := s
	other.text, other.save = 1, filepath.Join(t.TempDir(), "run.safetensors")
	require.NoError(t, other.run(t, 2))
	parts, theirs := otherFiles(t, s.save), otherFiles(t, other.save)
	require.Len(t, parts, 2)
	second := filepath.Join(filepath.Dir(s.save), parts[1])
	sound, err := os.ReadFile(second)
	require.NoError(t, err)
	stranger, err := os.ReadFile(filepath.Join(filepath.Dir(other.save), theirs[1]))
	require.NoError(t, err)
	first, err := os.ReadFile(filepath.Join(filepath.Dir(s.save), parts[0]))
	require.NoError(t, err)
	flipped := bytes.Clone(sound)
	flipped[len(flipped)-3] ^= 4
	for want, content := range map[string][]byte{
		"needs all of them": nil,
		"does not belong":   stranger,
		"its metadata is":   first,
		"checksum":          flipped,
		"the file is cut":   sound[:len(sound)-9],
		"not a stretch of":  s.edited(t, second, "optimizer.", "optimiser."),
		"and the ID":        nil,
		"elements, where":   s.edited(t, second, "@", "@9"),
		" elements of ":     s.edited(t, second, "", ""),
	} {
		require.NoError(t, os.WriteFile(second, content, 0o666))
		from := s.save
		switch want {
		case "needs all of them":
			require.NoError(t, os.Remove(second))
		case "and the ID":
			from = s.foreignMain(t)
		}
		own := s
		own.resume, own.save, own.parts = from, "", false
		err := own.run(t, 0)
		require.ErrorContains(t, err, want, "want %q", want)
	}

	require.NoError(t, os.WriteFile(second, sound, 0o666))
	own := s
	own.resume, own.save = s.save, ""
	require.NoError(t, own.run(t, 0))
}

// TestDamagedPartsOfScales checks the same for moments with fewer elements than their parameters.
func TestDamagedPartsOfScales(t *testing.T) {
	s := setup{config: small(), steps: 2, accumulate: 2, parts: true, optimizer: adamW8bit}
	s.save = filepath.Join(t.TempDir(), "run.safetensors")
	require.NoError(t, s.run(t, 2))
	second := filepath.Join(filepath.Dir(s.save), otherFiles(t, s.save)[1])
	sound, err := os.ReadFile(second)
	require.NoError(t, err)

	for want, content := range map[string][]byte{
		"says that its moment has": s.edited(t, second, "/", "/x"),
		"of shape":                 s.edited(t, second, "/", "/9"),
		" elements of ":            s.edited(t, second, "", ""),
	} {
		require.NoError(t, os.WriteFile(second, content, 0o666))
		own := s
		own.resume, own.save, own.parts = s.save, "", false
		require.ErrorContains(t, own.run(t, 0), want)
	}

	require.NoError(t, os.WriteFile(second, sound, 0o666))
	own := s
	own.resume, own.save = s.save, ""
	require.NoError(t, own.run(t, 0))
}

// edited returns a part with old replaced by to in the names of tensors. If old is empty, it instead
// drops every tensor that doesn't start at element 0.
func (s setup) edited(t *testing.T, path, old, to string) []byte {
	t.Helper()
	tensors, metadata, err := safetensors.Load(path)
	require.NoError(t, err)
	if old == "" {
		tensors = slices.DeleteFunc(tensors, func(x safetensors.Tensor) bool {
			return !strings.HasSuffix(x.Name, "@0")
		})
	}

	for i := range tensors {
		tensors[i].Name = strings.ReplaceAll(tensors[i].Name, old, to)
	}

	out := filepath.Join(t.TempDir(), "part")
	require.NoError(t, safetensors.Save(out, tensors, metadata))
	b, err := os.ReadFile(out)
	require.NoError(t, err)
	return b
}

// foreignMain returns a main file that refers to an impossible set of parts.
func (s setup) foreignMain(t *testing.T) string {
	t.Helper()
	tensors, metadata, err := safetensors.Load(s.save)
	require.NoError(t, err)
	metadata["kasmina.parts"] = `{"id":"../../../passwd","files":2}`
	out := filepath.Join(t.TempDir(), "run.safetensors")
	require.NoError(t, safetensors.Save(out, tensors, metadata))
	return out
}
