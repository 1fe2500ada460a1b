"""Run `hydrajax bench` with base and draft on separate devices; report its exit code and rows.

Arguments: the folder for ``answer.json``, the base, the draft.
"""

import json
from pathlib import Path

from helpers.programs import answer
from hydrajax.cli import main as hydrajax_main


def main(folder: Path, base: str, draft: str) -> dict:
    prompts, bench = folder / "prompts.jsonl", folder / "bench.json"
    prompts.write_text('{"prompt_ids": [5, 17, 60, 2]}\n')
    models = ["--base", base, "--draft", draft, "--tree", "chain-2", "--draft-devices", "1"]
    sizes = ["--fan-outs", "40", "--prompts", str(prompts), "--max-new-tokens", "12", "--repeats", "1"]
    code = hydrajax_main(["bench", *models, *sizes, "--json", str(bench)])
    return {"code": code, "rows": json.loads(bench.read_text())["rows"]}


if __name__ == "__main__":
    answer(main)
