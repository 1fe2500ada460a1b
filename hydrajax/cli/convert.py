"""``hydrajax convert``: heads into other formats, from the Hub and onto it, adapters into bases, int8 against float."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

from hydrajax.cli import options
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.formats.export import FORMATS, export_heads
from hydrajax.formats.fetch import fetch_heads
from hydrajax.formats.fingerprint import fingerprint
from hydrajax.formats.hub import push, resolve
from hydrajax.formats.huggingface import export_merged, read_config
from hydrajax.formats.load import RECORD, load_draft
from hydrajax.formats.tensors import read_json
from hydrajax.models.weights import QUANTIZED
from hydrajax.text.prompt import PROMPT_FORMATS

HELP = "write draft heads in other formats, merge an adapter, fetch from and put on the Hub, see what int8 costs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, text, add in (
        ("export", "write draft heads in another format, bit for bit", _export_arguments),
        ("merge", "write a base with an adapter added to its weights", _merge_arguments),
        ("fetch", "keep a safetensors copy of heads that lie on the Hub in a .pt file", _fetch_arguments),
        ("push", "upload an exported directory to the Hugging Face Hub", _push_arguments),
        *(
            (name, f"compare a base's logits with those of its {name} version", _quantized_arguments)
            for name in QUANTIZED
        ),
    ):
        add(verbs.add_parser(name, help=text, description=text, allow_abbrev=False))


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="DIR|NAME", required=True, help="the base that the heads were made for")
    parser.add_argument(
        "--adapter", metavar="DIR|NAME", help="of the base, where the heads were made for both together"
    )
    parser.add_argument("--draft", metavar="DIR|NAME", required=True, help="the heads, in any format that loads")
    text = "default: that of the code which the heads were published with"
    parser.add_argument("--format", choices=FORMATS, help=text)
    parser.add_argument("--output", metavar="DIR", required=True, help="a new directory, or an earlier export")
    parser.add_argument("--dtype", choices=list(options.api.DTYPES), help="of the file (default: that of the heads)")
    parser.add_argument("--base-name", metavar="NAME", help="what the base is called (default: as the heads say)")
    for name, text in (("data", "what the heads learnt from"), ("recipe", "how"), ("tau", "their tokens_per_step")):
        parser.add_argument(f"--{name}", metavar="TEXT", help=f"for the model card: {text}")
    parser.add_argument("--force", action="store_true", help="also heads that say they were made for another base")


def _merge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="DIR|NAME", required=True, help="the model that the adapter was made for")
    parser.add_argument("--adapter", metavar="DIR|NAME", required=True, help="a LoRA in PEFT's format")
    parser.add_argument("--output", metavar="DIR", required=True, help="a new directory, or an earlier export")
    parser.add_argument("--dtype", choices=list(options.api.DTYPES), help="of the file (default: that of the base)")


def _fetch_arguments(parser: argparse.ArgumentParser) -> None:
    text = "Hydra or Medusa heads on the Hub, as the official code wrote them"
    parser.add_argument("heads", metavar="ORG/NAME[@REVISION]", help=text)
    parser.add_argument("--output", metavar="DIR", required=True, help="a new directory, or an earlier export")


def _push_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a directory written by convert export or by training")
    parser.add_argument("repository", metavar="ORG/NAME", help="created if it is not there")
    parser.add_argument("--private", action="store_true", help="create it as a private one")
    parser.add_argument("--message", metavar="TEXT", help="of the commit")


def _quantized_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="DIR|NAME", required=True, help="the model to quantise")
    parser.add_argument("--prompts", metavar="FILE", help=f"to compare on (default: a few built in): {PROMPT_FORMATS}")
    parser.add_argument("--limit", metavar="N", type=options.positive, default=16, help="prompts (default %(default)s)")
    options.add_dtype_argument(parser)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")


def run(args: argparse.Namespace) -> None:
    verbs = {"export": _export, "merge": _merge, "fetch": _fetch, "push": _push} | dict.fromkeys(QUANTIZED, _quantized)
    verbs[args.verb](args)


def _refuse_own(output: str, directories: Mapping[str, str | Path]) -> None:
    """Refuse to write over what is read, the directories by what they hold."""
    for what, directory in directories.items():
        if Path(output).resolve() == Path(directory).resolve():
            raise HydrajaxError(f"--output: is the directory of the {what}, {output}")


def _export(args: argparse.Namespace) -> None:
    base, draft = resolve(args.base, "base"), resolve(args.draft, "draft")
    _refuse_own(args.output, {"heads themselves": draft, "base": base})
    adapter = None if args.adapter is None else resolve(args.adapter, "adapter")
    made_for = {} if args.force else {"base_directory": base, "adapter": adapter}
    drafter, params = load_draft(draft, read_config(base), None, **made_for)
    source = read_json(draft / "config.json", "--draft")
    record = source.get(RECORD) if isinstance(source.get(RECORD), dict) else {}
    story = record.get("story") if isinstance(record.get("story"), dict) else {}
    said = {"data": args.data, "recipe": args.recipe, "tokens_per_step": args.tau}
    name = args.base_name or source.get("base_model_name_or_path")
    export_heads(
        args.output,
        drafter,
        params,
        format=args.format,
        base_name=name if isinstance(name, str) and name else args.base,
        base_fingerprint=fingerprint(base, adapter=adapter),
        story=story | {key: value for key, value in said.items() if value is not None},
        dtype=None if args.dtype is None else options.api.DTYPES[args.dtype],
        torch_file=True,
    )
    _print_files(args.output)


def _merge(args: argparse.Namespace) -> None:
    base, adapter = resolve(args.base, "base"), resolve(args.adapter, "adapter")
    _refuse_own(args.output, {"adapter": adapter, "base": base})
    export_merged(args.output, base, adapter, dtype=None if args.dtype is None else options.api.DTYPES[args.dtype])
    _print_files(args.output)


def _fetch(args: argparse.Namespace) -> None:
    _refuse_own(args.output, {"heads themselves": args.heads})
    fetch_heads(args.heads, args.output)
    _print_files(args.output)


def _print_files(directory: str) -> None:
    print(f"{directory}: {', '.join(sorted(path.name for path in Path(directory).iterdir()))}")


def _push(args: argparse.Namespace) -> None:
    print(push(args.directory, args.repository, private=args.private, message=args.message))


def _quantized(args: argparse.Namespace) -> None:
    with WholeFile(args.json, "--json") if args.json else nullcontext() as file:
        report = _quantized_report(args)
        if file:
            file.write_text(json.dumps(report, indent=1) + "\n")


def _quantized_report(args: argparse.Namespace) -> dict:
    import jax

    from hydrajax.measure.quantization import logit_effect

    plain = options.api.load(args.base, dtype=args.dtype)
    ids = options.prompts_from(args.prompts, plain, args.limit)
    quantized = options.api.load(args.base, dtype=args.dtype, quantize=args.verb)
    effect = logit_effect((plain.model, plain.params.base), (quantized.model, quantized.params.base), ids)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(m.params.base)) for m in (plain, quantized)]
    dtype = plain.model.dtype.name
    print(f"{args.base}: {sizes[0] / 1e6:.1f} MB in {dtype}, {sizes[1] / 1e6:.1f} MB with {args.verb} weights")
    print(
        f"logits at {effect.positions} positions of {len(ids)} prompts: they differ by {effect.mean:.3g} on average, "
        f"{effect.largest:.3g} at most, KL {effect.kl:.3g} nats, same likeliest token at {effect.agreement:.1%}"
    )
    report = {"base": str(args.base), "dtype": dtype, "bytes": sizes[0], f"bytes_{args.verb}": sizes[1]}
    return report | dataclasses.asdict(effect)
