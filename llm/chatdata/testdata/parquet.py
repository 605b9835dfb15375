"""Writes examples to parquet files, as Hugging Face's datasets publishes them, and to JSON Lines.

    pip install datasets pyarrow
    python3 testdata/parquet.py        # or: go generate ./llm/chatdata

The two files of a name have the same examples. Members that an example does not have are missing in its line, and
null in its row.
"""

import json
import os
from datetime import datetime

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "parquet")

U = lambda c: {"role": "user", "content": c}
A = lambda c: {"role": "assistant", "content": c}
S = lambda c: {"role": "system", "content": c}


def tool(name, **properties):
    return {"type": "function", "function": {"name": name, "description": f"Calls {name}", "parameters": {
        "type": "object", "properties": properties, "required": list(properties)}}}


def call(name, **arguments):
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}]}


def answer(name, text):
    return {"role": "tool", "name": name, "content": text}


CONVERSATIONS = [
    {"messages": [U("Hello, how's it going?"), A("Fine, thanks.")]},
    {"messages": [S("You are kind."), U("Hi\n"), A("Hello!"), U(" 1 < 2 & \"3\" 'x' \\ "), A("So it is.")]},
    {"messages": [U("😀 é\u0301 a\u00a0b"), A("ẞß 👨‍👩‍👧 日本語\n\n中文")]},
    {"messages": [U("Say nothing."), A("")]},
    {"messages": [U("long"), A("word " * 300)]},
    {"messages": [U(f"{i}?") if i % 2 == 0 else A(f"{i}.") for i in range(40)]},
    {"messages": [U("a\tb"), A("\u2028c\r\n")]},
]
CALLS = [
    {"messages": [U("Weather in Paris?"), call("weather", city="Paris"), answer("weather", "9 °C"), A("It is 9 °C.")],
     "tools": [tool("weather", city={"type": "string", "description": "The city"})]},
    {"messages": [U("No tools?"), A("None.")]},
    {"messages": [U("Add 3 and 1.0."), call("add", n=3, x=1.0, exact=True), answer("add", "4"), A("4")],
     "tools": [tool("add", n={"type": "integer", "enum": [1, 2, 3]}, x={"type": "number"}, exact={"type": "boolean"}),
               tool("weather", city={"type": "string"})]},
    {"messages": [U("Two at once."), {"role": "assistant", "content": "Let me see.", "tool_calls": [
        call("add", n=-1, x=1e-7)["tool_calls"][0], call("add", n=2**53 + 1, x=0.1)["tool_calls"][0]]},
        answer("add", "0"), A("0")], "tools": []},
]
COMPLETIONS = [{"prompt": f"Permission {i} is ", "completion": ["granted", "hereby given", "é"][i % 3]} for i in range(50)]
TEXTS = [{"text": ["The Software\n", "is provided", "„as is“"][i % 3]} for i in range(20)]
PAIRS = [{"prompt": f"Permission {i} is ", "chosen": f"granted {i}", "rejected": "not " * (i % 3) + "denied"} for i in range(9)]
CHAT_PAIRS = [{"chosen": [U(f"May I {i}?"), A("Yes.")], "rejected": [U(f"May I {i}?"), A("No.")]} for i in range(5)]
MIXED = [{"text": "Some text"}, {"prompt": "2 + 2 =", "completion": " 4"}, CONVERSATIONS[1],
         {"prompt": "4 + 4 =", "completion": " 8"}, {"text": "More text"}]


def write(name, rows, table, **options):
    with open(os.path.join(FOLDER, name + ".jsonl"), "w", encoding="utf-8") as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False) + "\n")
    path = os.path.join(FOLDER, name + ".parquet")
    if isinstance(table, datasets.Dataset):
        table.to_parquet(path, **options)
    else:
        pq.write_table(table, path, **options)


def main():
    os.makedirs(FOLDER, exist_ok=True)
    write("chats", CONVERSATIONS, datasets.Dataset.from_list(CONVERSATIONS), batch_size=3)
    write("calls", CALLS, datasets.Dataset.from_list(CALLS))
    # datasets stores objects with other members in every row as JSON.
    write("json", CALLS, datasets.load_dataset("json", data_files=os.path.join(FOLDER, "calls.jsonl"), split="train"))
    write("pages", CONVERSATIONS, pa.Table.from_pylist(CONVERSATIONS), compression="zstd", data_page_size=16,
          write_batch_size=1, use_dictionary=False, data_page_version="1.0")
    write("pages2", CONVERSATIONS, pa.Table.from_pylist(CONVERSATIONS), compression="gzip", data_page_size=16,
          write_batch_size=1, row_group_size=4, use_dictionary=False, data_page_version="2.0")

    # Columns that no format has are not read, whatever their types.
    columns = pa.Table.from_pylist([dict(r, id=i, score=i / 7, when=datetime(2026, 1, 2), image=b"\xff\x00")
                                    for i, r in enumerate(COMPLETIONS)])
    strings = [(f.name, pa.large_string() if f.name == "prompt" else f.type) for f in columns.schema]
    write("completions", COMPLETIONS, columns.cast(pa.schema(strings)), compression="zstd", row_group_size=20)
    texts = pa.table({"text": pa.array([r["text"] for r in TEXTS]).dictionary_encode(), "messages": pa.nulls(len(TEXTS))})
    write("texts", TEXTS, texts, compression="none")
    write("pairs", PAIRS, datasets.Dataset.from_list(PAIRS))
    write("chat-pairs", CHAT_PAIRS, pa.Table.from_pylist(CHAT_PAIRS), compression="brotli", use_compliant_nested_type=False)
    names = {name: None for row in MIXED for name in row}  # from_list takes the columns of the first row only
    write("mixed", MIXED, datasets.Dataset.from_list([names | row for row in MIXED]), batch_size=2)

    # Values of which JSON has no form of its own, or that are not what a format wants.
    values = pa.table({"text": pa.array([b"fine", b"\xff", None, b""], pa.binary())})
    pq.write_table(values, os.path.join(FOLDER, "bytes.parquet"))
    pq.write_table(pa.table({"question": ["a"], "answer": ["b"]}), os.path.join(FOLDER, "columns.parquet"))
    types = pa.table({
        "messages": pa.array([[{"role": "user", "content": "a", "when": datetime(2026, 1, 2, 3, 4, 5, 600000), "day": datetime(2026, 1, 2).date(),
                                "small": 7, "unsigned": 2**63 + 1, "half": 0.5, "names": [("x", 1), ("y", None)]},
                               {"role": "assistant", "content": "b"}],
                              [{"role": "user", "content": "a", "half": float("nan")}, {"role": "assistant", "content": "c"}]],
                             pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("when", pa.timestamp("us", "UTC")),
                                                 ("day", pa.date32()), ("small", pa.int8()), ("unsigned", pa.uint64()), ("half", pa.float32()),
                                                 ("names", pa.map_(pa.string(), pa.int32()))])))})
    pq.write_table(types, os.path.join(FOLDER, "types.parquet"))


main()
