// Package api defines the JSON interface of a board, under /api/v1, and a client for it. With the
// client, a program in another process can watch a run and grow its model.
//
//	GET  /api/v1/runs                          []Run
//	GET  /api/v1/runs/{run}                    Run
//	GET  /api/v1/runs/{run}/series             Series
//	GET  /api/v1/runs/{run}/lattice            Lattice: a picture of all seeds
//	GET  /api/v1/runs/{run}/history            History: the stages of the seeds over the epochs
//	GET  /api/v1/runs/{run}/events             []Event, the oldest first; ?from=NUMBER
//	GET  /api/v1/runs/{run}/groups             []Group, the oldest first; ?from=NUMBER
//	GET  /api/v1/runs/{run}/seeds/{layer}/{n}  Seed
//	GET  /api/v1/runs/{run}/reports            []Report: every layer, for controllers
//	GET  /api/v1/cards                         []Card: the GPUs of the computer
//	GET  /api/v1/stream                        server-sent events, see below
//
// The stream sends an event whenever something changes: run, series, lattice, groups, samples and
// cards. A group that has grown is sent again under the same number. A "board" event identifies the
// board. An "again" event announces that a run was resumed or replaced, and is followed by everything
// the board knows about the run.
//
// A board that permits steering (board.WithControl) also has the following paths. A POST requires
// the header "Authorization: Bearer TOKEN" and a JSON body of the type shown.
//
//	GET  /api/v1/control                       Control, no token required
//	POST /api/v1/runs/{run}/commands           Commands: all or none take effect after the step
//	POST /api/v1/runs/{run}/telemetry          Telemetry: takes effect after the step
//	POST /api/v1/runs/{run}/save               Request: saves a checkpoint after the step
//	POST /api/v1/runs/{run}/stop               Request: ends the run after the step
//	GET  /api/v1/runs/{run}/orders/{id}        Order, no token required
//
// The response to a POST is an Order. Its status is 200 if the run carried out the order, and 409 if
// the run rejected it. If neither happens within twenty seconds, the status is 202, which means that
// the order is pending and that the path in the Location header will return its result.
//
// NaN and infinite numbers are encoded as null. Errors are reported with a status of 400 or above and
// the body {"error": "..."}.
package api

import (
	"time"

	"github.com/kasmina-go/kasmina/internal/jsonfloat"
	"github.com/kasmina-go/kasmina/state"
)

// Float is a number that is encoded as null if it is NaN or infinite.
type Float = jsonfloat.Float

// Run is the status of a run.
//
// A run is silent if its log has not changed for two minutes although the run has not ended, either
// because its program is busy or because it was killed. As soon as the log changes, the run counts as
// running again.
type Run struct {
	ID      string    `json:"id"`
	Name    string    `json:"name"`
	State   string    `json:"state"` // waiting, running, silent, ended, stopped or failed
	Error   string    `json:"error,omitempty"`
	Started time.Time `json:"started,omitzero"`

	Step    int    `json:"step"`
	Steps   int    `json:"steps,omitempty"` // 0 if only a budget ends the run
	Budget  string `json:"budget,omitempty"`
	Share   Float  `json:"share"`     // completed fraction, 0 to 1
	Elapsed Float  `json:"elapsed_s"` // including earlier processes of a resumed run
	Left    Float  `json:"left_s"`

	// Losses are in nats per token.
	Loss     Float `json:"loss"`
	ValLoss  Float `json:"val_loss"`
	ValBPB   Float `json:"val_bpb"` // bits per byte
	BestLoss Float `json:"best_val_loss"`
	BestStep int   `json:"best_val_step,omitempty"`
	Rate     Float `json:"learning_rate"`
	GradNorm Float `json:"grad_norm"`

	Speed     Float `json:"tokens_per_s"`      // over the last seconds
	MeanSpeed Float `json:"mean_tokens_per_s"` // since this process started the run
	Tokens    int64 `json:"tokens"`            // since this process started the run
	FLOPs     Float `json:"flops_per_s"`       // over the last few seconds; see arch.Config.FLOPs

	// Measured peak performance of the devices (0 if unknown) and the fraction of it that the run
	// achieves.
	Ceiling      Float `json:"ceiling_flops_per_s"`
	CeilingShare Float `json:"ceiling_share"`

	Params    int `json:"params"`                // trainable
	AllParams int `json:"all_params,omitempty"`  // including frozen ones
	ParamsAt  int `json:"params_step,omitempty"` // step at which a growth last changed Params

	Seeds   int            `json:"seeds"`
	Epoch   int            `json:"epoch"`            // of the lattices
	Stages  map[string]int `json:"stages,omitempty"` // number of seeds by stage
	Saved   string         `json:"saved,omitempty"`  // file of the last checkpoint
	SavedAt int            `json:"saved_step,omitempty"`
	Dropped int64          `json:"dropped,omitempty"` // events lost because the queue was full

	Settings map[string]string `json:"settings,omitempty"`
}

