"""A small draft model, from text that the base writes to its speed beside transformers' assisted generation.

    python experiments/draft_model.py --output runs/draft_model --json experiments/results/draft_model.json
    python experiments/draft_model.py --quick

Three steps, of which each goes on where it was stopped, and the first two are left out where the draft model is there
already: the base continues beginnings of the standard library (`hydrajax distill`); a LLaMA of 0.72M parameters is
trained on that from scratch (`experiments/configs/draft_model.yaml`); and both programs decode the same prompts with
the same pair in one run (`experiments/peers.py`). The training takes a few minutes on a GPU and about an hour on 2 CPU
cores. ``--quick`` does everything in a few
minutes, with a draft that has learnt nothing. Needs the `test` extra (torch).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from hydrajax import assets

HERE = Path(__file__).resolve().parent
CONFIGS = HERE / "configs"
QUICK = {
    "text": ["--count", "16", "--prompt-tokens", "16", "--new-tokens", "8", "--batch-size", "8"],
    "limits": ["data.limit=4"],
    "training": ["steps=2", "batch_size=2", "data.length=24", "data.held_out=0.2", "eval_rows=2", "eval_every=2"],
    "peers": ["--count", "1", "--prompt-tokens", "16", "--max-new-tokens", "8", "--repeats", "1"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/draft_model"), help="default %(default)s")
    parser.add_argument("--count", type=int, default=16384, help="texts that the base writes (default %(default)s)")
    parser.add_argument("--temperatures", default="0,0,0.7", help="at which it writes them (default %(default)s)")
    parser.add_argument("--prompts", help="a file of prompts to compare on (default: held-out code)")
    parser.add_argument("--json", type=Path, help="write the comparison here")
    parser.add_argument("--quick", action="store_true", help="every step at its smallest, to see that it runs")
    parser.add_argument("overrides", metavar="key.sub=value", nargs="*", help="settings of the training run")
    args = parser.parse_args()
    quick = QUICK if args.quick else dict.fromkeys(QUICK, ())

    text, draft = args.output / "text.jsonl", args.output / "base"
    args.output.mkdir(parents=True, exist_ok=True)
    if not draft.exists():
        size = quick["text"] or ["--count", str(args.count), "--batch-size", "256"]
        config = ["--config", CONFIGS / "draft_model_text.yaml", "--output", text, *quick["limits"]]
        run("-m", "hydrajax.train.distill", *size, "--temperatures", args.temperatures, *config)
        settings = [f"output={args.output}", f"data.files=[{text}]", f"data.tokenizer={assets.base()}"]
        config = ["--config", CONFIGS / "draft_model.yaml", *settings, *quick["training"], *args.overrides]
        run("-m", "hydrajax.train", *config)
    prompts = ["--prompts", args.prompts] if args.prompts else []
    written = ["--json", args.json] if args.json else []
    run(HERE / "peers.py", "--draft", draft, "--assistant", draft, *prompts, *written, *quick["peers"])
    return 0


def run(*arguments) -> None:
    """A Python program in a process of its own, as its device must be free for the next."""
    subprocess.run([sys.executable, *map(str, arguments)], check=True)


if __name__ == "__main__":
    sys.exit(main())
