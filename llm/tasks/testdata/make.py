"""Writes the task files next to this script, and golden/*.json, which hold the results of lm-eval for
them. The models are those in llm/hf/testdata.

Runs with lm-eval 0.4.13, transformers 5.24.0 and torch 2.15.0. The CORE bundle is measured with
nanochat's core_eval.py:

    git clone https://github.com/karpathy/nanochat
    python3 make.py nanochat/nanochat/core_eval.py
"""

import importlib.util
import json
import logging
import os
import random
import shutil
import sys
import tempfile
from types import SimpleNamespace

os.environ["DISABLE_MULTIPROC"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp()

import lm_eval
import torch
import transformers
from lm_eval import evaluator
from lm_eval.api.metrics import aggregate_subtask_metrics, pooled_sample_stderr
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks._yaml_loader import load_yaml

logging.disable(logging.WARNING)
transformers.logging.set_verbosity_error()
HERE = os.path.dirname(os.path.abspath(__file__))
MODELS = os.path.join(HERE, "../../hf/testdata")
LM_EVAL = os.path.join(os.path.dirname(lm_eval.__file__), "tasks")
os.chdir(HERE)

# The files ------------------------------------------------------------------------------------------

rnd = random.Random(7)
license_text = open("../../../LICENSE").read()
SENTENCES = [s.strip().replace("\n", " ") for s in license_text.split(".") if len(s.strip()) > 30]
NOUNS = "the software,a copy,the notice,the author,the holder,a claim,any person,the river,a café,naïveté,東京,the dog".split(",")
VERBS = "sells,permits,includes,publishes,follows,sees,grants,needs".split(",")


def clause():
    return f"{rnd.choice(NOUNS)} {rnd.choice(VERBS)} {rnd.choice(NOUNS)}"


def sentence():
    if rnd.random() < 0.4:
        words = rnd.choice(SENTENCES).split()
        start = rnd.randrange(len(words))
        return " ".join(words[start:start + rnd.randrange(4, 14)])
    return clause()


def write(name, rows):
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    with open(name, "w") as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=rnd.random() < 0.5) + "\n")


def hellaswag(n):
    return [dict(ind=i, activity_label=rnd.choice(["Selling", "Roof shingle removal", "Ärger"]),
                 ctx_a=sentence() + rnd.choice([".", "", " [title] Why"]),
                 ctx_b=rnd.choice(["then", "ÉTÉ", "she", "", "ßen"]), split="val",
                 endings=[rnd.choice(["", "[step] ", "  "]) + sentence() + rnd.choice([".", "  twice", ""]) for _ in range(4)],
                 label=str(rnd.randrange(4))) for i in range(n)]


def arc(n):
    rows = []
    for i in range(n):
        k = rnd.choice([3, 4, 4, 5])
        labels = list("ABCDE" if rnd.random() < 0.7 else "12345")[:k]
        rows.append(dict(id=f"q{i}", question=f"Which one {rnd.choice(VERBS)} {rnd.choice(NOUNS)}?",
                         choices=dict(text=[rnd.choice([clause(), rnd.choice(NOUNS)]) for _ in range(k)], label=labels),
                         answerKey=rnd.choice(labels)))
    return rows


def piqa(n):
    return [dict(goal=sentence(), sol1=sentence(), sol2=rnd.choice([sentence(), clause()]), label=rnd.randrange(2))
            for _ in range(n)]


def winogrande(n):
    rows = []
    for _ in range(n):
        a, b = rnd.sample(NOUNS, 2)
        rows.append(dict(sentence=f"{clause()} because _ {rnd.choice(VERBS)} {rnd.choice(NOUNS)}.", option1=a, option2=b,
                         answer=rnd.choice("12")))
    return rows


def boolq(n):
    return [dict(passage=sentence() + ". " + sentence(), question="does " + clause(), idx=i, label=rnd.randrange(2))
            for i in range(n)]


def lambada(n):
    return [dict(text=sentence() + " " + rnd.choice([sentence(), "software"])) for _ in range(n)]


def mmlu(n):
    return [dict(question=rnd.choice(["", " "]) + f"What {rnd.choice(VERBS)} {rnd.choice(NOUNS)}?\n",
                 subject=["anatomy", "high_school_physics"][i % 2], choices=[rnd.choice(NOUNS) for _ in range(4)],
                 answer=rnd.randrange(4)) for i in range(n)]


def gsm8k(n):
    rows = []
    for _ in range(n):
        a, b = rnd.randrange(2, 60), rnd.randrange(2, 60)
        rows.append(dict(question=f"If {rnd.choice(NOUNS)} has {a} and {rnd.choice(NOUNS)} has {b}, what is the sum?",
                         answer=f"It is {a} + {b} = <<{a}+{b}={a + b}>>{a + b}.\n#### {a + b}"))
    return rows


def wikitext(n):
    return [dict(page=" = Title = \n \n " + " . ".join(sentence() for _ in range(rnd.randrange(1, 12)))
                 + " ( see \" this \" ) @-@ 5 @,@ 000 ; 20 ° north , ' it ' 's N times .\n ") for _ in range(n)]


