"""Writes golden.json: small tokenizers with the pipelines of published models, trained on the texts
below, and the results of Rust's tokenizers for hostile and other texts.

Run it with `go generate` in the folder above, with `pip install tokenizers`.
"""

import copy
import json
import os

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers import decoders as de
from tokenizers import models, normalizers, trainers
from tokenizers import pre_tokenizers as pt
from tokenizers import processors as pp

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden.json")

SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LEAD, UPPER, LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA3 = SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + SYMBOLS
QWEN = SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + SYMBOLS
TEKKEN = f"{LEAD}{UPPER}*{LOWER}+|{LEAD}{UPPER}+{LOWER}*" + r"|\p{N}" + SLASH
GPT4O = f"{LEAD}{UPPER}*{LOWER}+{SUFFIX}?|{LEAD}{UPPER}+{LOWER}*{SUFFIX}?" + r"|\p{N}{1,3}" + SLASH
DEEPSEEK = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

PROSE = """All human beings are born free and equal in dignity and rights. They are endowed with reason
and conscience and should act towards one another in a spirit of brotherhood. It's what we'd say: DON'T!
Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и совестью.
Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.
يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق. وقد وهبوا عقلًا وضميرًا.
כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם.
सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।
人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。
すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。
모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.
มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ
Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền.
ადამიანები იბადებიან თავისუფალნი და თანასწორნი თავიანთი ღირსებითა და უფლებებით.
Բոլոր մարդիկ ծնվում են ազատ ու հավասար իրենց արժանապատվությամբ ու իրավունքներով.
""".replace("\n", "\n")

CODE = """func (t *Tokenizer) Encode(text []byte) []int {
\tids := make([]int, 0, len(text)/3) // room for 12345 ids
\tfor i, r := range text {
\t\tif r >= 0x80 && !isSpace(r) {
\t\t\treturn nil, fmt.Errorf("ids[%d] is %#x", i, r)
\t\t}
\t}
}

def camelCaseHTTPServer(self, x_1=3.14159, **kwargs):
    return {"key": [1, 22, 333, 4444, 55555], 'b': None}  # path/to/file
"""

TEXTS = PROSE.split("\n") + CODE.split("\n\n") + [
    "", " ", "  ", "   a", "a   ", "\n", "\n\n\n", " \n \r\n\t x", "\r", "\t\t\tx", "a\u00a0b\u3000c\u2028d\u0085e",
    "don't DON'T we'LL I'M 'Re 's ''t 'S's", "'\u017f x'\u017fy", "1 22 333 4444 55555 1234567890", "x1y22z½Ⅷ٣४", "\U00011de0\U00011de1a",
    "camelCase HTTPServer aBCd XMLParser iOS ǅa ʰA", "a/b//c /\n/ ...///\n\n",
    "e\u0301 \u00e9 A\u030a \u212b \u1e9b\u0323 \ufb01 \u0344 a\u0316\u0301 a\u0301\u0316", "\u0301\u0301x\u0301", "o" + "\u0302\u0323" * 20,
    "\uac00\u11a8 \u1100\u1161\u11a8 \u1100\u1161 \uac01", "\U00011099\U000110ba \u1099\u10ba \U00011935\U00011930 \u09c7\u09be",
    "a\u0898\u0316\u0301 a\U00010d24\u0316 \U00100041\u0301",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f", "\u200b\u200c\u200d\ufeff\u00ad\u0000\u0001\u007f\u009f",
    "\ufffd\ufffe\uffff\U0010ffff\U000e0001", "\u2581 \u2581\u2581a \u2581", "\u0120hello \u010a \u0100", "<0x0A> <0x41>B",
    "<s>text</s>", "<s> a </s> b", "a<|endoftext|>b <|endoftext|> c<|endoftext|>", "<|endoftext|", "<|im_start|>user\nHi<|im_end|>\n",
    "token[X]Y [X] a[X]", "word <w> x<w>y <w>.", "left  <l>  right  <r>  end<r> <l>", " Norm norm NORM [n] \u2581[n]", "aaaa" * 30, "ab" * 60 + "!",
    "ＦＵＬＬ　ｗｉｄｔｈ １２３", "ﷺ ۝ ߷", "ÅÅÅ\u0130i\u0131 ß ẞ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛", "\u1c89\u1c8a\ua7cb \U000105c0\U00016d40",
]


def train(tokenizer, special, vocab=520, bytes_too=False):
    alphabet = pt.ByteLevel.alphabet() if bytes_too else []
    tokenizer.train_from_iterator(
        [PROSE, CODE] * 3, trainers.BpeTrainer(vocab_size=vocab, special_tokens=special,
                                               show_progress=False, initial_alphabet=alphabet))
    return tokenizer


def split(pattern, behavior="isolated", invert=False):
    return pt.Split(Regex(pattern), behavior, invert)


