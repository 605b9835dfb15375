package runlog

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/internal/eventtest"
	"github.com/kasmina-go/kasmina/optime"
)

func TestJSON(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "folder", "log.jsonl")
	events := eventtest.Run(4, 5)
	sampled, saved, interrupted := events[2], events[2], events[2]
	sampled.Kind, sampled.Text = llm.Sampled, "a \"text\"\n\xff"
	saved.Kind, saved.Path = llm.Saved, "model.safetensors"
	interrupted.Kind = llm.Interrupted
	profiled := events[2]
	profiled.Kind, profiled.Ops = llm.Profiled, []optime.OpTime{{Op: "Linear", Tasks: 2, Time: 1500,
		FLOPs: 3e9, Variants: []string{"7"}}}
	end := events[3]
	end.Err = errors.New("out of luck")
	eventtest.Send(t, JSON(path), append(events[:3], sampled, profiled, saved, interrupted, end)...)
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}

	want := []string{
		`"event":"start","step":4,"elapsed_s":0,"steps":5,"params":1234567,"all_params":1234567,"seeds":64}`,
		`"event":"step","step":5,"elapsed_s":1.5,"train_loss":1,"learning_rate":0.0003,` +
			`"grad_norm":null,"tokens_per_s":666.66`,
		`"event":"eval","step":5,"elapsed_s":1.5,"val_loss":1.5,"val_bpb":2.164`,
		`"event":"sample","step":5,"elapsed_s":1.5,"text":"a \"text\"\n` + "\\ufffd\"}",
		`"event":"profile","step":5,"elapsed_s":1.5,` +
			`"ops":[{"op":"Linear","tasks":2,"ns":1500,"flops":3000000000,"variants":["7"]}]}`,
		`"event":"saved","step":5,"elapsed_s":1.5,"path":"model.safetensors"}`,
		`"event":"interrupted","step":5,"elapsed_s":1.5}`,
		`"event":"end","step":5,"elapsed_s":1.5,"train_loss":1,"tokens_per_s":666.66`,
	}

	lines := strings.Split(strings.TrimSuffix(string(content), "\n"), "\n")
	if len(lines) != len(want) {
		t.Fatalf("%d lines, want %d:\n%s", len(lines), len(want), content)
	}

	for i, line := range lines {
		if !json.Valid([]byte(line)) || !strings.Contains(line, want[i]) {
			t.Errorf("line %d is\n%s\nwant\n%s", i, line, want[i])
		}
	}

	if !strings.Contains(lines[7], `"error":"out of luck"`) {
		t.Errorf("the last line lacks the error: %s", lines[7])
	}
}

// TestJSONContinues checks that if a process is killed while writing, the incomplete line does not
// swallow the first line of the next process.
func TestJSONContinues(t *testing.T) {
	whole := filepath.Join(t.TempDir(), "log.jsonl")
	eventtest.Send(t, JSON(whole), eventtest.Run(0, 3)...)
	content, err := os.ReadFile(whole)
	if err != nil {
		t.Fatal(err)
	}

	r := randtest.New(t)
	for range 20 {
		path := filepath.Join(t.TempDir(), "log.jsonl")
		cut := content[:r.IntN(len(content)+1)]
		if err := os.WriteFile(path, cut, 0o666); err != nil {
			t.Fatal(err)
		}
		eventtest.Send(t, JSON(path), eventtest.Run(2, 4)...)
		var events []string
		if err := Read(path, func(r Record) { events = append(events, r.Event) }); err != nil {
			t.Fatal(err)
		}
		complete := bytes.Count(cut, []byte("\n"))
		if len(cut) > 0 && bytes.HasSuffix(cut, []byte("}")) {
			complete++
		}
		got := strings.Join(events, " ")
		if len(events) != complete+4 || !strings.HasSuffix(got, "start step step end") {
			t.Fatalf("after %d bytes with %d lines the log has %q", len(cut), complete, got)
		}
	}
}

func TestJSONReportsWhereItFails(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}

	err := JSON("")(llm.Event{Kind: llm.RunStart})
	if err == nil || err.Error() != `runlog: JSON: the path is empty: pass the name of the log file` {
		t.Errorf("no path: got %v", err)
	}

	err = JSON(filepath.Join(file, "log.jsonl"))(llm.Event{Kind: llm.RunStart})
	if err == nil || !strings.Contains(err.Error(), file) || !strings.HasPrefix(err.Error(),
		"runlog: JSON: ") {
		t.Errorf("got %v", err)
	}
}

// TestLongLines checks that Read skips lines that are too long for a record without holding them in
// memory, including at the end of the log.
func TestLongLines(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log.jsonl")
	long := `{"event":"step","step":1,"text":"` + strings.Repeat("x", 9*maxRecord) + `"}`
	for _, log := range []string{long + "\n" + `{"step":7}` + "\n" + long,
		long + "\n" + `{"step":7}` +
			"\n" + long + "\n", `{"step":7}` + "\n" + long} {
		require.NoError(t, os.WriteFile(path, []byte(log), 0o666))
		var steps []int
		bounded.Run(t, 0, func() {
			require.NoError(t, Read(path,
				func(r Record) { steps = append(steps, r.Step) }))
		})
		require.Equal(t, []int{7}, steps)
	}
}

// FuzzRead checks that Read accepts any bytes and needs no more memory than a record does.
func FuzzRead(f *testing.F) {
	f.Add([]byte(`{"event":"start","step":0}` + "\n" + `{"step":1,"train_loss":2}` + "\n"))
	f.Add([]byte("null\n[]\n3\n{}\n{"))
	path := filepath.Join(f.TempDir(), "log.jsonl")
	f.Fuzz(func(t *testing.T, content []byte) {
		require.NoError(t, os.WriteFile(path, content, 0o666))
		bounded.Run(t, int64(len(content)), func() {
			require.NoError(t, Read(path, func(Record) {}))
		})
	})
}

// TestReadRejects checks that Read returns an error for paths that are not files, and for a file
// that consists of one endless line.
func TestReadRejects(t *testing.T) {
	for _, path := range texttest.NoFiles(t) {
		require.ErrorContains(t, Read(path, func(Record) {}), path)
	}
	hole := texttest.Hole(t, nil)
	bounded.Run(t, 0, func() {
		require.ErrorContains(t, Read(hole, func(Record) {}), "not a log")
	})
}

// TestOn checks that the start record, and no other, describes the computer.
func TestOn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log.jsonl")
	eventtest.Send(t, JSON(path, On(map[string]string{"device": "a card", "cores": "3"})),
		eventtest.Run(0, 2)...)
	described := 0
	if err := Read(path, func(r Record) {
		if r.Machine == nil {
			return
		}
		described++
		if r.Event != "start" || r.Machine["device"] != "a card" || r.Machine["cores"] != "3" ||
			r.Machine["go"] == "" {
			t.Errorf("%s: %v", r.Event, r.Machine)
		}
	}); err != nil || described != 1 {
		t.Errorf("%d records describe the machine, %v", described, err)
	}
}
