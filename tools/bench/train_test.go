package main

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// TestTraceFile checks that each training has its own trace file, and that a single training uses the
// given file.
func TestTraceFile(t *testing.T) {
	for _, test := range []struct {
		groups, models []string
		want           []string
	}{
		{[]string{"train"}, []string{"llama350M"}, []string{"out.json"}},
		{[]string{"recompute", "kasmina"}, []string{"llama350M"}, []string{"out.json"}},
		{[]string{"train", "train-kasmina"}, []string{"llama124M"},
			[]string{"out-llama124M.json", "out-llama124M_without_kasmina.json",
				"out-llama124M_kasmina.json", "out-llama124M_kasmina_telemetry.json"}},
		{[]string{"train"}, []string{"llama350M", "llama925M"},
			[]string{"out-llama350M.json", "out-llama925M.json"}},
	} {
		o := options{groups: test.groups, models: test.models, profile: "out.json"}
		var files []string
		for _, s := range sizes {
			for _, v := range variants {
				if o.trains(s, v) {
					files = append(files, o.traceFile(s.name+v.suffix))
				}
			}
		}
		if !slices.Equal(files, test.want) {
			t.Errorf("groups %q, models %q: %q, want %q", test.groups,
				test.models, files, test.want)
		}
	}
}

// TestUnwritableProfile checks that a trace which cannot be written is rejected before anything is measured.
func TestUnwritableProfile(t *testing.T) {
	for path, ok := range map[string]bool{"": true, "out.json": true,
		filepath.Join(t.TempDir(), "out.json"): true, "nowhere/out.json": false} {
		o := options{steps: 1, profile: path}
		if err := o.check([]string{"train"}); (err == nil) != ok {
			t.Errorf("%q: %v", path, err)
		}
	}
}

func TestVariants(t *testing.T) {
	s := size{"tiny", llm.Config{Vocab: 16, Dim: 64, Layers: 3, Heads: 2, FF: 64, Seq: 8}, 1, false}
	if groups := gpuGroups(); len(slices.Compact(slices.Sorted(slices.Values(groups)))) !=
		len(groups) {
		t.Errorf("two groups have one name: %q", groups)
	}

	for _, v := range variants {
		if !slices.Contains(gpuGroups(), v.group) {
			t.Errorf("%q is in no group", v.suffix)
		}
		m, err := s.model(v)
		if err != nil {
			t.Fatal(err)
		}
		if want := s.config.Layers * v.seeds; m.NumSeeds() != want {
			t.Errorf("%s%s has %d seeds, want %d", v.group, v.suffix, m.NumSeeds(), want)
		}
		for _, l := range m.Kasmina.Lattices() {
			if l.Telemetry() != v.telemetry {
				t.Errorf("%s%s has telemetry %v, want %v", v.group, v.suffix,
					l.Telemetry(), v.telemetry)
			}
			for seed := range v.seeds {
				want := []state.Stage{state.Grafting, state.Dormant}[seed%2]
				if stage, err := l.Stage(seed); err != nil || stage != want {
					t.Errorf("seed %d is %v (%v), want %v", seed, stage, err, want)
				}
			}
		}
	}
}

// TestTrainings checks that the trainings of one group alternate, and that all others run alone.
func TestTrainings(t *testing.T) {
	o := options{groups: gpuGroups(), models: modelNames()}
	for _, s := range sizes {
		var got []int
		for _, variants := range o.trainings(s) {
			for _, v := range variants {
				if (v.group == inTurns) != (len(variants) > 1) {
					t.Errorf("%s%s is one of %d", s.name, v.suffix, len(variants))
				}
			}
			got = append(got, len(variants))
		}
		want := []int{1, 1, 1, 1}
		if s.published {
			want = []int{1}
		}
		if s.name == "llama124M" {
			want = append(want, 3)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: turns of %v, want %v", s.name, got, want)
		}
	}
}
