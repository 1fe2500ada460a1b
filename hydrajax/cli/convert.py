"""``hydrajax convert``: export, fetch and push draft heads, merge adapters, measure types of fewer bits."""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from hydrajax import plugins
from hydrajax.bench.device_memory import nbytes
from hydrajax.bench.quantization import LogitEffect, logit_effect
from hydrajax.cli import options
from hydrajax.cli.prompt_files import PROMPT_FORMATS
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_ref import DraftRef
from hydrajax.formats.draft_registry import title_of
from hydrajax.formats.export import FORMATS, export_heads
from hydrajax.formats.export_base import export_merged
from hydrajax.formats.fetch import fetch_heads
from hydrajax.formats.fingerprint import fingerprint
from hydrajax.formats.hub import resolve
from hydrajax.formats.huggingface import read_config
from hydrajax.formats.load import RECORD, load_draft, load_own_heads
from hydrajax.formats.tensors import read_json
from hydrajax.formats.upload import push
from hydrajax.models.base_model import BaseModel
from hydrajax.models.kv_vectors import KV_CACHES
from hydrajax.models.weights import WIDENED

KV_CACHE = "kv-cache"
QUANTIZED = tuple(plugins.Group("weights"))
STORED = options.api.DTYPES | {"int8": jnp.int8}  # dtypes of exported heads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, text, add in (
        ("export", "write draft heads in another format, with the same weights", _export_arguments),
        ("merge", "write a base with an adapter added to its weights", _merge_arguments),
        ("fetch", "convert heads from a .pt file on the Hub to safetensors", _fetch_arguments),
        ("push", "upload an exported directory to the Hugging Face Hub", _push_arguments),
        *((name, f"compare the logits of a base and of its {name} version", _compared_arguments) for name in QUANTIZED),
        (KV_CACHE, "compare the logits of a base with each type of its KV cache", _compared_arguments),
    ):
        add(verbs.add_parser(name, help=text, description=text, allow_abbrev=False))


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="DIR|FILE.gguf|NAME", required=True, help="read the base of the heads")
    parser.add_argument("--adapter", metavar="DIR|NAME", help="read the adapter that the heads were trained with")
    parser.add_argument(
        "--draft",
        metavar="DIR|NAME",
        required=True,
        help="read the heads, in any format that loads; mtp: the base's own",
    )
    text = "write this format (default: that of the method's published code)"
    parser.add_argument("--format", choices=FORMATS, help=text)
    _output_argument(parser)
    text = "store this dtype; int8 is one byte per number of a matrix, in the format native (default: the heads' own)"
    parser.add_argument("--dtype", choices=list(STORED), help=text)
    parser.add_argument(
        "--heads", metavar="N", type=options.positive, help="keep the first N heads of Medusa or Hydra (default: all)"
    )
    parser.add_argument("--base-name", metavar="NAME", help="record this name of the base (default: the recorded one)")
    for name, text in (("data", "training data"), ("recipe", "training recipe"), ("tau", "tokens per step")):
        parser.add_argument(f"--{name}", metavar="TEXT", help=f"describe the {text} in the model card")
    parser.add_argument("--force", action="store_true", help="export heads even if they record another base")


def _merge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="DIR|FILE.gguf|NAME", required=True, help="read the base of the adapter")
    parser.add_argument("--adapter", metavar="DIR|NAME", required=True, help="read this LoRA adapter (PEFT's format)")
    _output_argument(parser)
    parser.add_argument("--dtype", choices=list(options.api.DTYPES), help="store this dtype (default: the base's own)")


def _fetch_arguments(parser: argparse.ArgumentParser) -> None:
    text = "Hydra or Medusa heads on the Hub, written by the official code"
    parser.add_argument("heads", metavar="ORG/NAME[@REVISION]", help=text)
    _output_argument(parser)


def _output_argument(parser: argparse.ArgumentParser) -> None:
    text = "write to this directory: a new one, or an earlier export"
    parser.add_argument("--output", metavar="DIR", required=True, help=text)


def _push_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="upload this export or training output")
    parser.add_argument("repository", metavar="ORG/NAME", help="upload to this repository, created if needed")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--message", metavar="TEXT", help="set the commit message")


def _compared_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="DIR|FILE.gguf|NAME", required=True, help="compare versions of this model")
    text = f"compare on the prompts of FILE: {PROMPT_FORMATS} (default: 4 built-in prompts)"
    options.add(parser, "--prompts", help=text)
    options.add(parser, "--limit", default=16)
    options.add(parser, "--dtype")
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE")


def run(args: argparse.Namespace) -> None:
    if args.verb == "push":
        print(push(args.directory, args.repository, private=args.private, message=args.message))
        return
    verbs = {"export": _export, "merge": _merge, "fetch": _fetch, KV_CACHE: _kv_caches}
    verbs.get(args.verb, _quantized)(args)


