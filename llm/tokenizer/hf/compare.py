"""Writes the data for TestSameAsRust: texts and their ids according to Rust's tokenizers.

    pip install tokenizers faker
    python3 compare.py FOLDER
    KASMINA_TOKENIZERS=FOLDER go test -run TestSameAsRust -v .

The texts are code and prose of the Go installation and its module cache, made-up prose in fourteen
scripts, and random Unicode. For each FOLDER/NAME/tokenizer.json, which fetch.sh gets, the ids of each
text go to FOLDER/NAME/TEXT.ids as 32-bit integers.
"""

import array
import glob
import os
import random
import subprocess
import sys
import time
import unicodedata

from faker import Faker
from tokenizers import Tokenizer

MB = 1 << 20


def files(pattern, size):
    """Returns the first part of the concatenated files."""
    parts, have = [], 0
    for name in sorted(glob.glob(pattern, recursive=True)):
        with open(name, encoding="utf-8", errors="ignore", newline="") as f:
            parts.append(f.read())
        have += len(parts[-1])
        if have > size:
            break
    return "".join(parts)[:size]


def scripts(size):
    """Returns made-up prose in many scripts."""
    parts = []
    locales = ["ar_AA", "bn_BD", "de_DE", "el_GR", "fa_IR", "he_IL", "hi_IN", "hy_AM", "ja_JP",
               "ka_GE", "ko_KR", "ru_RU", "ta_IN", "th_TH", "vi_VN", "zh_CN"]
    for locale in locales:
        fake = Faker(locale)
        fake.seed_instance(1)
        have = 0
        while have < size // len(locales):
            parts.append("\n".join([fake.name(), fake.address(), fake.text(400), ""]))
            have += len(parts[-1].encode())
    return "".join(parts)


def hostile(size):
    """Returns random characters of any kind, alone, repeated, and between words and white space."""
    r = random.Random(1)
    points = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    kinds = {}
    for c in points:
        kinds.setdefault(unicodedata.category(chr(c)), []).append(c)
    kinds = list(kinds.values())
    bits = ["'s", "'LL", "'\u017f", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "a", "The",
            "1", "123456", "e\u0301", "\u0301" * 40, "a" * 70, "\u200d", "\ufeff", "\u1100\u1161\u11a8",
            "\uac00\u11a8", "<|im_start|>", "<s>", "</s>", "<|", "\u2581", "\u2581\u2581", "<0x0A>",
            "\u0120", "\U0001f469\u200d\U0001f469", "/", "_", ".", "\0"]
    out, have = [], 0
    while have < size:
        kind = r.randrange(4)
        if kind == 0:
            part = r.choice(bits)
        elif kind == 1:
            part = chr(r.choice(r.choice(kinds)))
        elif kind == 2:
            part = chr(r.choice(points)) * r.choice([1, 1, 1, 2, 3, 9])
        else:
            part = "".join(chr(r.randrange(1, 0x3000)) for _ in range(r.randrange(1, 6)))
        out.append(part)
        have += len(part.encode())
    return "".join(out)


def main(folder):
    go = subprocess.check_output(["go", "env", "GOROOT", "GOMODCACHE"], text=True).split("\n")
    texts = {
        "code": lambda: files(go[0] + "/src/**/*.go", 2 * MB),
        "prose": lambda: files(go[1] + "/**/*.md", 2 * MB),
        "scripts": lambda: scripts(2 * MB),
        "hostile": lambda: hostile(MB),
        "letters": lambda: "a" * MB,
    }
    os.makedirs(folder, exist_ok=True)
    for name, make in texts.items():
        path = f"{folder}/{name}.txt"
        if not os.path.exists(path):
            with open(path, "w", encoding="utf-8", newline="") as f:
                f.write(make())
    for path in sorted(glob.glob(folder + "/*/tokenizer.json")):
        tokenizer = Tokenizer.from_file(path)
        for name in texts:
            with open(f"{folder}/{name}.txt", encoding="utf-8", newline="") as f:
                text = f.read()
            begin = time.perf_counter()
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            seconds = time.perf_counter() - begin
            size = len(text.encode())
            print(f"{os.path.dirname(path)} {name}: {size} bytes, {len(ids)} ids, "
                  f"{size / seconds / 1e6:.1f} MB/s", flush=True)
            with open(f"{os.path.dirname(path)}/{name}.ids", "wb") as f:
                array.array("i", ids).tofile(f)


main(sys.argv[1])
