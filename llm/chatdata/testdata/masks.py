"""Writes the tokens and the assistant masks that transformers gives for conversations by chat templates.

    pip install transformers jinja2 tokenizers
    python3 masks.py FOLDER        # FOLDER/masks.json, of the *_training.jinja below FOLDER

TRL's templates for training mark what the assistant says with {% generation %}. Each is rendered with a
small tokenizer of its own, in which the control tokens of the template are special tokens.
"""

import glob
import json
import os
import re
import sys
import warnings

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

warnings.simplefilter("ignore")

U = lambda c, **k: dict(role="user", content=c, **k)
A = lambda c, **k: dict(role="assistant", content=c, **k)
S = lambda c, **k: dict(role="system", content=c, **k)
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather of a place", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "The city"}}, "required": ["city"]}}}]


def call(city, **k):
    return dict(role="assistant", tool_calls=[{"type": "function", "id": "call00001", "function": {
        "name": "get_weather", "arguments": {"city": city}}}], **k)


T = lambda c: dict(role="tool", name="get_weather", tool_call_id="call00001", content=c)
CONVERSATIONS = {
    "one turn": ([U("Hello, how's it going?"), A("Fine, thanks.")], {}),
    "two turns": ([U("Hi\n"), A("Hello!"), U(" 1 < 2 & \"3\" 'x' "), A("So it is.")], {}),
    "system": ([S("You are kind."), U("a"), A("b"), U("c"), A("d"), U("e"), A("f")], {}),
    "unicode": ([U("😀 é\u0301 a\u00a0b"), A("ẞß 👨‍👩‍👧 日本語\n\n中文"), U("Σ"), A("ü")], {}),
    "spaces": ([U("  x  "), A("  y\n\n"), U("\tz"), A("\n w ")], {}),
    "empty answer": ([U("say nothing"), A("")], {}),
    "end with user": ([U("a"), A("b"), U("c")], {}),
    "thoughts": ([U("q"), A("<think>\nhm\n</think>\n\nb"), U("r"), A("<think>\nso\n</think>\n\nd")], {}),
    "reasoning": ([U("q"), A("b", reasoning_content="hm"), U("r"), A("d", reasoning_content="so")], {}),
    "tools offered": ([U("q"), A("no tool needed")], {"tools": TOOLS}),
    "tool call": ([U("weather?"), call("Par\u2028is", content=""), T("22.0"), A("It is 22.")], {"tools": TOOLS}),
    "tool call and words": ([U("w"), call("x", content="Let me see."), T("ok"), A("Done."), U("more"),
                             call("y", content=""), T("5"), A("5.")], {"tools": TOOLS}),
    "code": ([U("```go\nx := 1\n```"), A("```go\nfunc f() {}\n```\n")], {}),
    "long": ([U("word " * 50), A("answer " * 60)], {}),
}

CONTROL = re.compile(r"<\|[^|<>'\"{}]+\|>|<｜[^｜]+｜>|</?s>|<bos>|<eos>|<(?:start|end)_of_turn>|<end_of_utterance>|\[/?INST\]"
                     r"|\[gMASK\]|<sop>|</?tool_call>|<\|?turn\|?>|<turn\|>|<SPECIAL_\d+>")


def tokenizer_of(source):
    control = sorted(set(CONTROL.findall(source)))
    bos = next((t for t in control if t in ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|BOS_TOKEN|>", "<BOS_TOKEN>")
                or "begin" in t and "sentence" in t), "<s>")
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    text = json.dumps([c for c, _ in CONVERSATIONS.values()], ensure_ascii=False) * 3 + source
    t.train_from_iterator([text], trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                                     special_tokens=sorted(set(control) | {bos, "</s>"}), show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=t, bos_token=bos, eos_token="</s>"), t


def main(folder):
    out = []
    for path in sorted(glob.glob(os.path.join(folder, "**", "*_training.jinja"), recursive=True)):
        source = open(path, encoding="utf-8").read()
        tok, raw = tokenizer_of(source)
        special = set(raw.token_to_id(t) for t in CONTROL.findall(source)) | {tok.eos_token_id}
        end, cases = set(), []
        for name, (messages, kw) in CONVERSATIONS.items():
            case = {"name": name, "messages": messages, "tools": kw.get("tools")}
            try:
                got = tok.apply_chat_template(messages, chat_template=source, return_dict=True, return_assistant_tokens_mask=True,
                                              return_tensors=None, **kw)
                case["ids"], case["mask"] = list(got["input_ids"]), list(got["assistant_masks"])
                for i, m in enumerate(case["mask"]):
                    if m and (i + 1 == len(case["mask"]) or not case["mask"][i + 1]):
                        for j in range(i, max(-1, i - 3), -1):
                            if case["ids"][j] in special:
                                end.add(case["ids"][j])
                                break
            except Exception as e:
                case["error"] = f"{type(e).__name__}: {e}"[:200]
            cases.append(case)
        out.append({"name": os.path.basename(path), "source": source, "tokenizer": raw.to_str(), "end": sorted(end),
                    "bos": tok.bos_token, "eos": tok.eos_token, "cases": cases})
    json.dump(out, open(os.path.join(folder, "masks.json"), "w"), ensure_ascii=False)
    print(len(out), "templates,", sum(len(o["cases"]) for o in out), "conversations,",
          sum("error" in c for o in out for c in o["cases"]), "refused")


main(sys.argv[1])