def byte_level(name, before, special=("<|endoftext|>",), prefix=False, regex=False):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pt.Sequence(before + [pt.ByteLevel(prefix, use_regex=regex)])
    t.decoder = de.ByteLevel()
    t.post_processor = pp.ByteLevel(trim_offsets=False)
    return train(t, list(special), bytes_too=True)


def template(t, *tokens):
    ids = [(x, t.token_to_id(x)) for x in tokens]
    return pp.TemplateProcessing(single=f"{tokens[0]} $A", pair=f"{tokens[0]} $A {tokens[0]}:1 $B:1",
                                 special_tokens=ids)


def with_bytes(t):
    """Inserts <0x00> to <0xFF> at the start of the vocabulary, as SentencePiece does."""
    j = json.loads(t.to_str())
    names = [x["content"] for x in j["added_tokens"]] + ["<0x%02X>" % b for b in range(256)]
    vocab = names + [x for x, _ in sorted(j["model"]["vocab"].items(), key=lambda x: x[1])
                     if x not in names]
    j["model"]["vocab"] = {x: i for i, x in enumerate(vocab)}
    j["model"]["byte_fallback"] = True
    j["model"]["fuse_unk"] = True
    j["model"]["unk_token"] = "<unk>"
    for x in j["added_tokens"]:
        x["id"] = j["model"]["vocab"][x["content"]]
    return j


def published():
    """Returns the pipelines of published models by name."""
    all = {}
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder, t.post_processor = pt.ByteLevel(False), de.ByteLevel(), pp.ByteLevel()
    all["gpt2"] = json.loads(train(t, ["<|endoftext|>"], bytes_too=True).to_str())
    legacy = all["gpt2"]["model"]
    legacy["merges"] = [" ".join(x) for x in legacy["merges"]]
    del legacy["type"], legacy["byte_fallback"], legacy["ignore_merges"]

    t = byte_level("llama3", [split(LLAMA3)], ["<|begin_of_text|>", "<|endoftext|>"])
    t.post_processor = pp.Sequence([pp.ByteLevel(trim_offsets=False), template(t, "<|begin_of_text|>")])
    j = all["llama3"] = json.loads(t.to_str())
    j["model"]["ignore_merges"] = True
    j["model"]["merges"] = j["model"]["merges"][::2]  # so that some tokens are only found as whole pieces
    made = {"".join(x) for x in j["model"]["merges"]}
    j["model"]["merges"] = [x for x in j["model"]["merges"]
                            if all_known(x, made, j["model"]["vocab"])]

    t = byte_level("qwen", [split(QWEN)], ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    t.normalizer = normalizers.NFC()
    all["qwen"] = json.loads(t.to_str())
    t = byte_level("tekken", [split(TEKKEN)], ["<unk>", "<s>", "</s>", "[INST]"])
    t.post_processor = template(t, "<s>")
    all["tekken"] = json.loads(t.to_str())
    all["tekken"]["model"]["ignore_merges"] = True
    all["gpt4o"] = json.loads(byte_level("gpt4o", [split(GPT4O)]).to_str())
    t = byte_level("smollm", [pt.Digits(True)], ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], regex=True)
    j = all["smollm"] = json.loads(t.to_str())
    lose(j, "\u0122")  # a byte: some are missing from SmolLM's vocabulary

    spm = Tokenizer(models.BPE(unk_token="<unk>"))
    spm.pre_tokenizer = pt.Metaspace(prepend_scheme="always", split=True)
    spm = train(spm, ["<unk>", "<s>", "</s>"], vocab=460)
    spm.post_processor = template(spm, "<s>")
    spm.pre_tokenizer = None
    spm.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    spm.decoder = de.Sequence([de.Replace("\u2581", " "), de.ByteFallback(), de.Fuse(), de.Strip(" ", 1, 0)])
    all["llama2"] = with_bytes(spm)
    spm.normalizer = None
    spm.pre_tokenizer = pt.Metaspace(prepend_scheme="first", split=False)
    all["mistral"] = with_bytes(spm)
    spm.pre_tokenizer = pt.Metaspace(prepend_scheme="always", split=True)
    spm.decoder = de.Metaspace(prepend_scheme="always")
    all["metaspace"] = with_bytes(spm)

    gemma = Tokenizer(models.BPE(unk_token="<unk>"))
    gemma.normalizer = normalizers.Replace(" ", "\u2581")
    gemma.pre_tokenizer = split("\u2581", "merged_with_next")
    gemma = train(gemma, ["<pad>", "<eos>", "<bos>", "<unk>"], vocab=460)
    gemma.pre_tokenizer = pt.Split(" ", "merged_with_previous")
    gemma.post_processor = template(gemma, "<bos>")
    gemma.decoder = de.Sequence([de.Replace("\u2581", " "), de.ByteFallback(), de.Fuse()])
    gemma.add_tokens([AddedToken(x, normalized=False) for x in ["\n", "\n\n", "\u2581\u2581", "<start_of_turn>"]])
    j = with_bytes(gemma)
    all["gemma"] = place(j)
    return all


