"""Put trained runs into the package as its shipped model: bfloat16 safetensors, and where they came from.

    python experiments/ship_model.py --runs runs/shipped

Expects the runs of ``experiments/configs/shipped``: ``base``, ``medusa``, ``hydra`` and ``hydra_pp``; see the README
there for the commands.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
from pathlib import Path

import jax.numpy as jnp

from hydrajax import assets
from hydrajax.checkpoints.base import load_llama
from hydrajax.checkpoints.heads.export import export_heads
from hydrajax.checkpoints.heads.load import load_draft
from hydrajax.train.config import load_config
from hydrajax.train.data import dataset

CONFIGS = Path(__file__).parent / "configs" / "shipped"
MOST_BYTES = 40_000_000
LICENCE = (
    "Trained on the source of CPython's standard library (tests excluded), Copyright (c) 2001 Python Software "
    "Foundation, PSF License Version 2 (https://docs.python.org/3/license.html). No text of it is included."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/shipped"))
    parser.add_argument("--only", nargs="*", default=assets.NAMES)
    args = parser.parse_args()

    if "base" in args.only:
        shutil.rmtree(assets.FOLDER / "base", ignore_errors=True)
        shutil.copytree(args.runs / "base" / "base", assets.FOLDER / "base")
        about()
    model, _ = load_llama(assets.FOLDER / "base")
    for name in args.only:
        if name != "base":
            drafter, params = load_draft(args.runs / name / "heads", model.config, jnp.float32)
            export_heads(
                assets.FOLDER / name,
                drafter,
                params,
                base_name="hydrajax/assets/base",
                dtype=jnp.bfloat16,
                overwrite=True,
            )
    size = sum(path.stat().st_size for path in assets.FOLDER.rglob("*") if path.is_file() and path.suffix != ".py")
    print(f"{assets.FOLDER}: {size / 1e6:.1f} MB")
    if size > MOST_BYTES:
        raise SystemExit(f"the assets may hold at most {MOST_BYTES / 1e6:.0f} MB")


def about() -> None:
    """``ABOUT.json``: the data, its version and licence, and which files no model has seen."""
    config = load_config(CONFIGS / "base.yaml")
    items, _ = dataset.read(config.data, print)
    _, held_out = dataset.rows.split(items, config.data.held_out, config.seed)
    content = {
        "data": "the standard library's own source", "files": len(items), "python": platform.python_version(),
        "licence": LICENCE, "held_out": [item.name for item in held_out],
    }  # fmt: skip
    (assets.FOLDER / "ABOUT.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
