// Package llm trains language models whose blocks may carry Kasmina layers. It holds the trainer:
// steps, growth, checkpoints, callbacks. What else users need has a name here too, and is in rooms:
//
//	llm/arch       configurations, and the parameters that follow from them
//	llm/model      parameters and seed lattices, their files
//	llm/graph      a model as a graph
//	llm/infer      losses, logits and text without gradients
//	llm/engine     what computes a trainer's steps
//	llm/callback   what a run does between steps
//	llm/event      what a run tells, spends and records
//	llm/data       text, tokens and batches
//	llm/tokenizer  from text to token ids and back
//	llm/sampler    from logits to a token
//	llm/runlog     what a run shows and writes
//	llm/plot       pictures
//	llm/baseline   what a model is compared with
//	llm/gpu        the engine on a GPU
//
//	data.Open  →  data.Tokenize  →  data.Loader  ┐
//	Config  →  NewModel  ────────────────────────┼→  Trainer  →  callbacks: runlog.Progress,
//	optim.AdamW or optim.Muon  ──────────────────┘    runlog.JSON, Evaluate, Checkpoint and more
//
// A [Model] is parameters and seed lattices; [Model.Graph] lays them out as a Gorgonia graph, as
// often as needed. The [Trainer] only steps: what a run shows, measures and saves is up to
// callbacks, and a program adds its own. The same seeds give the same bits on any number of cores,
// and a run that was killed goes on from its checkpoint as if nothing had happened.
package llm
