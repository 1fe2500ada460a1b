"""Make the archives of this folder from the full set: ``PYTHONPATH=tests python tests/golden/make.py FULL_SET``.

README.md lists what is kept. Nothing is rounded: a value is kept as it was recorded, or not at all (margins: `CAP`).
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from helpers.recordings import Arrays, kept_columns, kept_entries, pack

HERE = Path(__file__).parent
IDS = ("prompts", "prompt_lens", "output_ids", "output_lens", "accept_lengths", "num_steps")
EOS = ("eos_id", "prompt", "output_ids", "accept_lengths")
CAP = 1e-3  # of tree margins: the tests ask which are below 1e-4
N_LEARNING_RATES = 8  # every 8th step of 1001


class Full:
    """The full set of recordings. Every method returns files for `pack`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def text(self, *names: str) -> dict[str, bytes]:
        return {name: (self.folder / name).read_bytes() for name in names}

    def arrays(self, name: str, fields: str | tuple[str, ...] = ".*") -> Arrays:
        """The arrays of a file whose names match a regular expression or are listed."""
        found = load_file(self.folder / name) if name.endswith(".safetensors") else np.load(self.folder / name)
        pattern = re.compile(fields if isinstance(fields, str) else "|".join(fields))
        return {field: found[field] for field in found if pattern.fullmatch(field)}

    def whole(self, name: str, fields: str | tuple[str, ...] = ".*") -> dict[str, Arrays]:
        return {name: self.arrays(name, fields)}

    def columns(self, name: str, fields: tuple[str, ...]) -> dict[str, Arrays]:
        """Floats thinned to evenly spaced columns; masks of 0 and 1 as bytes."""
        arrays = self.arrays(name, fields)
        for field, array in arrays.items():
            if "mask" in field:
                arrays[field] = array.astype(np.uint8)
            elif array.dtype == np.float32:
                arrays[field] = kept_columns(array)
        return {name: arrays}

    def gradients(self, name: str, fields: str = ".*") -> dict[str, Arrays]:
        return {name: {field: kept_entries(array) for field, array in self.arrays(name, fields).items()}}

    def trees(self, name: str) -> dict[str, Arrays]:
        """An EAGLE run with the tree of every step, where two of its tokens may swap (`CAP`)."""
        fields = (*IDS, "total_token", "depth", "top_k", r"tree_(tokens|parents|depths|margin)_\d")
        arrays = self.arrays(name, fields)
        return {name: {f: np.minimum(a, np.float32(CAP)) if "margin" in f else a for f, a in arrays.items()}}


def base(full: Full) -> dict:
    names = ("config.json", "generation_config.json", "special_tokens_map.json", "tokenizer.json")
    files = full.text(*(f"base/mha/{name}" for name in (*names, "tokenizer_config.json")))
    rates = full.arrays("lr_schedules.npz")
    return files | full.whole("base/mha/model.safetensors") | {
        "lr_schedules.npz": {name: rate[::N_LEARNING_RATES] for name, rate in rates.items()}
    }  # fmt: skip


def hydra(full: Full, arch: str, trees: tuple[str, ...], n_heads: int) -> dict:
    """Official Hydra heads and their runs; the heads from ``n_heads`` on are left out."""
    left_out = f"(hydra_lm_head|hydra_mlp)\\.[{n_heads}-9].*"
    copies = r"input_embed_fn\.weight|prefix_embeding_layer\.(embed_tokens\.weight|.*inv_freq)"
    heads = f"(?!{left_out}|{copies}).*"
    files = full.whole(f"{arch}/heads/hydra_lm_head.safetensors", heads)
    config = json.loads((full.folder / arch / "heads" / "config.json").read_text()) | {"hydra_num_heads": n_heads}
    files[f"{arch}/heads/config.json"] = json.dumps(config, indent=2).encode()
    states = ("prefill_hidden_all", "prefill_hidden_last", "prefill_logits_last")
    step = ("step0_tree_candidates", "step0_tree_logits", "step0_tree_hidden")
    tree_arrays = ("hydra_attn_mask", "hydra_position_ids", "retrieve_indices", "max_accepts")
    for tree in trees:
        files |= full.text(f"{arch}/tree_{tree}.json")
        files |= full.whole(f"{arch}/greedy_{tree}.npz", (*IDS, r"tree_tokens_\d"))
        files |= full.whole(f"{arch}/typical_{tree}.npz", IDS)
        files |= full.columns(f"{arch}/trace_{tree}.npz", ("prompt", *states, *step, *tree_arrays))
    if "mc63" in trees:
        files |= full.whole(f"{arch}/eos_mc63.npz", EOS)
    files |= full.columns(f"{arch}/teacher_forced.npz", ("input_ids", "base_hidden", "head_logits"))
    forced = files[f"{arch}/teacher_forced.npz"]
    forced["head_logits"] = forced["head_logits"][:n_heads]
    if n_heads == 4 and (full.folder / arch / "teacher_forced_padded.npz").exists():
        padded = "attention_mask", "input_ids", "base_hidden", "head_logits_heads_0_and_3"
        files |= full.columns(f"{arch}/teacher_forced_padded.npz", padded)
    logs = json.loads((full.folder / arch / "loss_logs.json").read_text())
    kept = {name: value for name, value in logs.items() if re.match(f"hydra[0-{n_heads - 1}]_", name)}
    files[f"{arch}/loss_logs.json"] = json.dumps(kept, indent=1).encode()
    files |= full.whole(f"{arch}/losses.npz", ("input_ids", "labels"))
    return files | full.gradients(f"{arch}/teacher_loss_grads.safetensors", heads)


