package llm

import "github.com/kasmina-go/kasmina/llm/arch"

// What describes a model's architecture is in package arch.
type (
	// Config describes a model: [arch.Config].
	Config = arch.Config
	// Traits are what families of models have beyond Llama 2: [arch.Traits].
	Traits = arch.Traits
	// Block is what the attention of a block has of its own: [arch.Block].
	Block = arch.Block
	// Grown is a growth of a model's stack of blocks: [arch.Grown].
	Grown = arch.Grown
	// KasminaOptions are the options of a model's Kasmina layers: [arch.KasminaOptions].
	KasminaOptions = arch.KasminaOptions
)
