"""Converts some of the files of this folder to parquet files, as Hugging Face's datasets publishes them.

    pip install datasets
    python3 testdata/parquet.py
"""

import os

import datasets

FOLDER = os.path.dirname(os.path.abspath(__file__))

for name in ("arc", "mmlu", "boolq", "gsm8k"):
    rows = datasets.load_dataset("json", data_files=os.path.join(FOLDER, name + ".jsonl"), split="train")
    if name == "mmlu":
        rows = rows.cast_column("answer", datasets.ClassLabel(names=["A", "B", "C", "D"]))
    rows.to_parquet(os.path.join(FOLDER, name + ".parquet"), batch_size=7)