def eagle(full: Full, arch: str, dynamic: tuple[str, ...], static: tuple[str, ...], states: tuple[str, ...]) -> dict:
    folder = f"eagle/{arch}"
    files = full.text(f"{folder}/draft/config.json")
    files |= full.whole(f"{folder}/draft/model.safetensors", r"(?!embed_tokens).*")
    for name in (*dynamic, *(f"static_{tree}" for tree in static)):
        files |= full.trees(f"{folder}/greedy_{name}.npz")
    for tree in static:
        files |= full.columns(f"{folder}/trace_static_{tree}.npz", ("choices_sorted", "verify_tree_attn_mask"))
    files |= full.whole(f"{folder}/eos_t32.npz", EOS) | full.whole(f"{folder}/losses.npz")
    files |= full.columns(f"{folder}/teacher_forced.npz", ("input_ids", *states))
    return files | full.gradients(f"{folder}/loss_grads.safetensors")


def parallel(full: Full, drafts: tuple[str, ...], trees: dict[str, tuple[str, ...]]) -> dict:
    """Drafts of one pass on their base: chains and losses of ``drafts``, runs of other drafts' ``trees``."""
    files = full.text("parallel/base_a/config.json") | full.whole("parallel/base_a/model.safetensors")
    steps = (*IDS, r"(tree_(tokens|parents|depths)|margin|verify_ids)_\d", "confidence_threshold", "proposal_lengths")
    for draft in drafts:
        folder = f"parallel/{draft}"
        files |= full.text(f"{folder}/draft/config.json")
        files |= full.whole(f"{folder}/draft/model.safetensors", r"(?!embed_tokens|lm_head).*")
        files |= full.whole(f"{folder}/greedy.npz", steps) | full.whole(f"{folder}/eos.npz", EOS)
        files |= full.whole(f"{folder}/losses.npz", r"(all|masked)_(?!draft_hidden|confidence$).*")
        wanted = "input_ids", "anchors", "keep", "eval_mask", "target_features", "draft_hidden", r"draft_logits.*"
        files |= full.columns(f"{folder}/teacher_forced.npz", (*wanted, "confidence"))
        files |= full.gradients(f"{folder}/loss_grads.safetensors")
    files |= full.whole("parallel/dspark_a/greedy_conf.npz", steps)
    files |= full.whole("parallel/dspark_a/markov_variants.npz")
    for name, runs in trees.items():
        for run in runs:
            files |= full.whole(f"parallel/{name}/{run}.npz", steps if run.startswith("greedy") else ".*")
    return files


def main(folder: str) -> None:
    full = Full(Path(folder))
    passes = ("hidden_layer_[012]", "draft_logits", "ttt_hidden", "ttt_logits")
    archives = {
        "base": base(full),
        "hydra_mlp": hydra(full, "hydra_mlp", ("small",), 3),
        "hydra_pp": hydra(full, "hydra_pp", ("mc63", "small"), 4),
        "eagle1": eagle(
            full, "eagle1_mha", ("t8",), ("mc63", "small"), ("base_hidden_postnorm", "draft_hidden", "draft_logits")
        ),
        "parallel": parallel(
            full, ("dflash_a", "dspark_a"), {"ddtree_a": ("greedy_b8", "tree_unit"), "jetspec_a": ("tree_unit",)}
        ),
        "eagle3": eagle(full, "eagle3_mha", ("t8",), (), passes),
    }
    for name, files in archives.items():
        archive = HERE / f"{name}.npz.xz"
        pack(archive, files)
        print(f"{archive.name}: {len(files)} files, {archive.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
