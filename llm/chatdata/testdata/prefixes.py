"""Writes which tokens of conversations a model should learn, found with transformers by rendering prefixes.

    pip install transformers jinja2 tokenizers
    python3 prefixes.py           # prefixes.json, for the templates below
    python3 prefixes.py FOLDER    # FOLDER/prefixes.json, for all templates in FOLDER

../../tokenizer/chat/fetch.sh fills a folder with the templates of published models. Templates that mark the assistant's
words with {% generation %} are left out here, since masks.py compares their own masks.

A turn of the assistant starts where the text that asks for it ends: the messages before it, rendered with the assistant
prefix, or as much of that as the conversation has. Without earlier messages, it starts with the assistant's words. The turn
ends with the first end token after the words. If the words are not in the text as they are, or if the turn calls a tool, it
ends with the last end token of the conversation up to this turn. If a template renders earlier messages differently once
others follow, each turn is a sequence of its own.

All templates share a tokenizer, in which the control tokens are special tokens.
"""

import json
import os
import re
import signal
import sys
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../../tokenizer/chat/testdata"))

import golden  # the conversations, and the search for templates in a folder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

warnings.simplefilter("ignore")

CONTROL = re.compile(r"<\|[^|<>'\"{}\s]+\|>|<｜[^｜\s]+｜>|</?s>|<bos>|<eos>|<(?:start|end)_of_turn>|<end_of_utterance>|\[/?INST\]"
                     r"|\[gMASK\]|<sop>|<\|?turn\|?>|<turn\|>|<SPECIAL_\d+>|<EOT>|<end>|<extra_id_\d>|<\|im_end\|>")

# Templates in the forms that published models use, written for this test.
TEMPLATES = {
    "markers": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}{% for c in m.tool_calls or [] %}"
               "{{ '\n<tool_call>\n' }}{{ c | tojson }}{{ '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
               "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "headers": "{{ bos_token }}{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>\n\n' + (m.content or '') | trim + '<|end|>' }}"
               "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}",
    "brackets": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + (m.content or '') | trim + eos_token }}"
                "{% else %}{{ '[INST] ' + (m.content or '') + ' [/INST]' }}{% endif %}{% endfor %}",
    "turns": "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + "
             "(m.content or '') | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}"
             "{{ '<start_of_turn>model\n' }}{% endif %}",
    "words": "{% for m in messages %}{{ m.role | upper + ': ' + (m.content or '') }}{{ eos_token if m.role == 'assistant' else '\n' }}"
             "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
    "two ends": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + (m.content or '') + '<|end|>\n' }}"
                "{% if m.role == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
                "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    "thoughts": "{% for m in messages %}{% set text = m.content or '' %}{{ '<|im_start|>' + m.role + '\n' }}"
                "{% if m.role == 'assistant' %}{% if loop.last and '</think>' not in text %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
                "{{ text if loop.last else text.split('</think>')[-1] | trim }}{% else %}{{ text }}{% endif %}{{ '<|im_end|>\n' }}"
                "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
                "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
    "no end": "{% for m in messages %}{{ m.role + ': ' + (m.content or '') + '\n' }}{% endfor %}"
              "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
}

# The conversations of prefixes.json.
SMALL = ["system", "long", "unicode", "emptysystem", "toolcall", "toolcallnull", "refused", "one", "think"]


class Refused(Exception):
    """The template refuses a conversation, or its turns of the assistant cannot be found."""


