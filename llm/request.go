package llm

import "github.com/kasmina-go/kasmina/state"

// Request is something that a person or another program asks of a run: see llm.Trainer.Ask.
type Request struct {
	// Commands are carried out together, or, when one of them is refused, not at all.
	Commands []state.Command `json:"commands,omitempty"`
	// Save makes the run's Checkpoint callbacks save after the step.
	Save bool `json:"save,omitempty"`
	// Note says who asks for what, and why. When the request has been granted, callbacks receive
	// the note as a Noted event. May be empty.
	Note string `json:"note,omitempty"`
}

// Kinds of requests that a Decision names in Asked.
const (
	AskedToSave = "save"
	AskedToStop = "stop"
)