def _check_output(output: str, inputs: Mapping[str, str | Path]) -> None:
    """Raise `HydrajaxError` if the output directory is one of the inputs."""
    for what, directory in inputs.items():
        if Path(output).resolve() == Path(directory).resolve():
            raise HydrajaxError(f"--output: got '{output}', the directory of the {what}; choose another one")


def _export(args: argparse.Namespace) -> None:
    base = resolve(args.base, "base")
    config = read_config(base)
    own = DraftRef.parse(args.draft).is_own
    draft = base if own else resolve(args.draft, "draft", config)
    _check_output(args.output, {"heads": draft, "base": base})
    adapter = None if args.adapter is None else resolve(args.adapter, "adapter")
    made_for = {} if args.force or own else {"base_directory": base, "adapter": adapter}
    drafter, params = (load_own_heads if own else load_draft)(draft, config, None, **made_for)
    if args.heads is not None:
        if not hasattr(drafter, "first_heads") or args.heads > drafter.num_draft_heads:
            found = getattr(drafter, "num_draft_heads", "no")
            raise HydrajaxError(f"--heads: got {args.heads}, but {title_of(drafter)} has {found} heads to choose from")
        drafter, params = drafter.first_heads(params, args.heads)
    source = read_json(draft / "config.json", "--draft")
    record = source.get(RECORD) if isinstance(source.get(RECORD), dict) else {}
    story = record.get("story") if isinstance(record.get("story"), dict) else {}
    given = {"data": args.data, "recipe": args.recipe, "tokens_per_step": args.tau}
    name = args.base_name or source.get("base_model_name_or_path")
    export_heads(
        args.output,
        drafter,
        params,
        format=args.format,
        base_name=name if isinstance(name, str) and name else args.base,
        base_fingerprint=fingerprint(base, adapter=adapter),
        story=story | {key: value for key, value in given.items() if value is not None},
        dtype=None if args.dtype is None else STORED[args.dtype],
        torch_file=True,
    )
    _print_files(args.output)


def _merge(args: argparse.Namespace) -> None:
    base, adapter = resolve(args.base, "base"), resolve(args.adapter, "adapter")
    _check_output(args.output, {"adapter": adapter, "base": base})
    export_merged(args.output, base, adapter, dtype=None if args.dtype is None else options.api.DTYPES[args.dtype])
    _print_files(args.output)


def _fetch(args: argparse.Namespace) -> None:
    _check_output(args.output, {"heads": args.heads})
    fetch_heads(args.heads, args.output)
    _print_files(args.output)


def _print_files(directory: str) -> None:
    print(f"{directory}: {', '.join(sorted(path.name for path in Path(directory).iterdir()))}")


def _quantized(args: argparse.Namespace) -> None:
    with options.json_report(args.json, indent=1) as write:
        plain = options.api.load(args.base, dtype=args.dtype, quantize=WIDENED)
        ids = options.prompts_from(args.prompts, plain, args.limit)
        quantized = options.api.load(args.base, dtype=args.dtype, quantize=args.verb)
        effect = logit_effect((plain.model, plain.params.base), (quantized.model, quantized.params.base), ids)
        sizes = [nbytes(m.params.base) for m in (plain, quantized)]
        dtype = plain.model.dtype.name
        print(f"{args.base}: {sizes[0] / 1e6:.1f} MB in {dtype}, {sizes[1] / 1e6:.1f} MB with {args.verb} weights")
        print(_described(effect, len(ids)))
        report = {"base": str(args.base), "dtype": dtype, "bytes": sizes[0], f"bytes_{args.verb}": sizes[1]}
        write(report | dataclasses.asdict(effect))


def _kv_caches(args: argparse.Namespace) -> None:
    with options.json_report(args.json, indent=1) as write:
        plain = options.api.load(args.base, dtype=args.dtype, quantize=WIDENED)
        ids = options.prompts_from(args.prompts, plain, args.limit)
        dtype, params = plain.model.dtype.name, plain.params.base
        report = {"base": str(args.base), "dtype": dtype, "bytes_per_token": _token_bytes(plain.model)}
        print(f"{args.base}: {report['bytes_per_token']:,} bytes of KV cache per token in {dtype}")
        for name in KV_CACHES:
            model = plain.model.clone(kv_cache=name)
            effect = logit_effect((plain.model, params), (model, params), ids)
            report[name] = {"bytes_per_token": _token_bytes(model)} | dataclasses.asdict(effect)
            print(f"{name}: {_token_bytes(model):,} bytes per token; {_described(effect, len(ids))}")
        write(report)


def _token_bytes(model: BaseModel) -> int:
    slots = 64  # a whole number of every backend's blocks
    return nbytes(jax.eval_shape(lambda: model.init_cache(1, slots)).layers) // slots


def _described(effect: LogitEffect, prompts: int) -> str:
    return (
        f"logits at {effect.positions} positions of {prompts} prompts: mean difference {effect.mean:.3g}, "
        f"largest {effect.largest:.3g}, KL {effect.kl:.3g} nats, same most likely token at {effect.agreement:.1%}, "
        f"perplexity {effect.perplexity_before:.4g} -> {effect.perplexity_after:.4g}"
    )
