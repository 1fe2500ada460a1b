"""Arguments that several commands share, and what they mean to the library."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from rich.console import Console

from hydrajax import api, assets
from hydrajax.decoding.keywords import RULES, with_keywords
from hydrajax.decoding.processors import PROCESSORS
from hydrajax.decoding.spec import DecodeSpec
from hydrajax.errors import HydrajaxError, one_line
from hydrajax.files import WholeFile
from hydrajax.formats.draft_registry import WITHOUT_WEIGHTS
from hydrajax.generation import SEED_BITS
from hydrajax.language_model import LanguageModel
from hydrajax.models.weights import QUANTIZED
from hydrajax.sharding import Placement, last_devices
from hydrajax.text.prompt import Prompt, read_prompts
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree

# For bases with a tokenizer when no --prompts are given.
BUILT_IN_PROMPTS = (
    "def quicksort(items):\n",
    "class Stack:\n    def __init__(self):\n",
    "The three laws of motion say that",
    "Write a short letter to a friend about a walk by the sea.\n",
)


def add_model_arguments(
    parser: argparse.ArgumentParser,
    *,
    base: bool = True,
    base_required: bool = True,
    tree: bool = True,
    several: bool = False,
    apart: bool = False,
) -> None:
    """``--base, --adapter, --draft, --tree, --dtype, --quantize, --force``: see `load_from` and `tree_from`.

    base: False for a command that is told its base otherwise, and then its dtype too. tree: False for a command that
    has no tree to be told. several: drafts and trees become lists. apart: also ``--draft-devices``.
    """
    names = ", ".join(f"{name} ({kind.about})" for name, kind in WITHOUT_WEIGHTS.items())
    shipped = ", ".join(assets.SHIPPED_DRAFTS)
    drafts = "a directory of heads, or of a smaller model with the same tokenizer; or a name: "
    drafts += f"{names}; {shipped} (of the shipped base); or lookup+DIR, lookup-L+NAME and so on: heads or a model "
    drafts += "whose trees get a branch of L more nodes (default 5) for what lookup finds"
    trees, listed = "", {}
    if several:
        drafts += "; may be given several times, the base alone always runs too"
        trees = "; if given several times, every draft is run with each"
        listed = {"action": "append", "default": []}
    group = parser.add_argument_group("model")
    if base:
        group.add_argument(
            "--base",
            metavar="DIR|NAME",
            required=base_required,
            help="LLaMA-family model in Hugging Face layout; org/name or org/name@revision is fetched from the Hub; "
            "shipped is the small model that comes with the package",
        )
        add_adapter_arguments(group)
    group.add_argument("--draft", metavar="DIR|NAME", help=drafts, **listed)
    if not several:
        group.add_argument(
            "--draft-confidence",
            metavar="P",
            type=float,
            help="of a draft model: draft no further below tokens that it gives a probability under P (default 0)",
        )
    if apart:
        group.add_argument(
            "--draft-devices",
            metavar="N",
            type=positive,
            help="put a draft model on the last N devices; there it drafts ahead while the base verifies on the first",
        )
    if tree:
        group.add_argument(
            "--tree",
            metavar="NAME|FILE.json|JSON",
            help=f"candidate tree: {', '.join(presets.names())}, or the choices, such as '[[0],[0,0],[1]]', here or in "
            "a file (default: the one that 'hydrajax tree search --save' left with the heads; else generate takes the "
            "fastest on this device, the other commands mc_sim_7b_63, or a chain if the heads are fewer)"
            f"{trees}",
            **listed,
        )
    if base:
        add_dtype_argument(group)
        group.add_argument(
            "--quantize",
            choices=QUANTIZED,
            help="base weights of fewer bits (hydrajax convert int8 measures the effect)",
        )
    group.add_argument("--force", action="store_true", help="load heads that say they were made for another base")


def add_adapter_arguments(parser: argparse._ActionsContainer) -> None:
    """``--adapter, --merge-adapter`` of a base that is loaded, see `hydrajax.api.load`."""
    parser.add_argument("--adapter", metavar="DIR|NAME", help="a LoRA of the base in PEFT's format")
    parser.add_argument(
        "--merge-adapter",
        action="store_true",
        help="add it to the base's weights (default: keep it beside them, which costs a little in every step)",
    )


def add_dtype_argument(parser: argparse._ActionsContainer) -> None:
    """``--dtype`` of a base that is loaded, see `hydrajax.api.load`."""
    parser.add_argument(
        "--dtype",
        choices=[api.AUTO, *api.DTYPES],
        default=api.AUTO,
        help="of parameters and computation (default auto: float32 on a CPU, elsewhere the checkpoint's own, with "
        "bfloat16 for float16)",
    )


def add_decoding_arguments(parser: argparse.ArgumentParser, *, max_new_tokens: int = 256) -> argparse._ArgumentGroup:
    """``--max-new-tokens, --batch-size, --seed``. Returns the group, for a command's own decoding flags."""
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--max-new-tokens", metavar="N", type=most_tokens, default=max_new_tokens, help="default %(default)s"
    )
    group.add_argument("--batch-size", metavar="B", type=positive, default=1, help="default %(default)s")
    group.add_argument("--seed", metavar="S", type=seed, default=0, help="default %(default)s")
    return group


