"""lm-evaluation-harness: a task of multiple choice by ``echo`` and ``logprobs``. Argument: the tokenizer's folder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

QUESTIONS = [
    ("The capital of France is", [" Paris", " bricks", " seven"]),
    ("Two and two are", [" four", " green", " the"]),
    ("Bread is made of", [" flour", " glass", " Tuesday"]),
    ("At night the sky is", [" dark", " wooden", " from"]),
]
with TemporaryDirectory() as folder:
    at = Path(folder)
    lines = [json.dumps({"question": question, "choices": choices}) for question, choices in QUESTIONS]
    (at / "common.jsonl").write_text("\n".join(lines))
    task = {
        "task": "common",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(at / "common.jsonl")}},
    }
    task |= {"test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": 0}
    task |= {"doc_to_choice": "{{choices}}", "target_delimiter": "", "metric_list": [{"metric": "acc"}]}
    (at / "common.yaml").write_text(json.dumps(task))
    url = f"{os.environ['OPENAI_BASE_URL']}/completions"
    model = f"model={os.environ['MODEL']},base_url={url},tokenizer={sys.argv[1]},tokenizer_backend=huggingface"
    command = [Path(sys.executable).with_name("lm_eval"), "run", "--model", "local-completions", "--model_args", model]
    options = ["--tasks", "common", "--include_path", folder, "--output_path", at / "out"]
    subprocess.run([*command, *options], check=True, stdout=sys.stderr, env=os.environ | {"HF_HOME": folder})
    (found,) = (at / "out").rglob("results*.json")
    results = json.loads(found.read_text())["results"]["common"]
    print("multiple choice:", {name: value for name, value in results.items() if name.startswith("acc")})
