// Package llm trains language models whose blocks may carry Kasmina layers: configuration, graph, text, training loop,
// checkpoints and sampling.
//
//	corpus  →  Tokenize  →  Loader  ┐
//	Config  →  NewModel  ───────────┼→  Trainer  →  callbacks: Progress, JSONLog, LossCurve, Evaluate, Checkpoint, SampleText
//	optim.AdamW or optim.Muon  ─────┘
//
// A [Model] is parameters and seed lattices; [Model.Graph] lays them out as a Gorgonia graph, as often as needed. The
// [Trainer] only steps: what a run shows, measures and saves is up to callbacks, and a program adds its own. The same
// seeds give the same bits on any number of cores, and a run that was killed goes on from its checkpoint as if nothing had
// happened.
package llm