def files():
    makers = dict(hellaswag=hellaswag, arc=arc, piqa=piqa, winogrande=winogrande, boolq=boolq, lambada=lambada,
                  mmlu=mmlu, gsm8k=gsm8k, wikitext=wikitext)
    for name, make in makers.items():
        items, train = make(40 if name not in ["gsm8k", "wikitext"] else 12), make(30)
        if name == "hellaswag":
            items[3]["label"], train[5] = "9", items[1]
            train[6] = items[1]
        if name == "piqa":
            items[1].update(sol2=""), items[2].update(sol1=" "), items[4].update(label=-1)
            items[5].update(sol2=items[5]["sol1"]), items[6].update(sol1="\U0001f469\u200d\U0001f467 \u4eba\u751f \ufb01n")
            items[7].update(goal=" ".join(SENTENCES))
            for at in 0, 9, 12, 20, 25:
                train[at] = items[9]
        if name == "winogrande":
            items[2].update(sentence="This grants the right to _"), items[3].update(sentence="_ is\u00a0 a   copy.  ")
        if name == "lambada":
            items[1].update(text="Permission"), items[2].update(text="hereby granted free \n"), items[3].update(text="a  b\t c")
            items[4].update(text="<|begin_of_text|>Permission is hereby <|endoftext|> granted")
            items[5].update(text=" ".join(SENTENCES))
        if name == "mmlu":
            items[4]["answer"] = 7
            items[5]["choices"] = ["", " ", "x\u3000", "東京"]
        if name == "wikitext":
            items[1]["page"], items[2]["page"] = "", " "
            items[3]["page"] = license_text
        write(name + ".jsonl", items)
        write("train/" + name + ".jsonl", train)


def bundle():
    """A CORE bundle with a task of each kind."""
    shutil.rmtree("core", ignore_errors=True)
    write("core/eval_data/a/choice.jsonl", [dict(query=sentence(), choices=[clause() for _ in range(3)], gold=rnd.randrange(3))
                                            for _ in range(15)])
    write("core/eval_data/schema.jsonl", [dict(context_options=[clause(), clause()], continuation=sentence(),
                                               gold=rnd.randrange(2)) for _ in range(12)])
    rows = []
    for i in range(14):
        words = rnd.choice(SENTENCES).split()
        at = rnd.randrange(3, len(words))
        rows.append(dict(context=" ".join(words[:at]) + rnd.choice(["", " ", "\n"]), continuation=words[at]))
    write("core/eval_data/lm.jsonl", rows)
    with open("core/core.yaml", "w") as f:
        f.write("""icl_tasks:
-
  label: small_choice
  dataset_uri: a/choice.jsonl
  num_fewshot: [3]
  icl_task_type: multiple_choice
  continuation_delimiter: "\\nAnswer: "
-
  label: small_schema
  dataset_uri: schema.jsonl
  num_fewshot: [0]
  icl_task_type: schema
-
  label: small_lm
  dataset_uri: lm.jsonl
  num_fewshot: [2]
  icl_task_type: language_modeling
""")
    with open("core/eval_meta_data.csv", "w") as f:
        f.write("Eval Task,Task Category,Random baseline\nsmall_choice,a,33\nsmall_schema,b,50\nsmall_lm,\"c, d\",0\n")


# The measurements ------------------------------------------------------------------------------------

YAML = dict(hellaswag="hellaswag/hellaswag.yaml", arc="arc/arc_easy.yaml", piqa="piqa/piqa.yaml",
            winogrande="winogrande/default.yaml", boolq="super_glue/boolq/default.yaml",
            lambada="lambada/lambada_openai.yaml", mmlu="mmlu/default/mmlu_anatomy.yaml", gsm8k="gsm8k/gsm8k.yaml",
            wikitext="wikitext/wikitext.yaml")


def task(name, shots, path=None, subject=None):
    config = load_yaml(os.path.join(LM_EVAL, YAML[name]), resolve_func=True)
    for key in "tag", "group", "metadata", "task_alias":
        config.pop(key, None)
    split = config.get("test_split") or config["validation_split"]
    data = {split: path or name + ".jsonl"}
    for s in {config.get("training_split"), config.get("fewshot_split")} - {None, split}:
        data[s] = "train/" + name + ".jsonl"
    if config.get("test_split"):  # of two splits with items, only the test split is used
        config["validation_split"] = None
    if subject:
        folder = tempfile.mkdtemp()
        for s, file in data.items():
            rows = [r for r in map(json.loads, open(file)) if r["subject"] == subject]
            data[s] = os.path.join(folder, s + ".jsonl")
            write(data[s], rows)
        config["description"] = ("The following are multiple choice questions (with answers) about "
                                 + subject.replace("_", " ") + ".\n\n")
    if name in ["hellaswag", "arc", "piqa"]:
        config["metric_list"].append(dict(metric="acc_bytes", aggregation="mean", higher_is_better=True))
    if name == "gsm8k":
        config["generation_kwargs"]["max_gen_toks"] = 24
    if name == "perplexity":
        config["fewshot_config"] = None
    config.update(task=name, dataset_path="json", dataset_name=None, dataset_kwargs=dict(data_files=data), num_fewshot=shots)
    t = ConfigurableTask(config=config)
    t.set_fewshot_seed(1234)
    return t