LARGEST = 2**31 - 1  # of what is counted: numbers of tokens, rows and nodes are int32
RULE_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "epsilon", "alpha")
PROCESSOR_NUMBERS = tuple(each for cls in PROCESSORS for each in dataclasses.fields(cls))


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """``--rule`` and the numbers of rules and logits processors: see `spec_from`."""
    group = parser.add_argument_group("acceptance")
    group.add_argument("--rule", choices=list(RULES), default="greedy", help="default %(default)s")
    group.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        help="of exact and rejection sampling (1.0, 0 is greedy), typical (0.7)",
    )
    group.add_argument("--top-k", metavar="K", type=positive, help="keep the K most likely tokens")
    group.add_argument("--top-p", metavar="P", type=float, help="keep the most likely tokens that hold share P")
    group.add_argument("--min-p", metavar="P", type=float, help="keep tokens at least P times as likely as the first")
    group.add_argument("--epsilon", metavar="E", type=float, help="posterior threshold of typical acceptance (0.1)")
    group.add_argument("--alpha", metavar="A", type=float, help="its entropy factor (square root of E)")
    group = parser.add_argument_group("logits processors, with any rule")
    for number in PROCESSOR_NUMBERS:
        about = dict(number.metadata)
        parse = about.pop("parse", float)
        group.add_argument(f"--{number.name.replace('_', '-')}", type=_argument(parse), **about)


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type; a ValueError's own text, if it says what is expected, is the message."""
    if parse is float:
        return float

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}, found '{one_line(text, 40)}'") from None

    return parsed


def spec_from(args: argparse.Namespace, **changes: Any) -> DecodeSpec:
    """Return the spec that the arguments ask for, of no model yet; ``changes`` are to its fields.

    Raises `HydrajaxError` for a number that is out of range or that the rule does not have.
    """
    spec = (
        DecodeSpec(max_new_tokens=args.max_new_tokens, **changes) if "max_new_tokens" in args else DecodeSpec(**changes)
    )
    names = (*RULE_NUMBERS, *(number.name for number in PROCESSOR_NUMBERS))
    return with_keywords(spec, args.rule, **{name: getattr(args, name) for name in names})


def positive(text: str) -> int:
    """An argparse type: an integer from 1 up, as far as arrays count."""
    value = _integer(text, 1, None)
    if value > LARGEST:
        raise argparse.ArgumentTypeError(f"must be at most {LARGEST}, found '{one_line(text, 20)}'")
    return value


def most_tokens(text: str) -> int:
    """An argparse type: an integer from 1 up, of which no text can have as many as arrays count."""
    return min(_integer(text, 1, None), LARGEST)


def positives(text: str) -> list[int]:
    """An argparse type: integers from 1 up, with commas between them."""
    return [positive(part) for part in text.split(",")]


