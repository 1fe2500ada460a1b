"""Load test of `hydrajax serve`: throughput and latency over the number of clients, or a soak with broken connections.

    python experiments/serve_load.py --output runs/experiments/serve_load.json
    python experiments/serve_load.py --draft draft-model --draft lookup --rounds 3
    python experiments/serve_load.py --requests 10000 --disconnect 0.1
    python experiments/serve_load.py --clients 1,8 --peer llama.cpp=http://127.0.0.1:8080
    python experiments/serve_load.py --base smollm2 --draft lookup --draft dspark --questions questions.jsonl

The servers are new processes on the loopback address and share the machine with the clients. Every client sends its
next request as soon as the last one is answered; prompts are chunks of held-out source code, or first turns of
questions, which come again if there are fewer than requests. The baselines are a server without a draft and, for one
client, `generate` with one prompt at a time. In every round all of them answer in turns, each for every number of
clients, because the speed of a machine changes within minutes. Each number of clients of a round has prompts of its
own, so that no prefix cache holds them. Every complete answer is compared with that of `generate` without a draft for
its prompt and seed. Trees are those that `generate` without a tree has measured on this device before, else the drafts'
own.

Peers are servers of other programs, started by hand, whose completions take token ids. They answer in the same turns.
Their differing answers are counted, but only those of our servers decide about the exit code.

A token's latency is the time from the first to the last chunk of an answer, divided by the tokens in between. A pause
is the time between two chunks, each of which holds the tokens of one step or more.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
from common import held_out_chunks
from scipy.stats import bootstrap

import hydrajax
from hydrajax.bench.questions.sets import read_questions
from hydrajax.cli import options, run_command
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.errors import HydrajaxError, one_line
from hydrajax.files import WholeFile
from hydrajax.machine import machine
from hydrajax.serve.served_models import tree_for
from hydrajax.trees import presets

PERCENTILES = 50, 95, 99
TEMPERATURE, TOP_P = 0.8, 0.95
SOAK_QUESTIONS, SOAK_CLIENTS = 64, 16
BATCH = 16  # batch size of the expected answers
SAMPLES = 200  # of the server's memory, at most
SETTINGS = "base", "draft", "tree", "slots", "questions", "prompt_tokens", "seed"


class Question(NamedTuple):
    """A request and its expected answer."""

    ids: list[int]
    limit: int
    seed: int | None
    answer: str


@dataclass
class Response:
    """Times of a response and its chunks, tokens of the answer, and its text (None if the connection was broken)."""

    began: float
    chunks: list[float] = field(default_factory=list)
    tokens: int = 0
    text: str | None = None


def main() -> int:
    return run_command(Path(sys.argv[0]).name, __doc__.splitlines()[0], add_arguments, run, sys.argv[1:])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base", metavar="DIR|NAME", default="shipped")
    add("--draft", metavar="DIR|NAME", action="append", help="of a server, repeatable (default hydra++)")
    add("--tree", metavar="NAME", help="tree (default: the one searched for the draft)")
    add("--peer", metavar="NAME=URL", type=named_address, action="append", default=[], help="a peer, repeatable")
    add("--clients", type=options.positives, metavar="N,N,...", help="default 1,2,4,8,16,32; soak 16")
    add("--requests", type=options.positive, metavar="N", help="per number of clients (default 64)")
    add("--rounds", type=options.positive, default=1, metavar="N", help="turns of each server (default 1)")
    add("--disconnect", type=float, default=0.0, metavar="P", help="soak: share of broken connections")
    add("--questions", metavar="FILE.jsonl", help="ask the first turns of these (default: held-out source code)")
    add("--prompt-tokens", type=options.positive, default=64, metavar="N")
    add("--new-tokens", type=options.positive, default=64, metavar="N")
    add("--slots", type=options.positive, default=8, metavar="B", help="of the server (default 8)")
    add("--seed", type=int, default=0)
    add("--output", type=Path, metavar="FILE.json", help="result (default: print only)")


def named_address(text: str) -> tuple[str, str]:
    name, _, address = text.partition("=")
    if not name or not address.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected NAME=http://HOST:PORT")
    return name, address.rstrip("/")


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.disconnect < 1:
        raise HydrajaxError(f"disconnect: got {args.disconnect}, expected at least 0 and below 1")
    soaks = args.disconnect > 0
    args.draft, args.requests = args.draft or ["hydra++"], args.requests or 64
    args.peer = dict(args.peer)
    if taken := {*args.peer} & {*args.draft, "none"}:
        raise HydrajaxError(f"--peer: got {min(taken)}, the name of a server of ours")
    args.clients = args.clients or ([SOAK_CLIENTS] if soaks else [1, 2, 4, 8, 16, 32])
    if args.output is None:
        return 0 if (soak if soaks else load)(args)["right"] else 1
    with WholeFile(args.output, "--output") as file:
        found = (soak if soaks else load)(args)
        settings = {name: getattr(args, name) for name in SETTINGS}
        file.write_json({"machine": machine(), "settings": settings} | found)
    return 0 if found["right"] else 1


# --- expected answers -------------------------------------------------------------------------------------------------


def questions_for(args, loaded, count: int, *, mixed: bool) -> list[Question]:
    """Return greedy requests of one length, or requests of mixed lengths of which every other one is sampled."""
    random, most = np.random.default_rng(args.seed), args.new_tokens
    prompts = prompts_for(args, loaded, count)
    limits, seeds = [most] * count, [None] * count
    if mixed:
        prompts = [ids[: random.integers(1, len(ids) + 1)] for ids in prompts]
        limits = random.integers(1, most + 1, count).tolist()
        seeds = [at if at % 2 else None for at in range(count)]
    found = [""] * count
    for rule in (Greedy(), ExactSampling(TEMPERATURE, top_p=TOP_P)):
        some = [at for at in range(count) if (seeds[at] is None) == isinstance(rule, Greedy)]
        settings = {"tree": presets.root(), "rule": rule, "batch_size": BATCH}
        if not isinstance(rule, Greedy):
            settings["seed"] = [seeds[at] for at in some]
        texts, ends = [prompts[at] for at in some], [limits[at] for at in some]
        for at, result in zip(some, loaded.generate(texts, max_new_tokens=ends, **settings), strict=True):
            found[at] = result.text
    return [Question(ids.tolist(), *rest) for ids, *rest in zip(prompts, limits, seeds, found, strict=True)]


def prompts_for(args, loaded, count: int) -> list[np.ndarray]:
    """Return chunks of held-out source code, or first turns of the questions."""
    if args.questions is None:
        return held_out_chunks(loaded.tokenizer, count, args.prompt_tokens)
    turns = (question.turns[0] for question in itertools.cycle(read_questions(args.questions)))
    messages = [[{"role": "user", "content": turn}] for turn in itertools.islice(turns, count)]
    return list(loaded.ids_of_prompts(messages))


def tree_of(args, loaded):
    """Return the server's tree for one sequence."""
    return presets.by_name(args.tree) if args.tree else tree_for(loaded, 1)