def measure(lm, name, shots, chat, subject=None):
    t = task(name, shots, subject=subject)
    out = evaluator.evaluate(lm=lm, task_dict={name: t}, apply_chat_template=chat, fewshot_as_multiturn=chat,
                             log_samples=True, bootstrap_iters=100000)
    items = {}
    for s in out["samples"][name]:
        r = items.setdefault(s["doc_id"], dict(responses=[], metrics={}))
        digits = 17 if name in ["lambada", "wikitext"] else 6  # perplexities need all of them
        r["responses"] = [x[0] if not isinstance(x[0], tuple) else [round(x[0][0], digits), int(x[0][1])]
                          for x in s["resps"]]
        for m in s["metrics"]:
            v = s[m]
            r["metrics"][m + "," + s["filter"]] = round(float(v[0] if isinstance(v, tuple) else v), 6)
    results = {k: v for k, v in out["results"][name].items() if "," in k}
    return dict(task=name, shots=shots, chat=chat, subject=subject, items=[items[i] for i in sorted(items)], results=results)


def group(parts):
    """The results of lm-eval's group mmlu for its subjects."""
    sizes = [len(p["items"]) for p in parts]
    return {"acc,none": aggregate_subtask_metrics([p["results"]["acc,none"] for p in parts], sizes),
            "acc_stderr,none": pooled_sample_stderr([p["results"]["acc_stderr,none"] for p in parts], sizes)}


def core(folder, core_eval):
    """The accuracies and log-likelihoods of nanochat."""
    spec = importlib.util.spec_from_file_location("core_eval", core_eval)
    c = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(c)
    import yaml

    tok = transformers.AutoTokenizer.from_pretrained(folder)
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def model(ids):
        return hf(ids).logits

    model.max_seq_len = hf.config.max_position_embeddings

    class Tokens:
        def get_bos_token_id(self):
            return tok.bos_token_id if tok.bos_token_id is not None else tok.eos_token_id

        def __call__(self, texts, prepend):
            return [[prepend] + tok.encode(t, add_special_tokens=False) for t in texts]

    results = {}
    for t in yaml.safe_load(open("core/core.yaml"))["icl_tasks"]:
        data = [json.loads(line) for line in open("core/eval_data/" + t["dataset_uri"])]
        random.Random(1337).shuffle(data)
        meta = dict(task_type=t["icl_task_type"], num_fewshot=t["num_fewshot"][0],
                    continuation_delimiter=t.get("continuation_delimiter", " "))
        results[t["label"]] = [int(c.evaluate_example(i, model, Tokens(), data, "cpu", meta)) for i in range(len(data))]
    return results


CASES = [("hellaswag", 0, False), ("hellaswag", 2, False), ("arc", 0, False), ("arc", 2, False), ("piqa", 0, False),
         ("piqa", 3, False), ("winogrande", 0, False), ("winogrande", 1, False), ("boolq", 0, False), ("boolq", 1, False),
         ("lambada", 0, False), ("mmlu", 0, False), ("mmlu", 2, False), ("gsm8k", 1, False), ("wikitext", 0, False)]
CHAT = [("hellaswag", 1, True), ("winogrande", 1, True), ("mmlu", 1, True), ("gsm8k", 1, True), ("lambada", 0, True)]


def without_begin(folder):
    """A copy of a model whose tokenizer has no beginning-of-text token."""
    copy = os.path.join(tempfile.mkdtemp(), "model")
    shutil.copytree(folder, copy)
    path = os.path.join(copy, "tokenizer_config.json")
    config = json.load(open(path))
    del config["bos_token"]
    json.dump(config, open(path, "w"))
    return copy


def golden(core_eval):
    os.makedirs("golden", exist_ok=True)
    for name in "tiny", "tiny-gpt2", "tiny-olmo2", "tiny-olmo2-no-begin":
        folder = os.path.join(MODELS, name.removesuffix("-no-begin"))
        cases = CASES + CHAT if name == "tiny" else CASES
        if name.endswith("-no-begin"):
            folder = without_begin(folder)
            cases = [("lambada", 0, False), ("wikitext", 0, False), ("piqa", 0, False)]
        lm = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=1)
        all = []
        for task_name, shots, chat in cases:
            print(name, task_name, shots, chat, flush=True)
            if task_name == "mmlu":
                parts = [measure(lm, task_name, shots, chat, s) for s in ["anatomy", "high_school_physics"]]
                all += parts
                all.append(dict(task="mmlu", shots=shots, chat=chat, subject=None, items=[], results=group(parts)))
            else:
                all.append(measure(lm, task_name, shots, chat))
        with open(f"golden/{name}.json", "w") as f:
            json.dump(dict(cases=all, core=core(folder, core_eval)), f, ensure_ascii=False, separators=(",", ":"))


if sys.argv[2:] != ["measure"]:
    files()
    bundle()
golden(sys.argv[1])
