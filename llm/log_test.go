package llm

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/stretchr/testify/require"
)

func TestJSONLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "folder", "log.jsonl")
	events := run(4, 5)
	sampled, saved, interrupted := events[2], events[2], events[2]
	sampled.Kind, sampled.Text = Sampled, "a \"text\"\n\xff"
	saved.Kind, saved.Path = Saved, "model.safetensors"
	interrupted.Kind = Interrupted
	profiled := events[2]
	profiled.Kind, profiled.Ops = Profiled, []OpTime{{Op: "Linear", Tasks: 2, Time: 1500, FLOPs: 3e9, Ways: []string{"7"}}}
	end := events[3]
	end.Err = errors.New("out of luck")
	send(t, JSONLog(path), append(events[:3], sampled, profiled, saved, interrupted, end)...)
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		`"event":"start","step":4,"elapsed_s":0,"steps":5,"params":1234567,"seeds":64}`,
		`"event":"step","step":5,"elapsed_s":1.5,"train_loss":1,"learning_rate":0.0003,"grad_norm":null,"tokens_per_s":666.66`,
		`"event":"eval","step":5,"elapsed_s":1.5,"val_loss":1.5,"val_bpb":2.164`,
		`"event":"sample","step":5,"elapsed_s":1.5,"text":"a \"text\"\n` + "\\ufffd\"}",
		`"event":"profile","step":5,"elapsed_s":1.5,"ops":[{"op":"Linear","tasks":2,"ns":1500,"flops":3000000000,"ways":["7"]}]}`,
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

// A process that is killed while it writes leaves part of a line; the next one's first line must not be lost to it.
func TestJSONLogContinues(t *testing.T) {
	whole := filepath.Join(t.TempDir(), "log.jsonl")
	send(t, JSONLog(whole), run(0, 3)...)
	content, err := os.ReadFile(whole)
	if err != nil {
		t.Fatal(err)
	}
	r := texttest.Rand(t)
	for range 20 {
		path := filepath.Join(t.TempDir(), "log.jsonl")
		cut := content[:r.IntN(len(content)+1)]
		if err := os.WriteFile(path, cut, 0o666); err != nil {
			t.Fatal(err)
		}
		send(t, JSONLog(path), run(2, 4)...)
		var events []string
		if err := readLog(path, func(r logRecord) { events = append(events, r.Event) }); err != nil {
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

func TestJSONLogReportsWhereItFails(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	err := JSONLog(filepath.Join(file, "log.jsonl"))(Event{Kind: RunStart})
	if err == nil || !strings.Contains(err.Error(), file) || !strings.HasPrefix(err.Error(), "llm: JSONLog: ") {
		t.Errorf("got %v", err)
	}
}

func TestNumber(t *testing.T) {
	for x, want := range map[float64]string{1.5: "1.5", math.Inf(1): "null", math.Inf(-1): "null", 0: "0"} {
		if got, err := json.Marshal(number(x)); err != nil || string(got) != want {
			t.Errorf("%v becomes %s, %v, want %s", x, got, err, want)
		}
	}
	if got, err := json.Marshal(number(math.NaN())); err != nil || string(got) != "null" {
		t.Errorf("NaN becomes %s, %v", got, err)
	}
}

// Whatever the log holds, it can be read and drawn.
func FuzzReadLog(f *testing.F) {
	f.Add([]byte(`{"event":"start","step":0}` + "\n" + `{"event":"step","step":1,"train_loss":2}` + "\n" + `{"event":"eval"`))
	f.Add([]byte(`{"event":"step","step":-5,"train_loss":1e308}` + "\n" + `{"event":"step","step":9e15,"train_loss":-1e308}`))
	f.Add([]byte("null\n[]\n3\n{}\n"))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, content []byte) {
		path := filepath.Join(dir, "log.jsonl")
		if err := os.WriteFile(path, content, 0o666); err != nil {
			t.Fatal(err)
		}
		var c lossCurve
		bounded.Run(t, int64(len(content)), func() {
			if err := c.restore(path); err != nil {
				t.Fatal(err)
			}
		})
		for _, points := range [][]float64{xs(c.train), xs(c.heldOut)} {
			for _, x := range points {
				if math.IsNaN(x) || math.IsInf(x, 0) {
					t.Fatalf("a point at %v", x)
				}
			}
		}
	})
}

func xs(c curve) []float64 {
	var xs []float64
	for _, p := range c.XYs {
		xs = append(xs, p.X, p.Y)
	}
	return xs
}

// TestLongLines wants lines that are too long for records to be passed over without being kept,
// also at the end of a log.
func TestLongLines(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log.jsonl")
	long := `{"event":"step","step":1,"text":"` + strings.Repeat("x", 9*maxRecord) + `"}`
	for _, log := range []string{long + "\n" + `{"step":7}` + "\n" + long, long + "\n" + `{"step":7}` +
		"\n" + long + "\n", `{"step":7}` + "\n" + long} {
		require.NoError(t, os.WriteFile(path, []byte(log), 0o666))
		var steps []int
		bounded.Run(t, 0, func() {
			require.NoError(t, readLog(path,
				func(r logRecord) { steps = append(steps, r.Step) }))
		})
		require.Equal(t, []int{7}, steps)
	}
}
