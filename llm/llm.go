// Package llm trains language models that may carry Kasmina layers in their blocks, natively in Go.
//
// A [Config] describes a model, and a [Model] holds its parameters and its lattices of seeds.
// [Model.Graph] lays the model out as a Gorgonia graph. A [Trainer] trains a model on the batches of
// a [data.Loader] with an [optim.Optimizer]; an [Engine] computes the steps, on a CPU or, with
// package llm/gpu, on a GPU.
//
//	data.Open  →  data.Tokenize  →  data.Loader  ┐
//	Config  →  NewModel  ────────────────────────┼→  Trainer  →  callbacks: runlog.Progress,
//	optim.AdamW or optim.Muon  ──────────────────┘    runlog.JSON, Evaluate, Checkpoint and more
//
// The trainer itself only takes steps. Everything else is done by callbacks, which show progress,
// measure, and save; a program can add its own. Runs with equal random seeds are bit-identical on any
// number of cores, and a killed run continues from its checkpoint as if nothing had happened.
//
// The packages below llm each serve one purpose:
//
//	llm/data         text, tokens and batches
//	llm/tokenizer    text to token ids and back
//	llm/sampler      logits to a token
//	llm/grammar      restricts generated text to JSON schemas and other grammars
//	llm/chatdata     conversations and preference pairs for fine-tuning
//	llm/hf           models and tokenizers of transformers and llama.cpp
//	llm/gpu          the engine for NVIDIA GPUs
//	llm/parallel     the engine for several processes
//	llm/site         blueprints at weights and in the residual stream
//	llm/runlog       progress lines and logs
//	llm/tensorboard  logs for TensorBoard
//	llm/plot         pictures of runs
//	llm/baseline     compressors and n-gram models to compare a model with
//	llm/tasks        benchmarks with questions and answers
//	llm/serve        the APIs of OpenAI and Anthropic over HTTP
package llm
