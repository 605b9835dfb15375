package board

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/kasmina-go/kasmina/board/api"
)

// A metric is a value of a run that Prometheus can read.
type metric struct {
	name, kind, help string
	value            func(api.Run) float64
}

var metrics = []metric{
	{"kasmina_step", "gauge", "Optimizer steps completed.", func(r api.Run) float64 {
		return float64(r.Step)
	}},
	{"kasmina_steps", "gauge", "Step at which the run ends, 0 if a budget ends it.",
		func(r api.Run) float64 { return float64(r.Steps) }},
	{"kasmina_done_ratio", "gauge", "Completed fraction of the run.", func(r api.Run) float64 {
		return float64(r.Share)
	}},
	{"kasmina_running", "gauge", "1 while the run is in progress, otherwise 0.", func(r api.Run) float64 {
		if r.State == "running" {
			return 1
		}
		return 0
	}},
	{"kasmina_train_loss", "gauge", "Training loss of the last step, nats per token.",
		func(r api.Run) float64 { return float64(r.Loss) }},
	{"kasmina_validation_loss", "gauge", "Latest held-out loss, nats per token.",
		func(r api.Run) float64 { return float64(r.ValLoss) }},
	{"kasmina_validation_bpb", "gauge", "Latest held-out bits per byte.",
		func(r api.Run) float64 { return float64(r.ValBPB) }},
	{"kasmina_learning_rate", "gauge", "Learning rate of the last step.",
		func(r api.Run) float64 { return float64(r.Rate) }},
	{"kasmina_gradient_norm", "gauge", "Global gradient norm of the last step, before clipping.",
		func(r api.Run) float64 { return float64(r.GradNorm) }},
	{"kasmina_tokens_total", "counter", "Tokens trained on since the process started the run.",
		func(r api.Run) float64 { return float64(r.Tokens) }},
	{"kasmina_tokens_per_second", "gauge", "Speed over the last seconds.",
		func(r api.Run) float64 { return float64(r.Speed) }},
	{"kasmina_flops_per_second", "gauge", "Operations of the model per second, over the last seconds.",
		func(r api.Run) float64 { return float64(r.FLOPs) }},
	{"kasmina_ceiling_flops_per_second", "gauge",
		"Measured peak of the devices in matrix products, 0 if unknown.",
		func(r api.Run) float64 { return float64(r.Ceiling) }},
	{"kasmina_ceiling_ratio", "gauge", "Fraction of the peak that the run reaches.",
		func(r api.Run) float64 { return float64(r.CeilingShare) }},
	{"kasmina_parameters", "gauge", "Trainable parameters.", func(r api.Run) float64 {
		return float64(r.Params)
	}},
	{"kasmina_epoch", "gauge", "Completed epochs of the lattices.",
		func(r api.Run) float64 { return float64(r.Epoch) }},
	{"kasmina_board_dropped_events_total", "counter", "Events lost because the queue was full.",
		func(r api.Run) float64 { return float64(r.Dropped) }},
}

// metrics answers a request of Prometheus.
func (b *Board) metrics(w http.ResponseWriter, _ *http.Request) {
	var runs []api.Run
	for _, run := range b.all() {
		runs = append(runs, run.Status())
	}

	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	text := exposition(runs)
	if b.trains() {
		text = append(text, cardExposition(b.cards.now())...)
	}
	w.Write(text)
}

// exposition returns the metrics of runs in Prometheus's text format.
func exposition(runs []api.Run) []byte {
	var b bytes.Buffer
	for _, m := range metrics {
		fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %s %s\n", m.name, m.help, m.name, m.kind)
		for _, r := range runs {
			fmt.Fprintf(&b, "%s{%s} %s\n", m.name, labels(r), value(m.value(r)))
		}
	}

	b.WriteString("# HELP kasmina_seeds Seeds by stage.\n# TYPE kasmina_seeds gauge\n")
	for _, r := range runs {
		for _, stage := range slices.Sorted(maps.Keys(r.Stages)) {
			fmt.Fprintf(&b, "kasmina_seeds{%s,stage=\"%s\"} %d\n", labels(r),
				escaped(stage), r.Stages[stage])
		}
	}
	return b.Bytes()
}

// labels returns the labels that identify a run.
func labels(r api.Run) string {
	return fmt.Sprintf(`run="%s",name="%s"`, escaped(r.ID), escaped(r.Name))
}

// escaped escapes a text for use within quotes.
func escaped(s string) string {
	return strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n",
		`\n`).Replace(strings.ToValidUTF8(s, "\uFFFD"))
}

// value formats a number.
func value(x float64) string {
	switch {
	case math.IsInf(x, 1):
		return "+Inf"
	case math.IsInf(x, -1):
		return "-Inf"
	}
	return strconv.FormatFloat(x, 'g', -1, 64)
}