class Reference:
    def __init__(self, tokenizer, source, name):
        self.tokenizer, self.source = tokenizer, source
        self.messages, self.variables = golden.C[name]

    def render(self, n, prompt=False):
        signal.alarm(10)
        try:
            return self.tokenizer.apply_chat_template(self.messages[:n], chat_template=self.source, tokenize=False,
                                                      add_generation_prompt=prompt, **self.variables)
        except (Exception, golden.Timeout) as e:
            raise Refused(f"{type(e).__name__}: {e}"[:80])
        finally:
            signal.alarm(0)

    def start(self, i, full):
        """Returns where the turn of message i starts, or None if the messages before it are rendered differently."""
        if i == 0:
            return max(0, full.rfind(self.messages[0].get("content", "").strip()))
        asked = self.render(i, prompt=True)
        n = len(os.path.commonprefix([full, asked]))
        before = "" if n == len(asked) else self.render(i)
        if not full.startswith(before) or n < len(before):
            return None
        for control in CONTROL.finditer(full):  # of which "<" may also begin the assistant prefix
            if control.start() < n < control.end():
                return control.start()
        return n

    def end(self, i, full, start, ends):
        """Returns where the turn of message i ends, including its end token."""
        upto = self.render(i + 1)
        if not full.startswith(upto):
            following = [j for j in range(i + 1, len(self.messages)) if self.messages[j]["role"] == "assistant"]
            limit = self.start(following[0], full) if following else len(full)
            found = [(full.find(e, start, limit), e) for e in ends if full.find(e, start, limit) >= 0]
            if not found:
                raise Refused("no end token")
            at, e = min(found)
            return at + len(e)

        message, limit = self.messages[i], len(upto)
        words = message.get("content")
        words = words.strip() if isinstance(words, str) else ""
        if words and set(message) <= {"role", "content"} and full.count(words, start, limit) == 1:
            after = full.index(words, start, limit) + len(words)
            found = [(full.find(e, after, limit), e) for e in ends if full.find(e, after, limit) >= 0]
            if found:
                at, e = min(found)
                return at + len(e)

        found = [(m.start(), m.end()) for m in re.finditer("|".join(map(re.escape, ends)), full[start:limit])]
        if not found:
            raise Refused("no end token")
        while len(found) > 1 and not full[start + found[-2][1]:start + found[-1][0]].strip():
            found.pop()  # generation stops at the first of several end tokens
        return start + found[-1][1]

    def sequence(self, full, turns):
        """Returns the number of tokens and the ranges of tokens to learn."""
        offsets = self.tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        learned = []
        for t, (a, b) in enumerate(offsets):
            if any(b > start and a < end for start, end in turns):
                if learned and learned[-1][1] == t:
                    learned[-1][1] = t + 1
                else:
                    learned.append([t, t + 1])
        return {"tokens": len(offsets), "learned": learned}

    def sequences(self, ends):
        turns = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]
        if not turns:
            raise Refused("no turn of the assistant")
        full = self.render(len(self.messages))
        starts = [self.start(i, full) for i in turns]
        if None not in starts:
            return [self.sequence(full, [(s, self.end(i, full, s, ends)) for i, s in zip(turns, starts)])]

        out, messages = [], self.messages
        for i in turns:
            self.messages = messages[:i + 1]
            full = self.render(i + 1)
            start = self.start(i, full)
            if start is None:
                raise Refused("the prompt is not the beginning of the conversation")
            out.append(self.sequence(full, [(start, self.end(i, full, start, ends))]))
        return out


def end_tokens(tokenizer, source):
    """Returns the control tokens that follow the assistant's words, in words and in calls of tools."""
    ends = []
    for conversation, words in ("one", "WORDS"), ("toolcall", "Par"):
        r = Reference(tokenizer, source, conversation)
        r.messages = [golden.U("Hello"), golden.A(words)] if conversation == "one" else r.messages[:2]
        try:
            full = r.render(2)
        except Refused:
            continue
        at = full.rfind(words)
        found = at >= 0 and CONTROL.search(full, at)
        if found and found.group() not in ends:
            ends.append(found.group())
        elif not ends:
            break
    return ends or ["<eos>"]


def shared_tokenizer(templates):
    control = {t for source in templates.values() for t in CONTROL.findall(source)}
    control |= {"<bos>", "<eos>", "<|assistant|>", "<|user|>", "<|system|>"}
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    text = json.dumps([golden.C[n][0] for n in SMALL], ensure_ascii=False)
    t.train_from_iterator([text] * 3, trainers.BpeTrainer(
        vocab_size=256 + 60 + len(control), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=sorted(control), show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<bos>", eos_token="<eos>"), t


def main():
    chat_template_utils.datetime = golden.Clock
    signal.signal(signal.SIGALRM, golden.timeout)
    templates, names, target = TEMPLATES, SMALL, os.path.join(HERE, "prefixes.json")
    if len(sys.argv) > 1:
        templates = {k: v for k, v in golden.collect(sys.argv[1]).items() if not re.search(r"{%-?\s*generation", v)}
        names, target = list(golden.C), os.path.join(sys.argv[1], "prefixes.json")
    tokenizer, raw = shared_tokenizer(templates)

    out, sequences, refused = [], 0, 0
    for name, source in templates.items():
        ends = end_tokens(tokenizer, source)
        cases = {}
        for conversation in names:
            try:
                cases[conversation] = {"sequences": Reference(tokenizer, source, conversation).sequences(ends)}
                sequences += 1
            except Refused as e:
                cases[conversation] = {"error": str(e)}
                refused += 1
        out.append({"name": name, "source": source, "ends": tokenizer.convert_tokens_to_ids(ends),
                    "cases": cases})

    with open(target, "w", encoding="utf-8") as f:
        json.dump({"tokenizer": raw.to_str(), "conversations": {
            n: {"messages": golden.C[n][0], "tools": golden.C[n][1].get("tools"),
                "variables": {k: v for k, v in golden.C[n][1].items() if k != "tools"}} for n in names},
            "templates": out}, f, ensure_ascii=False, separators=(",", ":"))
        f.write("\n")
    print(len(out), "templates,", sequences, "conversations,", refused, "refused")


main()