// Card describes a GPU of the computer running the training. Values the GPU does not report are 0.
type Card struct {
	Index      int    `json:"index"`
	Name       string `json:"name"`
	UUID       string `json:"uuid"`
	Power      Float  `json:"power_w"`
	PowerLimit Float  `json:"power_limit_w"`
	Used       uint64 `json:"memory_used_bytes"`
	Total      uint64 `json:"memory_total_bytes"`
	Busy       Float  `json:"busy"` // fraction of time with a kernel running, 0 to 1
}

// Series contains a run's curves, one per column. The first six columns hold one value per point, and
// the last four one value per evaluation.
//
// In a long run, a point represents Stride steps and holds their mean loss.
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

// Lattice is a picture of all seeds.
type Lattice struct {
	Version int     `json:"version"`
	Epoch   int     `json:"epoch"`
	Step    int     `json:"step"`
	Layers  []Layer `json:"layers"`
}

// Layer is the picture of one lattice. Its arrays contain one byte per seed, in base64.
type Layer struct {
	Name   string `json:"name"`
	Site   string `json:"site"`            // a blueprints.Site
	Slots  int    `json:"slots"`           // rows of weights in a chunk's layer, otherwise 0
	Group  int    `json:"group,omitempty"` // seeds drawn in the same row, such as those of a block
	Stage  []byte `json:"stage"`           // state.Stage
	Alpha  []byte `json:"alpha"`           // 255 for 1
	Health []byte `json:"health"`          // 255: all features live; 0: all dead, or NaN or Inf
	Kind   []byte `json:"kind"`            // blueprints.Kind
}

// History contains the stages of seeds over the epochs. If there are many seeds, it contains only
// every nth.
type History struct {
	Epochs int `json:"epochs"`
	Every  int `json:"every"` // a row stands for this number of seeds

	// A row lists the changes of a seed, which starts as Dormant: the epoch and the state.Stage of
	// each change alternate.
	Rows [][]int `json:"rows"`
}

// Event is an event of a seed, or of the run as a whole.
type Event struct {
	Number int    `json:"number"` // starting at 0
	Step   int    `json:"step"`
	Epoch  int    `json:"epoch"`
	Layer  int    `json:"layer"`           // −1 for the run as a whole
	Seed   int    `json:"seed"`            // −1 for the run as a whole
	Place  string `json:"place,omitempty"` // such as "block 3, q", if layer and seed do not suffice

	// A state.EventKind, or Refused for a rejected command, Grown for a growth of the model, and
	// Noted for anything else. In these three cases To contains the text.
	Kind   string `json:"kind"`
	From   string `json:"from"`
	To     string `json:"to"`
	Value  Float  `json:"value,omitempty"`
	Reason string `json:"reason,omitempty"`
}

// Group summarizes the events of one step that differ only in the seed.
type Group struct {
	Number int       `json:"number"` // starting at 0
	Step   int       `json:"step"`
	Time   Float     `json:"time"` // seconds
	Epoch  int       `json:"epoch"`
	Kind   string    `json:"kind"` // From, To, Value and Reason too are those of an Event
	From   string    `json:"from"`
	To     string    `json:"to"`
	Value  Float     `json:"value,omitempty"`
	Reason string    `json:"reason,omitempty"`
	Count  int       `json:"count"` // number of events
	Seeds  []SeedRef `json:"seeds"` // the first few seeds
}

