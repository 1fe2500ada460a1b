"""Structured output: forced tokens and drafts under JSON schemas, alone and together.

    python experiments/structured_output.py --base smollm2 --output experiments/results/structured_output_smollm2.json

Every record is described in a prompt and decoded under its schema, greedily, in five ways: one token at a time, with
forced tokens only, with each draft only, and with both. All executors decode the same prompts in turns in one process.
Tokens per second count the time after the prefill, without compilation; a rate is the median over rounds. All outputs
are compared with those of one token at a time.

Further fields of a row:

- ``forbidden``: the share of verified draft nodes that the grammar forbids or that follow such a node;
- ``mask_ms``, ``forced_ms``, ``follow_ms``: the host's milliseconds per step for masks (the base runs meanwhile), for
  forced tokens, and for reading the emitted tokens, in the last round;
- ``forced_accepted``: accepted tokens that the grammar had forced;
- ``tokens``, ``finished``: emitted tokens and complete records; ``rates``: tokens per second of each round.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import common
import jax
import numpy as np
from rich.table import Table

import hydrajax
from hydrajax import assets
from hydrajax.decoding.constraints import WORD, Constraint
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.inputs import settled_inputs
from hydrajax.decoding.prompt_batch import bucket, right_padded
from hydrajax.decoding.request import Request
from hydrajax.errors import HydrajaxError
from hydrajax.grammar.grammar import Grammar
from hydrajax.language_model import LanguageModel
from hydrajax.loaded_model import make_executor

FULL = {"rounds": 5, "count": 8, "new_tokens": 160, "batch_size": 1, "forced_nodes": [4, 8, 16]}
QUICK = {"rounds": 1, "count": 2, "new_tokens": 40, "forced_nodes": [8]}
DRAFTS = ("lookup", "hydra++", "lookup+hydra++")
BASELINE = "one token at a time"


def text(most: int = 24, **more: Any) -> dict:
    return {"type": "string", "maxLength": most, **more}


def whole(low: int, high: int) -> dict:
    return {"type": "integer", "minimum": low, "maximum": high}


def record(**properties: Any) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def listed(item: dict, most: int = 3) -> dict:
    return {"type": "array", "items": item, "minItems": 1, "maxItems": most}


DATE = text(10, pattern="^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9])$")
# A description and its schema.
RECORDS = [
    (
        "Ada Moreau is 36 and works in Lyon as an engineer. Her address is ada@moreau.example.",
        record(name=text(), age=whole(0, 120), city=text(), occupation=text(), email=text(32)),
    ),
    (
        "Order 4711 of 3 May 2024: two lamps at 19.50 each and one chair at 80. It has been shipped.",
        record(
            order_number=whole(1, 99_999),
            order_date=DATE,
            status={"enum": ["pending", "shipped", "delivered", "cancelled"]},
            items=listed(record(product_name=text(16), quantity=whole(1, 99), unit_price=whole(0, 999))),
        ),
    ),
    (
        "The concert of the quartet begins on 12 October 2025 at 19:30 in the town hall. Tickets cost 15 euros.",
        record(
            event_title=text(),
            event_date=DATE,
            starting_time=text(5, pattern="^([01][0-9]|2[0-3]):[0-5][0-9]$"),
            location=text(),
            price={"anyOf": [whole(0, 999), {"type": "null"}]},
            currency={"enum": ["EUR", "USD", "GBP"]},
        ),
    ),
    (
        "The host db-2 at 10.0.3.7 listens on port 5432, with TLS, and keeps backups for 14 days.",
        record(
            host_name=text(16),
            address=text(15, pattern="^[0-9]{1,3}(\\.[0-9]{1,3}){3}$"),
            port=whole(1, 65_535),
            use_tls={"type": "boolean"},
            backup=record(enabled={"type": "boolean"}, retention_days=whole(0, 365)),
        ),
    ),
    (
        "In the second edition of Trees and Drafts, of 312 pages, Ines Okafor writes about compilers and parsers.",
        record(book_title=text(), author_name=text(), edition=whole(1, 20), page_count=whole(1, 5000)),
    ),
    (
        "The parser fails with an index error on an empty file since version 2.1. This is urgent. Labels: bug, parser.",
        record(
            summary=text(40),
            severity={"enum": ["low", "medium", "high", "critical"]},
            affected_version=text(6, pattern="^[0-9]\\.[0-9]{1,2}$"),
            labels=listed(text(10)),
            assignee={"type": "null"},
        ),
    ),
    (
        "Pancakes for four: 250 g of flour, 3 eggs, half a litre of milk. They take 25 minutes.",
        record(
            recipe_name=text(),
            servings=whole(1, 20),
            minutes=whole(1, 600),
            ingredients=listed(record(ingredient_name=text(12), amount=whole(1, 9999), unit={"enum": ["g", "ml", ""]})),
        ),
    ),
    (
        "Flight HX 208 leaves Porto at 8:05 and reaches Oslo at 12:40; gate 14 is open and the flight is on time.",
        record(
            flight_number=text(8),
            departure=record(airport=text(12), local_time=text(5, pattern="^[0-2][0-9]:[0-5][0-9]$")),
            arrival=record(airport=text(12), local_time=text(5, pattern="^[0-2][0-9]:[0-5][0-9]$")),
            gate=whole(1, 99),
            delayed={"type": "boolean"},
        ),
    ),
]


def run(args) -> None:
    if args.prompts:
        raise HydrajaxError("--prompts: got a file, expected none: every prompt belongs to a schema of this script")
    if args.count > len(RECORDS):
        raise HydrajaxError(f"--count: got {args.count}, expected at most {len(RECORDS)}")
    rows = args.parts.rows("all", partial(measured, args))
    print_table(rows)
    remarks = [
        "forced-N: N nodes for tokens that the schema forces, next to the draft's tree",
        f"tokens per second after the prefill, median of {args.rounds} rounds; equal: to {BASELINE}",
    ]
    title = f"Structured output: forced tokens and drafts under JSON schemas, {args.base or 'shipped'}"
    common.write(args, "speed", "", title, rows, remarks)


def measured(args) -> list[dict]:
    """Decode all prompts with all executors in turns; return one row per executor."""
    base = hydrajax.load(args.base or assets.base(), dtype=args.dtype)
    executors = executors_of(base, args)
    grammars = [Grammar.json_schema(schema) for _, schema in RECORDS[: args.count]]
    prompts = list(base.ids_of_prompts([prompt_of(base, description) for description, _ in RECORDS[: args.count]]))
    width = bucket(max(map(len, prompts)), base.config.max_positions)
    runs: dict[str, list[Run]] = {name: [] for name in executors}
    with common.CONSOLE.status("compiling") as line:
        for round_ in range(args.rounds + 1):  # the first compiles
            for name, executor in executors.items():
                line.update(f"round {round_} of {args.rounds}: {name}" if round_ else f"compiling: {name}")
                runs[name].append(decode_all(executor, prompts, grammars, width, args.batch_size, not round_))
    return [row_of(name, executors[name], found, runs[BASELINE], args) for name, found in runs.items()]


def executors_of(base: LanguageModel, args) -> dict[str, Executor]:
    """Return the baseline, forced tokens alone, each draft alone, and each draft with forced tokens."""
    request = Request(max_new_tokens=args.new_tokens, grammar=Grammar.json_object())
    models = {"": base} | {str(draft): base.with_draft(draft) for draft in args.draft or DRAFTS}
    found = {}
    for draft, model in models.items():
        for nodes in (0, *args.forced_nodes):
            tree = model.default_tree(args.batch_size) if draft else "root"
            name = ", ".join(filter(None, [draft, f"forced-{nodes}" if nodes else ""]))
            found[name or BASELINE] = make_executor(
                model, model.program(request, tree=tree, forced_nodes=nodes), request
            )
    return found


def prompt_of(base: LanguageModel, description: str) -> Any:
    """Return a conversation for a base with a chat template, else the beginning of a program."""
    if getattr(base.tokenizer, "chat_template", None):
        return [{"role": "user", "content": f"{description}\nWrite this as a JSON record."}]
    return f"# {description}\nRECORD = "


# --- one round --------------------------------------------------------------------------------------------------------


@dataclass
class Log:
    """The host's work for one sequence.

    Attributes:
        seconds: By method.
        trees: Tokens, parents and masks of every step; None to keep none.
        forced: The length of the text, root included, and the tokens that had to follow, for every step.
    """

    seconds: dict[str, float] = field(default_factory=lambda: {"follow": 0.0, "forced": 0.0, "allow": 0.0})
    trees: list[tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None
    forced: list[tuple[int, list[int]]] = field(default_factory=list)


class Watched:
    """A constraint that logs its work; copies share the log."""

    def __init__(self, inner: Constraint, log: Log):
        self._inner, self.log, self._length = inner, log, 0

    @property
    def error(self) -> str | None:
        return self._inner.error

    def copy(self) -> Watched:
        return Watched(self._inner.copy(), self.log)

    def follow(self, text: Sequence[int]) -> None:
        began = time.perf_counter()
        self._inner.follow(text)
        self.log.seconds["follow"] += time.perf_counter() - began
        self._length = len(text)

    def forced(self, most: int) -> list[int]:
        began = time.perf_counter()
        found = self._inner.forced(most)
        self.log.seconds["forced"] += time.perf_counter() - began
        self.log.forced.append((self._length, found))
        return found

    def allow(self, tokens: np.ndarray, parents: np.ndarray, allowed: np.ndarray) -> None:
        began = time.perf_counter()
        self._inner.allow(tokens, parents, allowed)
        self.log.seconds["allow"] += time.perf_counter() - began
        if self.log.trees is not None:
            self.log.trees.append((tokens.copy(), parents.copy(), allowed.copy()))


@dataclass
class Run:
    """All prompts decoded once.

    Attributes:
        outputs: Token ids of each prompt.
        steps: The sum over sequences.
        host_steps: The sum over batches of the executor's steps.
        seconds: After the prefill.
        logs: One per prompt.
        guesses: Verified draft nodes, if trees are kept.
        forbidden: Those that the grammar forbids, or that follow such a node.
    """

    outputs: list[list[int]] = field(default_factory=list)
    steps: int = 0
    host_steps: int = 0
    seconds: float = 0.0
    logs: list[Log] = field(default_factory=list)
    guesses: int = 0
    forbidden: int = 0


def decode_all(
    executor: Executor,
    prompts: list[np.ndarray],
    grammars: list[Grammar],
    width: int,
    batch_size: int,
    keeps_trees: bool,
) -> Run:
    """Decode all prompts, each under its grammar. Trees are kept in a round that is not timed."""
    found = Run()
    for start in range(0, len(prompts), batch_size):
        rows = [number % len(prompts) for number in range(start, start + batch_size)]  # the last batch is filled
        used = min(batch_size, len(prompts) - start)
        ids, lengths = right_padded([prompts[row] for row in rows], width)
        given = settled_inputs(executor.program, executor.model.config, ids, lengths)
        begun = executor.constraints([executor.request.replace(grammar=grammars[row]) for row in rows]) or ()
        watched = tuple(Watched(one, Log(trees=[] if keeps_trees else None)) for one in begun if one is not None)
        sampling = given.sampling._replace(constraints=watched)
        state = executor.prefill(given.prompt, given.lengths, sampling)
        jax.block_until_ready(executor.output(state))
        began = time.perf_counter()
        state, _ = executor.advance(state, np.arange(batch_size) >= used, executor.program.max_new_tokens)
        output = jax.block_until_ready(executor.output(state))
        found.seconds += time.perf_counter() - began
        tokens, counts, steps = jax.device_get((output.tokens, output.lengths, output.steps))
        found.outputs += [row[:count].tolist() for row, count in zip(tokens[:used], counts, strict=False)]
        found.steps += int(steps[:used].sum())
        found.host_steps += int(steps[:used].max())
        for one in watched[:used]:
            for tree in one.log.trees or ():
                guesses, refused = forbidden(*tree)
                found.guesses, found.forbidden = found.guesses + guesses, found.forbidden + refused
            one.log.trees = None
            found.logs.append(one.log)
    return found


def forbidden(tokens: np.ndarray, parents: np.ndarray, allowed: np.ndarray) -> tuple[int, int]:
    """Return the number of draft nodes of a tree, and of those that are forbidden or follow a forbidden one."""
    reached = np.arange(len(tokens)) == 0
    guesses = (tokens >= 0) & (parents >= 0)
    for node in np.flatnonzero(guesses):
        token, parent = int(tokens[node]), parents[node]
        reached[node] = reached[parent] and allowed[parent, token // WORD] >> np.uint32(token % WORD) & 1
    return int(guesses.sum()), int((guesses & ~reached).sum())


# --- a row ------------------------------------------------------------------------------------------------------------


def row_of(name: str, executor: Executor, runs: list[Run], baseline: list[Run], args) -> dict:
    first, *timed = runs
    last, tokens = timed[-1], sum(map(len, first.outputs))
    rates = [tokens / one.seconds for one in timed]
    before = statistics.median(sum(map(len, one.outputs)) / one.seconds for one in baseline[1:])
    milliseconds = {kind: 1e3 * sum(log.seconds[kind] for log in last.logs) / last.host_steps for kind in Log().seconds}
    return {
        "name": name,
        "batch": args.batch_size,
        "nodes": executor.program.verified_nodes,
        "tokens_per_step": tokens / last.steps,
        "tokens_per_second": statistics.median(rates),
        "low": None,
        "high": None,
        "speedup": statistics.median(rates) / before,
        "equal": all(one.outputs == baseline[0].outputs for one in runs),
        "forced_nodes": executor.program.forced_nodes,
        "forbidden": first.forbidden / first.guesses if first.guesses else None,
        "mask_ms": milliseconds["allow"],
        "forced_ms": milliseconds["forced"],
        "follow_ms": milliseconds["follow"],
        "forced_accepted": sum(map(forced_accepted, last.logs, last.outputs)),
        "tokens": tokens,
        "finished": sum(output[-1:] != [] and output[-1] in executor.program.eos_ids for output in last.outputs),
        "rates": rates,
    }


def forced_accepted(log: Log, output: list[int]) -> int:
    """Return how many tokens were accepted that the grammar had forced: those before the next step's root."""
    if not log.forced:  # no nodes for forced tokens
        return 0
    ends = [length - 1 for length, _ in log.forced[1:]] + [len(output)]
    count = 0
    for (length, tokens), end in zip(log.forced, ends, strict=True):
        same = [one == other for one, other in zip(tokens, output[length:end], strict=False)]
        count += [*same, False].index(False)
    return count


def print_table(rows: Sequence[dict]) -> None:
    table = Table(
        "decoder", "nodes", "τ", "tokens/s", "speed-up", "forbidden", "masks ms", "forced ms", "forced", "same"
    )
    for row in rows:
        share = "" if row["forbidden"] is None else f"{row['forbidden']:.0%}"
        times = (f"{row['mask_ms']:.2f}", f"{row['forced_ms'] + row['follow_ms']:.2f}")
        figures = (f"{row['tokens_per_step']:.2f}", f"{row['tokens_per_second']:.0f}", f"{row['speedup']:.2f}x")
        same = "yes" if row["equal"] else "NO"
        table.add_row(row["name"], str(row["nodes"]), *figures, share, *times, str(row["forced_accepted"]), same)
    common.CONSOLE.print(table)


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK))
