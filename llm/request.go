package llm

import "github.com/kasmina-go/kasmina/state"

// Request is a request to a run from a person or another program; see llm.Trainer.Ask.
type Request struct {
	// Commands take effect together. If one is rejected, all are.
	Commands []state.Command `json:"commands,omitempty"`
	// Save makes the run's Checkpoint callbacks save after the step.
	Save bool `json:"save,omitempty"`
	// Note identifies who makes the request and why. When the request has been granted, callbacks receive
	// the note as a Noted event. It may be empty.
	Note string `json:"note,omitempty"`
}

// Kinds of requests that a Decision names in Asked.
const (
	AskedToSave = "save"
	AskedToStop = "stop"
)
