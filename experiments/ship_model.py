"""Copy trained runs into the package as its shipped model, with their sources.

    python experiments/ship_model.py --runs runs/shipped

Expects the corpus and the runs of ``experiments/configs/shipped`` (``base``, ``medusa``, ``hydra``, ``hydra_pp`` and
``draft_model``), whose README has the commands.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
from shipped_corpus import installed_name

from hydrajax import assets
from hydrajax.formats.export import export_heads
from hydrajax.formats.fingerprint import fingerprint
from hydrajax.formats.huggingface import load_llama
from hydrajax.formats.load import load_draft
from hydrajax.text.templates import BUILT_IN
from hydrajax.train.data import dataset
from hydrajax.train.run_config import load_config

CONFIGS = Path(__file__).parent / "configs" / "shipped"
MOST_BYTES = 62_000_000  # compressed, in the wheel, less than 60 MB; tests/test_project.py has the same limit
NOTE = "Trained on these sources, all under permissive licences. No text of them is included."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/shipped"))
    parser.add_argument("--only", nargs="*", default=("base", *assets.DRAFTS))
    args = parser.parse_args()

    for name in set(args.only) - set(assets.HEADS):  # whole models
        shutil.rmtree(assets.FOLDER / name, ignore_errors=True)
        shutil.copytree(args.runs / name / "base", assets.FOLDER / name)
    if "base" in args.only:
        about(args.runs)
        add_chat_template(assets.FOLDER / "base" / "tokenizer_config.json")
    model, _ = load_llama(assets.FOLDER / "base")
    for name in assets.HEADS:
        if name in args.only:
            drafter, params = load_draft(args.runs / name / "heads", model.config, jnp.float32)
            record = json.loads((args.runs / name / "heads" / "config.json").read_text())
            export_heads(
                assets.FOLDER / name,
                drafter,
                params,
                base_name="hydrajax/assets/base",
                base_fingerprint=fingerprint(assets.FOLDER / "base"),
                story=record["hydrajax"]["story"],
                dtype=jnp.int8,
                overwrite=True,
            )
    size = sum(path.stat().st_size for path in assets.FOLDER.rglob("*") if path.is_file() and path.suffix != ".py")
    print(f"{assets.FOLDER}: {size / 1e6:.1f} MB")
    if size > MOST_BYTES:
        raise SystemExit(f"assets: got {size / 1e6:.0f} MB, expected at most {MOST_BYTES / 1e6:.0f} MB")


def add_chat_template(file: Path) -> None:
    """Give the tokenizer the built-in template for bases that continue a text, so that serve and chat start."""
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"chat_template": BUILT_IN["raw"]}, indent=2, sort_keys=True) + "\n")


def about(runs: Path) -> None:
    """Write ``ABOUT.json``: sources, versions, licences and the held-out files."""
    config = load_config(CONFIGS / "base.yaml")
    items = [name.relative_to(runs / "corpus").as_posix() for name in sorted((runs / "corpus").rglob("*.py"))]
    _, held_out = dataset.packing.split(items, config.data.held_out, config.seed)
    # The standard library comes first, as it is better known.
    names = sorted(held_out, key=lambda name: not name.startswith("standard_library/"))
    names = [installed_name(name) for name in names]
    content = {"note": NOTE, "sources": json.loads((runs / "SOURCES.json").read_text()), "held_out": names}
    (assets.FOLDER / "ABOUT.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
