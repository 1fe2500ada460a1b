"""Let SmolLM2 write both sides of conversations, as training text for its heads that needs no seeds.

    python experiments/real_model_dialogues.py --output runs/smollm2/dialogues.jsonl --tokens 1500000

A chat model that was trained on whole conversations writes a user's message when its prompt ends where that message
begins (Magpie: Xu et al. 2024, arXiv 2406.08464, section 2.1). The questions are as broad as the model's own training,
and every token is its own. User turns are drawn at temperature 0.95; answers are greedy in half of the conversations
and drawn at 0.7 in the others.

With --begin FILE, conversations start with given user messages (``turns``, of which the first one is taken), or with
the beginning of one (``begin``), which the model completes: in another language, or a task such as translation.

All conversations of a batch start with the same tokens and grow together, so that no prompt is read and no row waits.
A batch depends only on its number, so that a repeated command resumes at the last batch of the file.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

import hydrajax
from hydrajax.bench.appended import append as append_lines
from hydrajax.bench.appended import keep_settings, whole_lines
from hydrajax.cli import run_command
from hydrajax.errors import HydrajaxError
from hydrajax.host_memory import keep_freed_memory
from hydrajax.models.cache import KVCache, append
from hydrajax.text.jsonl import read_jsonl
from hydrajax.train.data.packing import digest

USER = 0  # the role that writes; 1 is the assistant
ASKING = 0.95  # temperature of user turns: at 1 one in ten of them is not a question
ANSWERING = (1e-4, 0.7)  # of answers, alternating by row; the first is greedy
BLOCK = 256  # tokens; 49,152 are 192 blocks
# Steps of one program. The cache grows by this between two, as attention reads all of its slots (on a CPU).
CHUNK = 64


class Turns(NamedTuple):
    """Token ids of a chat template between the messages: all lists end where the next role begins to write."""

    opening: list[int]
    after_user: list[int]
    after_assistant: list[int]


class Beginnings(NamedTuple):
    """The given tokens after the opening of each conversation of a batch.

    Attributes:
        tokens: int32 ``[B, S]``, right-padded.
        lengths: int32 ``[B]``.
        role: int32 ``[B]``, whose turn it is afterwards.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    role: np.ndarray

    @classmethod
    def of(cls, found: list[tuple[list[int], int]]) -> "Beginnings":
        tokens = np.zeros((len(found), max(1, *(len(ids) for ids, _ in found))), np.int32)
        for row, (ids, _) in zip(tokens, found, strict=True):
            row[: len(ids)] = ids
        return cls(tokens, np.array([len(ids) for ids, _ in found]), np.array([role for _, role in found]))


class Writing(NamedTuple):
    """Conversations that grow together, one token each in a step.

    Attributes:
        beginnings: The tokens that are given.
        written: How many tokens there are after the opening.
        cache: What the base has read.
        hidden: ``[B, D]`` of the last token.
        role: int32 ``[B]``, whose turn it is.
        forced: int32 ``[B]``, how many of the template's tokens after an ended message are written; -1 within one.
        key: Of the draws.
    """

    beginnings: Beginnings
    written: jax.Array
    cache: KVCache
    hidden: jax.Array
    role: jax.Array
    forced: jax.Array
    key: jax.Array


def turns_of(tokenizer: Any) -> Turns:
    """Split a rendered conversation at its messages."""
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": f"<<{number}>>"} for number, role in enumerate(roles)]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    parts = []
    for number in range(len(roles)):
        before, text = text.split(f"<<{number}>>")
        parts.append(tokenizer(before, add_special_tokens=False)["input_ids"])
    return Turns(*parts)


def draw(key: jax.Array, logits: jax.Array) -> jax.Array:
    """Draw a token of each row: invert the distribution over blocks of tokens, then within a block.

    Noise for every logit (Gumbel) takes a third of a step on a CPU.
    """
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    blocks = jnp.pad(weights, ((0, 0), (0, -logits.shape[-1] % BLOCK))).reshape(len(logits), -1, BLOCK)
    points = jax.random.uniform(key, (2, len(logits)))

    def index(weights, point):
        total = jnp.cumsum(weights, axis=-1)
        return jnp.minimum((total < point[:, None] * total[:, -1:]).sum(-1), weights.shape[-1] - 1)

    block = index(blocks.sum(-1), points[0])
    return block * BLOCK + index(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], points[1])


