// Package api has the JSON of a board, under /api/v1, and its client. With it a program in another
// process watches a run and grows its model.
//
//	GET  /api/v1/runs                          []Run
//	GET  /api/v1/runs/{run}                    Run
//	GET  /api/v1/runs/{run}/series             Series
//	GET  /api/v1/runs/{run}/lattice            Lattice: what the picture needs, of every seed
//	GET  /api/v1/runs/{run}/events             []Event, the oldest first
//	GET  /api/v1/runs/{run}/seeds/{layer}/{n}  Seed
//	GET  /api/v1/runs/{run}/reports            []Report: of every layer, for controllers
//	GET  /api/v1/cards                         []Card: the GPUs of the board's computer
//	GET  /api/v1/stream                        server-sent events: run, series, lattice, events,
//	                                           samples, cards, as they change; board, which names
//	                                           the board; again, before everything of a run follows
//	                                           once more, since the run has been resumed or replaced
//
// A board that lets a run be steered (board.WithControl) has these too. Each POST is an order. It
// needs the token in the header Authorization, as Bearer TOKEN, and JSON of the type that the table
// names.
//
//	GET  /api/v1/control                       Control, without a token
//	POST /api/v1/runs/{run}/commands           Commands: together, after the present step
//	POST /api/v1/runs/{run}/telemetry          Telemetry, after the present step
//	POST /api/v1/runs/{run}/save               Request: a checkpoint after the present step
//	POST /api/v1/runs/{run}/stop               Request: the run ends after its present step
//	GET  /api/v1/runs/{run}/orders/{id}        Order, without a token
//
// The answer to an order is an Order. Its status is 200 once the run has granted the order, and 409
// if the run has refused it. After twenty seconds without either the status is 202: the order is
// pending, and will still be granted or refused. The path in the header Location then says what has
// come of it.
//
// A number that is NaN or infinite is null. What fails is answered with a status from 400 on and
// {"error": "..."}.
package api

import (
	"time"

	"github.com/kasmina-go/kasmina/internal/jsonfloat"
	"github.com/kasmina-go/kasmina/state"
)

// Float is a number that is null in JSON where it is NaN or infinite.
type Float = jsonfloat.Float

// Run is where a run stands.
//
// A run whose log has not changed for two minutes is silent, if the log does not say that the run
// has ended. Its program is busy, or was killed. Once the log changes, the run is running again.
type Run struct {
	ID       string    `json:"id"`
	Name     string    `json:"name"`
	State    string    `json:"state"` // waiting, running, silent, ended, stopped or failed
	Error    string    `json:"error,omitempty"`
	Started  time.Time `json:"started,omitzero"`
	Step     int       `json:"step"`
	Steps    int       `json:"steps,omitempty"` // 0 for a run that a budget alone ends
	Budget   string    `json:"budget,omitempty"`
	Share    Float     `json:"share"` // done, 0 to 1
	Elapsed  Float     `json:"elapsed_s"`
	Left     Float     `json:"left_s"`
	Loss     Float     `json:"loss"` // nats per token
	Rate     Float     `json:"learning_rate"`
	GradNorm Float     `json:"grad_norm"`
	Speed    Float     `json:"tokens_per_s"` // of the last seconds
	Tokens   int64     `json:"tokens"`       // since this process started the run
	FLOPs    Float     `json:"flops_per_s"`  // likewise, as arch.Config.FLOPs counts them
	// what the devices reach at best, 0 before it is measured, and the run's share of it
	Ceiling      Float             `json:"ceiling_flops_per_s"`
	CeilingShare Float             `json:"ceiling_share"`
	ValLoss      Float             `json:"val_loss"`
	ValBPB       Float             `json:"val_bpb"`
	Params       int               `json:"params"`
	Seeds        int               `json:"seeds"`
	Epoch        int               `json:"epoch"`            // of the lattices
	Stages       map[string]int    `json:"stages,omitempty"` // seeds by stage
	Saved        string            `json:"saved,omitempty"`  // the last checkpoint's file
	SavedAt      int               `json:"saved_step,omitempty"`
	Dropped      int64             `json:"dropped,omitempty"` // events that the board had no room for
	Settings     map[string]string `json:"settings,omitempty"`
}

// Card is a GPU of the computer whose program trains. What it does not tell is 0.
type Card struct {
	Index      int    `json:"index"`
	Name       string `json:"name"`
	UUID       string `json:"uuid"`
	Power      Float  `json:"power_w"`
	PowerLimit Float  `json:"power_limit_w"`
	Used       uint64 `json:"memory_used_bytes"`
	Total      uint64 `json:"memory_total_bytes"`
	Busy       Float  `json:"busy"` // share of the time in which some kernel ran, 0 to 1
}

// Series are the curves of a run, a column each: of its steps, and of its evaluations. Long runs
// are thinned: each point is then Stride steps, with their mean loss.
type Series struct {
	Stride       int     `json:"stride"`
	Step         []Float `json:"step"`
	Time         []Float `json:"time"` // seconds
	Loss         []Float `json:"loss"`
	LearningRate []Float `json:"learning_rate"`
	GradNorm     []Float `json:"grad_norm"`
	TokensPerS   []Float `json:"tokens_per_s"`
	EvalStep     []Float `json:"eval_step"`
	EvalTime     []Float `json:"eval_time"`
	ValLoss      []Float `json:"val_loss"`
	ValBPB       []Float `json:"val_bpb"`
}