def seed(text: str) -> int:
    """An argparse type: a seed for `jax.random.key`."""
    return _integer(text, 0, 2**SEED_BITS - 1)


def alternatives(text: str) -> int:
    """An argparse type: of how many of the likeliest tokens to keep log-probabilities, as many as OpenAI's interface
    can ask for.
    """
    return _integer(text, 0, 20)


def _integer(text: str, least: int, most: int | None) -> int:
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < least or (most is not None and value > most):
        allowed = f"from {least} up" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"must be an integer {allowed}, found '{text}'")
    return value


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """``--json [FILE]``: see `json_report`."""
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="write JSON to FILE, or to standard output without FILE"
    )


@contextmanager
def json_report(path: str | None, indent: int | None = None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that writes a report to the file of ``--json``; ``-`` is standard output, None is nowhere.

    A file that cannot be written is refused at the beginning, before anything is measured.
    """
    if path is None:
        yield lambda report: None
    elif path == "-":
        yield lambda report: print(json.dumps(report, indent=indent))
    else:
        with WholeFile(path, "--json") as file:
            yield lambda report: file.write_text(json.dumps(report, indent=indent) + "\n")


def recorded(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments as reports keep them: whatever JSON can hold."""
    return {key: value for key, value in vars(args).items() if isinstance(value, (str, int, float, list, type(None)))}


def prompts_from(path: str | None, model: LanguageModel, limit: int | None = None) -> list[np.ndarray]:
    """Token ids of the prompts of a file, or of the built-in ones; of the first ``limit`` of them.

    Raises `HydrajaxError` for a bad prompt, and where there is no file and the base has no tokenizer.
    """
    if path:
        texts = read_prompts(path)
    elif model.tokenizer is None:
        raise HydrajaxError("--prompts: is needed, as the base has no tokenizer for the built-in ones")
    else:
        texts = [Prompt(text, f"built-in prompt {row}") for row, text in enumerate(BUILT_IN_PROMPTS)]
    return list(model.ids_of_prompts(texts[:limit]))


def draft_of(args: argparse.Namespace) -> str | None:
    """The draft's directory or name, None for autoregressive decoding."""
    return None if args.draft == api.NO_DRAFT else args.draft


def tree_from(args: argparse.Namespace) -> CandidateTree | None:
    """Return the tree asked for, None to take `LanguageModel.default_tree`.

    It needs no model, so a mistake shows before one is loaded. Raises `HydrajaxError` for an unknown or bad tree, and
    for any but the root alone without a draft.
    """
    if args.tree is None:
        return None
    tree = presets.by_name(args.tree)
    if draft_of(args) is None and tree.depth > 0:
        raise HydrajaxError(f"--tree: found '{args.tree}', but without --draft only 'root' is allowed")
    return tree


def load_from(
    args: argparse.Namespace, on_status: Callable[[str], None] | None = None, **changes: Any
) -> LanguageModel:
    """Load the base and the draft that the arguments name; ``changes`` are another base, draft or dtype.

    on_status: is told how far loading is; by default a line on a terminal's stderr is.
    Where ``args.dtype`` is auto it becomes the one that was chosen, which is what commands print and reports record.
    """
    with Console(stderr=True).status("loading") if on_status is None else nullcontext() as line:
        say = on_status or line.update
        model = api.load(
            changes.get("base", args.base),
            changes.get("draft", draft_of(args)),
            dtype=changes.get("dtype", args.dtype),
            placement=placement_from(args),
            quantize=args.quantize,
            adapter=args.adapter,
            merge=args.merge_adapter,
            force=args.force,
            draft_confidence=getattr(args, "draft_confidence", None),
            on_progress=lambda done, total: say(f"loading {done / total:.0%}"),
        )
    if args.dtype == api.AUTO:
        args.dtype = model.model.dtype.name
    return model


def placement_from(args: argparse.Namespace) -> Placement:
    """Return where base and draft are to lie: apart with ``--draft-devices``."""
    devices = getattr(args, "draft_devices", None)
    return Placement(draft=None if devices is None else last_devices(devices))