def make_writer(model, turns: Turns, eos: int, batch: int, chunk: int = CHUNK):
    """Return ``start(params, beginnings, key)`` and ``advance(params, writing)``, which writes tokens ``[chunk, B]``.

    Raises `HydrajaxError` for a template whose messages do not end with EOS.
    """
    widest = max(len(turns.after_user), len(turns.after_assistant)) - 1
    # What follows the end of a message, by the role that ended it; the end itself is the model's.
    following = np.zeros((2, widest), np.int32)
    lengths = np.zeros(2, np.int32)
    for role, ids in enumerate((turns.after_user, turns.after_assistant)):
        if ids[:1] != [eos]:
            raise HydrajaxError("base: the chat template ends no message with EOS, which tells where a turn ends")
        lengths[role] = len(ids) - 1
        following[role, : lengths[role]] = ids[1:]
    following, lengths = jnp.asarray(following), jnp.asarray(lengths)

    def start(params, beginnings, key) -> Writing:
        ids = jnp.tile(jnp.asarray(turns.opening), (batch, 1))
        positions = jnp.broadcast_to(jnp.arange(len(turns.opening)), ids.shape)
        mask = np.tri(len(turns.opening), dtype=bool)
        read = model.apply({"params": params}, ids, positions, mask)
        cache = model.init_cache(batch, len(turns.opening))
        cache = append(cache, read.block, jnp.full(batch, len(turns.opening)))
        forced = jnp.full(batch, -1)
        return Writing(beginnings, jnp.zeros((), jnp.int32), cache, read.hidden[:, -1], beginnings.role, forced, key)

    def advance(params, writing: Writing) -> tuple[Writing, jax.Array]:
        longer = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, chunk), (0, 0))), writing.cache.layers)
        answering = jnp.asarray(ANSWERING)[jnp.arange(batch) % len(ANSWERING)]

        def step(at, carry):
            (given, number, cache, hidden, role, forced, key), written = carry
            key, drawn = jax.random.split(key)
            temperature = jnp.where(role == USER, ASKING, answering)
            logits = model.apply({"params": params}, hidden, method="logits")
            token = draw(drawn, logits / temperature[:, None])
            token = jnp.where(forced >= 0, following[role, jnp.maximum(forced, 0)], token)
            beginning = number < given.lengths
            token = jnp.where(beginning, given.tokens[:, jnp.minimum(number, given.tokens.shape[1] - 1)], token)

            last = forced == lengths[role] - 1
            ended = (forced < 0) & (token == eos) & ~beginning
            forced = jnp.where(ended, 0, jnp.where(last, -1, jnp.where(forced >= 0, forced + 1, -1)))
            role = jnp.where(last, 1 - role, role)

            read = model.apply({"params": params}, token[:, None], cache.lengths[:, None], np.ones((1, 1), bool), cache)
            cache = append(cache, read.block, jnp.ones(batch, jnp.int32), after=read.hidden[:, 0, 0])
            advanced = Writing(given, number + 1, cache, read.hidden[:, 0], role, forced, key)
            return advanced, written.at[at].set(token)

        writing = writing._replace(cache=writing.cache._replace(layers=longer))
        return jax.lax.fori_loop(0, chunk, step, (writing, jnp.zeros((chunk, batch), jnp.int32)))

    return jax.jit(start), jax.jit(advance)