// SeedRef identifies a seed.
type SeedRef struct {
	Layer int    `json:"layer"`
	Seed  int    `json:"seed"`
	Place string `json:"place,omitempty"`
}

// Sample is text generated by the model.
type Sample struct {
	Step int    `json:"step"`
	Text string `json:"text"`
}

// Seed is the state of a seed and its latest events. See state.SeedReport for the fields.
type Seed struct {
	Layer       int    `json:"layer"`
	Seed        int    `json:"seed"`
	Site        string `json:"site"`
	Place       string `json:"place,omitempty"`
	Stage       string `json:"stage"`
	Epochs      int    `json:"epochs_in_stage"`
	Kind        string `json:"kind,omitempty"`
	Slot        int    `json:"slot,omitempty"`
	Size        int    `json:"size,omitempty"`
	Alpha       Float  `json:"alpha"`
	Performance Float  `json:"performance"`

	// Compared reports whether the model was compared with and without the seed. If it was not, the
	// results of the comparison are 0.
	Compared    bool  `json:"compared"`
	Stability   Float `json:"stability"`
	Delta       Float `json:"delta"`
	Improvement Float `json:"improvement"`

	CanAdvance bool     `json:"can_advance"`
	WaitsFor   string   `json:"waits_for,omitempty"` // condition for the next stage that is not met
	RampOver   bool     `json:"ramp_finished"`
	LastUpdate int      `json:"last_update"`
	CanCull    bool     `json:"can_cull"`
	CanRecycle bool     `json:"can_recycle"`
	Next       []string `json:"next,omitempty"` // stages that may follow
	Drift      Float    `json:"drift"`
	Variance   Float    `json:"variance"`
	Mean       Float    `json:"mean"`
	Min        Float    `json:"min"`
	Max        Float    `json:"max"`
	DeadRatio  Float    `json:"dead_ratio"`
	SNR        Float    `json:"snr"`
	GradNorm   Float    `json:"grad_norm"`
	GradVar    Float    `json:"grad_variance"`
	GradMax    Float    `json:"grad_max"`
	NonFinite  int      `json:"non_finite"`
	Clips      int      `json:"clips"`
	Events     []Event  `json:"events,omitempty"`
}

// Report is a state.Report, the input of a controller, as JSON.
type Report struct {
	Epoch          int    `json:"epoch"`
	Step           int    `json:"step"`
	Site           string `json:"site"`
	Hidden         int    `json:"hidden"`
	Slots          int    `json:"slots"`
	SlotParameters int    `json:"slot_parameters"`
	Seeds          []Seed `json:"seeds"`
}

// Control describes what a board permits.
type Control struct {
	Allowed bool                `json:"allowed"`
	Kinds   map[string][]string `json:"kinds,omitempty"` // blueprint names by site
}

// Request names the person or program that makes a request, and its reason.
type Request struct {
	Who string `json:"who,omitempty"`
	Why string `json:"why,omitempty"`
}

// Commands are commands to seeds. Either all of them take effect or none does.
type Commands struct {
	Request
	Commands []state.Command `json:"commands"`
}

// States of an Order.
const (
	Pending = "pending" // waiting for the end of the step
	Done    = "done"
	Refused = "refused"
)

// Order is the state of a request to a run.
type Order struct {
	ID    int    `json:"id"`
	State string `json:"state"`           // Pending, Done or Refused
	Done  bool   `json:"done"`            // whether State is Done
	Error string `json:"error,omitempty"` // reason for the rejection
}

// Telemetry selects what all lattices measure from now on.
type Telemetry struct {
	Request
	Mode  string `json:"mode"`            // Production, Sampling, Debug or Off
	Every int    `json:"every,omitempty"` // for Sampling: measure one in this many passes
}