def all_known(merge, made, vocab):
    """Reports whether the tokens of a merge are single bytes or results of other merges."""
    return all(len(x) == 1 or x in made for x in merge)


def place(j):
    """Moves the added tokens into the model's vocabulary, as in Gemma's file."""
    vocab = j["model"]["vocab"]
    for x in j["added_tokens"]:
        if x["content"] not in vocab:
            vocab[x["content"]] = len(vocab)
        x["id"] = vocab[x["content"]]
    return j


def lose(j, token):
    """Removes a token from a vocabulary, with all merges that need it."""
    vocab = j["model"]["vocab"]
    gone = {x for x in vocab if token in x}
    j["model"]["merges"] = [x for x in j["model"]["merges"] if not gone & {*x, "".join(x)}]
    kept = [x for x, _ in sorted(vocab.items(), key=lambda x: x[1]) if x not in gone]
    j["model"]["vocab"] = {x: i for i, x in enumerate(kept)}


def variants(base):
    """Returns tokenizers with properties that published models lack, or have only in combination."""
    def change(name, **parts):
        j = copy.deepcopy(base[name])
        j.update({k: v for k, v in parts.items() if k != "model"})
        j["model"].update(parts.get("model", {}))
        return j

    def cut(pattern, behavior, invert=False, key="Regex"):
        return {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {key: pattern}, "behavior": behavior, "invert": invert},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}

    all = {}
    all["deepseek"] = change("gpt2", pre_tokenizer={"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"Regex": "[一-龥\u3040-ゟ゠-ヿ]+"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"Regex": DEEPSEEK}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]})
    for behavior in ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"]:
        all["split-" + behavior] = change("gpt2", pre_tokenizer=cut("[aeiou ]", behavior))
    all["split-invert"] = change("gpt2", pre_tokenizer=cut(r"\p{L}+", "Removed", True))
    all["split-string"] = change("gpt2", pre_tokenizer=cut("e", "MergedWithNext", key="String"))
    all["split-published"] = change("gpt2", pre_tokenizer=cut(LLAMA3, "Removed", True))
    all["prefix-space"] = change("gpt2", pre_tokenizer={
        "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True})
    all["digits"] = change("gpt2", pre_tokenizer={"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]})
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    added = [{**token, "content": "[X]"}, {**token, "content": "<w>", "single_word": True},
             {**token, "content": "<l>", "lstrip": True, "special": True}, {**token, "content": "<r>", "rstrip": True},
             {**token, "content": "norm", "normalized": True}, {**token, "content": "[n]", "normalized": True},
             {**token, "content": "e\u0301", "normalized": True}, {**token, "content": "to", "single_word": True},
             {**token, "content": " a", "normalized": True, "special": True}]
    for name in ["qwen", "mistral", "llama2"]:
        j = change(name)
        n = len(j["model"]["vocab"])
        j["added_tokens"] = j["added_tokens"] + [
            {"id": n + i, **x} for i, x in enumerate(x for x in added if x["content"] not in j["model"]["vocab"])]
        all["added-" + name] = j
    all["unknown"] = change("mistral", model={"byte_fallback": False, "fuse_unk": False})
    all["unknown-fused"] = change("mistral", model={"byte_fallback": False})
    all["unknown-none"] = change("mistral", model={"byte_fallback": False, "unk_token": None})
    j = all["half-fallback"] = change("mistral")
    lose(j, "<0xE1>")
    all["no-decoder"] = change("gpt2", decoder=None, post_processor=None)
    all["bare"] = change("mistral", pre_tokenizer=None, post_processor=None)
    return all


def main():
    all = published()
    all.update(variants(all))
    out = {}
    for name, j in all.items():
        t = Tokenizer.from_str(json.dumps(j))
        cases = []
        out[name] = {"file": j, "cases": cases}
        for x in TEXTS:
            plain = t.encode(x, add_special_tokens=False).ids
            whole = t.encode(x).ids
            t.encode_special_tokens = True
            ordinary = t.encode(x, add_special_tokens=False).ids
            t.encode_special_tokens = False
            at = next(i for i in range(len(whole) + 1) if whole[i:i + len(plain)] == plain)
            case = {"ids": plain, "decoded": t.decode(whole, skip_special_tokens=False),
                    "skipped": t.decode(whole, skip_special_tokens=True)}
            if whole != plain:
                case["before"], case["behind"] = whole[:at], whole[at + len(plain):]
            if ordinary != plain:
                case["ordinary"] = ordinary
            for key, other in [("decoded", x), ("skipped", case["decoded"])]:
                if case[key] == other:
                    del case[key]
            cases.append(case)
    with open(FILE, "w", encoding="utf-8") as f:
        f.write('{"texts":' + compact(TEXTS) + ',\n"tokenizers":{\n')
        f.write(",\n".join(compact(k) + ":" + compact(v) for k, v in out.items()) + "}}\n")


def compact(x):
    return json.dumps(x, ensure_ascii=True, separators=(",", ":"))


main()