// Lattice is the picture of all seeds: a byte a seed in each array, in base64.
type Lattice struct {
	Version int     `json:"version"`
	Epoch   int     `json:"epoch"`
	Step    int     `json:"step"`
	Layers  []Layer `json:"layers"`
}

// Layer is one lattice.
type Layer struct {
	Name  string `json:"name"`
	Site  string `json:"site"`  // where in the model its blueprints grow: a blueprints.Site
	Slots int    `json:"slots"` // of a chunk's layer: rows of its weights, 0 included; else 0
	// seeds that belong together, such as those of a block, if any: pictures keep them in a row
	Group  int    `json:"group,omitempty"`
	Stage  []byte `json:"stage"`  // state.Stage
	Alpha  []byte `json:"alpha"`  // 255 for 1
	Health []byte `json:"health"` // 255: all features live; 0: all dead, or NaN and Inf were met
	Kind   []byte `json:"kind"`   // blueprints.Kind
}

// Event is something that happened to a seed.
type Event struct {
	Number int `json:"number"` // from 0
	Step   int `json:"step"`   // of the report that told of it
	Epoch  int `json:"epoch"`
	Layer  int `json:"layer"` // −1, as Seed, for what concerns no seed
	Seed   int `json:"seed"`
	// where the seed is, if layer and seed do not say it, such as "block 3, q"
	Place string `json:"place,omitempty"`
	// of a state.EventKind; Refused for a command that was, and Noted for what concerns no seed:
	// To says why, or what
	Kind   string `json:"kind"`
	From   string `json:"from"`
	To     string `json:"to"`
	Value  Float  `json:"value,omitempty"`
	Reason string `json:"reason,omitempty"` // why, if whoever did it has said so
}

// Sample is text drawn from the model.
type Sample struct {
	Step int    `json:"step"`
	Text string `json:"text"`
}

// Seed is what is known of one seed, and what has happened to it.
type Seed struct {
	Layer       int      `json:"layer"`
	Seed        int      `json:"seed"`
	Site        string   `json:"site"`
	Place       string   `json:"place,omitempty"` // as that of an Event
	Stage       string   `json:"stage"`
	Epochs      int      `json:"epochs_in_stage"`
	Kind        string   `json:"kind,omitempty"`
	Slot        int      `json:"slot,omitempty"`
	Size        int      `json:"size,omitempty"`
	Alpha       Float    `json:"alpha"`
	Performance Float    `json:"performance"`
	Stability   Float    `json:"stability"`
	Delta       Float    `json:"delta"`
	Improvement Float    `json:"improvement"`
	CanAdvance  bool     `json:"can_advance"`
	WaitsFor    string   `json:"waits_for,omitempty"` // what keeps it from the next stage
	RampOver    bool     `json:"ramp_finished"`
	LastUpdate  int      `json:"last_update"`
	CanCull     bool     `json:"can_cull"`
	CanRecycle  bool     `json:"can_recycle"`
	Next        []string `json:"next,omitempty"` // stages that the table of transitions allows
	Drift       Float    `json:"drift"`
	Variance    Float    `json:"variance"`
	Mean        Float    `json:"mean"`
	Min         Float    `json:"min"`
	Max         Float    `json:"max"`
	DeadRatio   Float    `json:"dead_ratio"`
	SNR         Float    `json:"snr"`
	GradNorm    Float    `json:"grad_norm"`
	GradVar     Float    `json:"grad_variance"`
	GradMax     Float    `json:"grad_max"`
	NonFinite   int      `json:"non_finite"`
	Clips       int      `json:"clips"`
	Events      []Event  `json:"events,omitempty"`
}

// Report is what a controller decides by: state.Report as JSON.
type Report struct {
	Epoch          int    `json:"epoch"`
	Step           int    `json:"step"`
	Site           string `json:"site"`
	Hidden         int    `json:"hidden"`
	Slots          int    `json:"slots"`
	SlotParameters int    `json:"slot_parameters"`
	Seeds          []Seed `json:"seeds"`
}

// Control says what may be asked of a board.
type Control struct {
	Allowed bool                `json:"allowed"`
	Kinds   map[string][]string `json:"kinds,omitempty"` // of blueprints, by site
}

// Request is who asks, and why.
type Request struct {
	Who string `json:"who,omitempty"`
	Why string `json:"why,omitempty"`
}

// Commands are commands to seeds, of which all take effect or none.
type Commands struct {
	Request
	Commands []state.Command `json:"commands"`
}

// States of an Order.
const (
	Pending = "pending" // it waits for the end of the run's step, and will be done or refused
	Done    = "done"
	Refused = "refused"
)

// Order is what has come of something that was asked of a run.
type Order struct {
	ID    int    `json:"id"`
	State string `json:"state"`           // Pending, Done or Refused
	Done  bool   `json:"done"`            // whether State is Done
	Error string `json:"error,omitempty"` // why the order was refused
}

// Telemetry is what all lattices shall measure from now on.
type Telemetry struct {
	Request
	Mode  string `json:"mode"`            // Production, Sampling, Debug or Off
	Every int    `json:"every,omitempty"` // Sampling: passes
}