def beginnings_of(path: Path, tokenizer: Any, turns: Turns, longest: int) -> list[tuple[list[int], int]]:
    """Return the tokens after the opening and the next role of each line, of at most ``longest`` tokens."""
    found = []
    for where, line in read_jsonl(path, "begin"):
        turns_of_line = line.get("turns")
        is_whole = isinstance(turns_of_line, list) and bool(turns_of_line)
        text = turns_of_line[0] if is_whole else line.get("begin")
        if not isinstance(text, str) or not text:
            raise HydrajaxError(f"begin: {where}: expected turns, a list of texts, or begin, a text")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] + (turns.after_user if is_whole else [])
        if len(ids) <= longest:
            found.append((ids, int(is_whole)))
    if not found:
        raise HydrajaxError(f"begin: {path} has no text of at most {longest} tokens")
    return found


def records(turns: Turns, rows: np.ndarray, eos: int) -> list[dict]:
    """Return the conversations with an answer, or the beginning of one: a message without end is often noise."""
    return [{"prompt_ids": turns.opening, "output_ids": row.tolist()} for row in rows if eos in row]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, help="JSONL, for data.format: generations")
    parser.add_argument("--tokens", type=int, default=1_500_000, help="to write in all (default %(default)s)")
    parser.add_argument(
        "--length",
        type=int,
        default=448,
        help="tokens of a conversation, a multiple of the chunk (default %(default)s)",
    )
    parser.add_argument(
        "--chunk",
        type=int,
        default=CHUNK,
        help="tokens per program; on a GPU, --length compiles once (default %(default)s)",
    )
    parser.add_argument("--begin", type=Path, help="JSONL, one user message or the beginning of one per line")
    parser.add_argument("--batch-size", type=int, default=64, help="default %(default)s")
    parser.add_argument("--base", default="smollm2", help="default %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")


def run(args: argparse.Namespace) -> None:
    if args.chunk < 1:
        raise HydrajaxError(f"chunk: got {args.chunk}, expected at least 1")
    if args.length < 1 or args.length % args.chunk:
        raise HydrajaxError(f"length: got {args.length}, expected a multiple of {args.chunk}")
    keep_freed_memory()
    loaded = hydrajax.load(args.base, dtype=args.dtype)
    if not getattr(loaded.tokenizer, "chat_template", None):
        raise HydrajaxError("base: got a base without a chat template, expected a chat model")
    turns, eos = turns_of(loaded.tokenizer), loaded.tokenizer.eos_token_id
    start, advance = make_writer(loaded.model, turns, eos, args.batch_size, args.chunk)
    given = [([], USER)]
    if args.begin is not None:
        given = beginnings_of(args.begin, loaded.tokenizer, turns, args.length // 2)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    lines = whole_lines(args.output)
    settings = {name: getattr(args, name) for name in ("base", "length", "batch_size", "dtype", "seed")}
    if args.begin is not None:
        settings["begin"] = digest(np.frombuffer(args.begin.read_bytes(), np.uint8))
    keep_settings(
        args.output.with_name(f"{args.output.name}.settings.json"),
        settings,
        f"{args.output} holds conversations",
        begun=bool(lines),
        otherwise="choose another file, or remove it to start over",
    )
    numbers = [json.loads(line)["batch"] for line in lines]
    done = max(numbers, default=0)  # this one may be incomplete
    if lines:
        os.truncate(args.output, sum(len(line) + 1 for line, at in zip(lines, numbers, strict=True) if at < done))
    batches = -(-args.tokens // (args.batch_size * args.length))
    for number in track(range(done, batches), description="write"):
        seed = args.seed * 1_000_003 + number
        drawn = np.random.default_rng(seed).permutation(len(given))
        chosen = Beginnings.of([given[i] for i in np.resize(drawn, args.batch_size)])
        writing, written = start(loaded.params.base, chosen, jax.random.key(seed)), []
        for _ in range(args.length // args.chunk):
            writing, tokens = advance(loaded.params.base, writing)
            written.append(np.asarray(tokens))
        rows = np.concatenate(written).T
        append_lines(args.output, [{"batch": number} | record for record in records(turns, rows, eos)])


if __name__ == "__main__":
    sys.exit(run_command(Path(__file__).name, __doc__.partition("\n")[0], add_arguments, run, sys.argv[1:]))