# --- a server, and clients --------------------------------------------------------------------------------------------


@contextmanager
def serving(args, draft: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """Run the server and yield its process and address. At the end it must exit with code 0 after SIGTERM."""
    command = [
        sys.executable,
        "-m",
        "hydrajax",
        "serve",
        "--base",
        args.base,
        "--draft",
        draft,
        "--port",
        "0",
        "--quiet",
    ]
    command += ["--slots", str(args.slots), "--queue", "1000", "--dtype", "float32"]
    if args.tree and draft != "none":
        command += ["--tree", args.tree]
    process, log, address = subprocess.Popen(command, stderr=subprocess.PIPE, text=True), [], None
    try:
        for line in process.stderr:
            log.append(line)
            if found := re.search(r"serving on (http://\S+)/v1", line):
                address = found[1]
                break
        if address is None:
            raise HydrajaxError(f"the server did not start: {log[-1].strip() if log else 'no output'}")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        while "plain_step_seconds" not in httpx.get(f"{address}/v1/models").json()["data"][0]["hydrajax"]:
            time.sleep(1.0)  # until everything is compiled, and the last measurement has ended
        yield process, address
        process.send_signal(signal.SIGTERM)
        if code := process.wait(60):
            raise HydrajaxError(f"the server exited with code {code}, expected 0")
    finally:
        process.kill()
        process.wait()


async def ask(client: httpx.AsyncClient, question: Question, max_chunks: int | None = None) -> Response:
    """Stream one answer, and break the connection after ``max_chunks``."""
    body = {"prompt": question.ids, "max_tokens": question.limit, "stream": True, "temperature": 0}
    body |= {"model": "hydrajax", "stream_options": {"include_usage": True}}
    if question.seed is not None:
        body |= {"temperature": TEMPERATURE, "top_p": TOP_P, "seed": question.seed}
    asked, text, ended = Response(time.perf_counter()), "", False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise HydrajaxError(
                f"the server answered {response.status_code}: {(await response.aread()).decode()[:200]}"
            )
        if max_chunks == 0:
            return asked
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                asked.chunks.append(time.perf_counter())
                text, ended = text + choice["text"], choice["finish_reason"] is not None
            if event.get("usage"):
                asked.tokens = event["usage"]["completion_tokens"]
            if len(asked.chunks) == max_chunks and not ended:
                return asked
    if ended:
        asked.text = text
    return asked


async def ask_all(
    address: str, n_clients: int, questions: Sequence[Question], cuts: Sequence[int | None] | None = None, progress=None
) -> tuple[list[Response], float]:
    """Send all requests from ``n_clients`` clients. Return the responses and the seconds."""
    cuts, found = cuts or [None] * len(questions), [None] * len(questions)
    left = iter(range(len(questions)))

    async def client(http: httpx.AsyncClient):
        for at in left:
            found[at] = await ask(http, questions[at], cuts[at])
            if progress:
                progress(at)

    # llama.cpp's server closes a connection after some requests, which a client can notice too late.
    limits = httpx.Limits(max_connections=n_clients + 4, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as http:
        began = time.perf_counter()
        await asyncio.gather(*(client(http) for _ in range(n_clients)))
    return found, time.perf_counter() - began


# --- load -------------------------------------------------------------------------------------------------------------


def load(args) -> dict:
    models = {args.draft[0]: hydrajax.load(args.base, args.draft[0], dtype="float32")}
    models |= {draft: models[args.draft[0]].with_draft(draft) for draft in args.draft[1:]}
    sizes = {n_clients: max(args.requests, 2 * n_clients) for n_clients in args.clients}
    questions = iter(questions_for(args, models[args.draft[0]], args.rounds * sum(sizes.values()), mixed=False))
    rows, right = [], True
    with ExitStack() as servers:
        started = {draft: servers.enter_context(serving(args, draft))[1] for draft in (*models, "none")}
        started |= args.peer
        for number in range(args.rounds):
            asked = {n_clients: list(itertools.islice(questions, size)) for n_clients, size in sizes.items()}
            order = [*started][number % len(started) :] + [*started][: number % len(started)]
            for n_clients, draft in itertools.product(args.clients, order):
                some = asked[n_clients]
                if n_clients == 1 and draft not in args.peer:
                    rate = generate_alone(args, draft, models, [question.ids for question in some])
                    rows.append({"way": f"generate, {draft}", "round": number, "clients": 1, "tokens_per_second": rate})
                    print(f"{rows[-1]['way']:31} {rate:8.1f} tokens/s", flush=True)
                try:
                    found, seconds = asyncio.run(ask_all(started[draft], n_clients, some))
                except httpx.TransportError as error:
                    raise HydrajaxError(f"{draft}, {started[draft]}: {one_line(error)}") from error
                wrong = sum(answer.text != question.answer for answer, question in zip(found, some, strict=True))
                right &= draft in args.peer or not wrong
                row = {"way": f"server, {draft}", "round": number, "clients": n_clients, "wrong": wrong}
                rows.append(row | figures(found, seconds))
                print(line_of(rows[-1]), flush=True)
    return {"rows": rows, "ratios": ratios_of(rows), "right": right}


def generate_alone(args, draft: str, models: dict, prompts: Sequence[list[int]]) -> float:
    """Return the tokens per second of `generate` with one prompt at a time."""
    model = models.get(draft, models[args.draft[0]])
    settings = {"max_new_tokens": args.new_tokens}
    settings["tree"] = tree_of(args, model) if draft in models else presets.root()
    model.generate(prompts if args.questions else prompts[:1], **settings)  # compiles, for every length
    began = time.perf_counter()
    tokens = sum(result.new_tokens for result in model.generate(prompts, **settings))
    return tokens / (time.perf_counter() - began)


def ratios_of(rows: Sequence[dict]) -> list[dict]:
    """Return and print medians of rounds: each server over that without a draft, and one client over `generate`.

    ``low`` and ``high`` are the 95% bootstrap interval over rounds, None for a single round.
    """
    rates = {(row["way"], row["clients"], row["round"]): row["tokens_per_second"] for row in rows}
    servers = dict.fromkeys((row["way"], row["clients"]) for row in rows if row["way"].startswith("server"))
    pairs = [(way, "server, none", clients) for way, clients in servers if way != "server, none"]
    pairs += [(way, way.replace("server", "generate", 1), 1) for way, clients in servers if clients == 1]
    found = []
    for way, other, n_clients in pairs:
        rounds = [number for name, clients, number in rates if (name, clients) == (other, n_clients)]
        if each := [rates[way, n_clients, number] / rates[other, n_clients, number] for number in rounds]:
            low, high = interval(each)
            row = {"way": way, "of": other, "clients": n_clients, "rounds": each, "ratio": float(np.median(each))}
            found.append(row | {"low": low, "high": high})
            print(f"{way:24} {n_clients:3} clients {row['ratio']:5.2f} ({low} to {high}) of {other}", flush=True)
    return found


def interval(ratios: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Return the 95% bootstrap interval of the median; None and None for a single ratio."""
    if len(ratios) == 1:
        return None, None
    found = bootstrap((ratios,), np.median, method="percentile", random_state=0).confidence_interval
    return round(float(found.low), 3), round(float(found.high), 3)


def figures(found: Sequence[Response], seconds: float) -> dict:
    def spread(name: str, values: Sequence[float]) -> dict[str, float]:
        at = np.percentile(values, PERCENTILES) if len(values) else [float("nan")] * len(PERCENTILES)
        return {f"{name}_ms_{which}": 1000 * float(value) for which, value in zip(PERCENTILES, at, strict=True)}

    pauses = [
        later - earlier for asked in found for earlier, later in zip(asked.chunks, asked.chunks[1:], strict=False)
    ]
    each = [(a.chunks[-1] - a.chunks[0]) / (a.tokens - 1) for a in found if a.tokens > 1]
    return (
        {"requests": len(found), "tokens_per_second": sum(asked.tokens for asked in found) / seconds}
        | spread("first_token", [asked.chunks[0] - asked.began for asked in found])
        | spread("token", each)
        | spread("pause", pauses)
    )


def line_of(row: dict) -> str:
    times = []
    for name in ("first_token", "token", "pause"):
        found = "/".join(f"{row[f'{name}_ms_{at}']:.0f}" for at in PERCENTILES)
        times.append(f"{name.replace('_', ' ')} {found} ms")
    rate = f"{row['way']:20} {row['clients']:3} clients {row['tokens_per_second']:8.1f} tokens/s"
    return ", ".join([rate, *times, f"{row['wrong']} wrong"])


# --- soak -------------------------------------------------------------------------------------------------------------


def soak(args) -> dict:
    """Check that no answer is wrong or lost, broken requests end, and the server's memory does not grow."""
    loaded = hydrajax.load(args.base, args.draft[0], dtype="float32")
    pool = questions_for(args, loaded, SOAK_QUESTIONS, mixed=True)
    random = np.random.default_rng(args.seed + 1)
    questions = [pool[at] for at in random.integers(len(pool), size=args.requests)]
    cuts = [int(random.integers(0, 6)) if random.random() < args.disconnect else None for _ in questions]
    every, samples = max(1, args.requests // SAMPLES), []
    with serving(args, args.draft[0]) as (process, address):

        def sample(at: int) -> None:
            if at % every == 0:
                samples.append((at, resident(process.pid)))

        found, seconds = asyncio.run(ask_all(address, args.clients[0], questions, cuts, sample))
        counts = settled_counts(address)
    whole = [(asked, question) for asked, question in zip(found, questions, strict=True) if asked.text is not None]
    lost = sum(asked.text is None and cut is None for asked, cut in zip(found, cuts, strict=True))
    wrong = sum(asked.text != question.answer for asked, question in whole)
    left = counts["requests"] - counts["ended"] - counts["cancelled"]
    begun = [megabytes for at, megabytes in samples if at >= args.requests // 5] or [samples[-1][1]]
    slope = 1000 * float(np.polyfit(range(len(begun)), begun, 1)[0]) / every if len(begun) > 2 else 0.0
    broken = len(questions) - len(whole) - lost
    print(
        f"{len(questions)} requests in {seconds:.0f} s: {len(whole)} complete, {broken} broken, {lost} lost, "
        f"{wrong} wrong, {left} left in the server\n"
        f"memory of the server: {begun[0]:.0f} MB after a fifth, {begun[-1]:.0f} MB at the end, "
        f"{max(begun):.0f} MB at most, {slope:+.2f} MB for 1000 requests"
    )
    row = {"requests": len(questions), "whole": len(whole), "lost": lost, "wrong": wrong, "left": left}
    row |= {"seconds": seconds, "megabytes_per_1000_requests": slope, "memory": samples}
    return {"rows": [row], "counts": counts, "right": not (lost or wrong or left)}


def resident(pid: int) -> float:
    """Return the resident megabytes of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1000


def settled_counts(address: str) -> dict[str, int]:
    """Return the server's counters after it has noticed the broken connections."""
    for _ in range(100):
        page = httpx.get(f"{address}/metrics").text
        counts = {
            name: int(float(re.search(rf"^hydrajax_{name}_total (\S+)", page, re.MULTILINE)[1]))
            for name in ("requests", "ended", "cancelled")
        }
        if counts["requests"] == counts["ended"] + counts["cancelled"]:
            break
        time.sleep(0.1)
    return counts


if __name__ == "__main__":
    sys.exit(main())
