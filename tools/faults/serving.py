"""Faults in `serve` and in Python calls: bad options, requests, connections, numbers, seeds and prompts."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tools.faults.commands import check_call, exit_code, start
from tools.faults.fixtures import base
from tools.faults.registry import Failure, Trial, fault

KEY = "a key"
DESCRIPTORS, CONNECTIONS = 64, 60
SURROGATE = "\udcff"  # a byte that is not UTF-8, as Python reads it from a command line

# --- options ----------------------------------------------------------------------------------------------------------

OPTIONS = [(f"--{name}", text) for name in ("api-key", "host", "name") for text in ("", " ", "\n", "a\nb", SURROGATE)]
OPTIONS += [
    ("--host", "a..b"),
    ("--host", "x" * 300),
    ("--host", "::z"),
    ("--port", "65536"),
    ("--max-connections", "0"),
]


@fault("serve-options")
def options(trial: Trial) -> int:
    """Refused before the base is looked for, as a server that starts would never end."""
    for flag, text in OPTIONS:
        what = f"{flag} {text[:40]!r}"
        completed = check_call(what, "serve", "--base", trial.folder / "none", f"{flag}={text}")
        if not re.match(rf"hydrajax: ({flag}|--port: cannot listen)", completed.err):
            raise Failure(f"{what}: not refused: {completed.err[:200]}")
    return len(OPTIONS)


# --- requests ---------------------------------------------------------------------------------------------------------


@contextmanager
def served(trial: Trial, *more: object, first: str = "") -> Iterator[tuple[str, int]]:
    """Yield host and port of a server of the tiny base. At its end, require no traceback in its log."""
    model = (
        "--base",
        base(trial),
        "--draft",
        "lookup",
        "--tree",
        "chain-2",
        "--dtype",
        "float32",
        "--template",
        "plain",
    )
    arguments = ("serve", *model, "--port", 0, "--slots", 2, "--queue", 6, "--no-warm-up", "--api-key", KEY, *more)
    process, log = start(*arguments, first=first, stdout=subprocess.DEVNULL), []
    try:
        for line in process.stderr:
            log.append(line.decode(errors="replace"))
            if found := re.match(r"serving on http://127\.0\.0\.1:(\d+)/v1", log[-1]):
                break
        else:
            raise Failure(f"exit code {exit_code(process.wait())}: {log[-1:]}")
        drain = threading.Thread(target=lambda: log.extend(line.decode(errors="replace") for line in process.stderr))
        drain.start()
        yield "127.0.0.1", int(found[1])
        process.terminate()
        if (code := process.wait(trial.timeout)) != 0:
            raise Failure(f"exit code {code} at the end: {log[-1:]}")
        drain.join()
        if traces := [line for line in log if "Traceback" in line]:
            raise Failure(f"a traceback in the log: {log[log.index(traces[0]) :][-1]}")
    finally:
        process.kill()
        process.wait()


def post(
    address: tuple[str, int], body: object, key: str = f"Bearer {KEY}", path: str = "completions"
) -> tuple[int, dict]:
    """Return status and content of an answer."""
    headers = {"content-type": "application/json", "authorization": key}
    request = urllib.request.Request(f"http://{address[0]}:{address[1]}/v1/{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


GOOD = {"prompt": "the tree", "max_tokens": 8}
# Bodies, with the status; an answer with status 200 must equal that of the body in the third place.
REQUESTS = [
    ({"temperature": 1e-39}, 200, {}),
    ({"temperature": 9e-6, "top_k": 5, "n": 2}, 200, {}),
    ({"temperature": 1.0, "top_p": 1e-44, "seed": 3}, 200, {}),
    ({"temperature": 1e39, "seed": 3}, 200, {"temperature": 1e9, "seed": 3}),
    ({"presence_penalty": 1e39}, 200, {"presence_penalty": 1e9}),
    ({"frequency_penalty": -1e39}, 200, {"frequency_penalty": -1e9}),
    ({"repetition_penalty": 1e-44}, 200, {"repetition_penalty": 1e-9}),
    ({"top_k": 2**40, "temperature": 1.0, "seed": 3}, 200, {"temperature": 1.0, "seed": 3}),
    ({"temperature": float("inf")}, 400, None),
    ({"presence_penalty": float("nan")}, 400, None),
    ({"n": 9}, 400, None),  # never fits into two slots and a queue of six
    ({"prompt": ["a"] * 9}, 400, None),
    ({"stop": ["a"] * 17}, 400, None),
    ({"seed": 2**32}, 400, None),
    ({"prompt": "tree " * 200_000}, 400, None),
    ({"prompt": None}, 400, None),
]


@fault("serve-requests")
def requests(trial: Trial) -> int:
    """Numbers beyond float32 act as their limits, and what never fits is refused, not put off."""
    with served(trial) as address:
        for change, status, like in REQUESTS:
            what = json.dumps(change)[:60]
            found, content = post(address, GOOD | change)
            if found != status:
                raise Failure(f"{what}: status {found}, expected {status}: {content}")
            if like is not None:
                expected = post(address, GOOD | like)[1]["choices"][0]["text"]
                if any(choice["text"] != expected for choice in content["choices"]):
                    raise Failure(f"{what}: other text than with {like}")
        keys = {f"bearer {KEY}": 200, f"BEARER  {KEY}": 200, KEY: 401, f"Basic {KEY}": 401, "": 401, "Bearer": 401}
        for key, status in keys.items():
            if (found := post(address, GOOD, key)[0]) != status:
                raise Failure(f"authorization {key!r}: status {found}, expected {status}")
    return len(REQUESTS) + len(keys)


@fault("serve-connections")
def connections(trial: Trial) -> int:
    """Silent connections and half headers, more than there are file descriptors, lock nobody out."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))\n"
    with served(trial, first=limit) as address, ExitStack() as clients:
        post(address, GOOD)  # compiles, which opens files
        for number in range(CONNECTIONS):
            client = clients.enter_context(socket.create_connection(address, timeout=60))
            client.sendall((b"", b"GET /v1/models HTTP/1.1\r\nhost: 127")[number % 2])
        if (found := post(address, GOOD)[0]) != 200:
            raise Failure(f"{CONNECTIONS} idle connections: status {found}, expected 200")
    return CONNECTIONS


# --- Python -----------------------------------------------------------------------------------------------------------

ARGUMENTS = [{"seed": seed} for seed in (2**63, 2**32, -1, 1.5, [2**32])]
PROMPTS = (None, 5, [5.0], [None], b"ab", [b"ab"], [[5.0]])


@fault("call-arguments")
def arguments(trial: Trial) -> int:
    """Seeds and prompts of wrong values and types raise `HydrajaxError`."""
    import hydrajax

    model = hydrajax.load(base(trial), dtype="float32")
    calls = [("the tree", given) for given in ARGUMENTS] + [(prompts, {}) for prompts in PROMPTS]
    for prompts, given in calls:
        prompts = [prompts] if isinstance(given.get("seed"), list) else prompts
        try:
            model.generate(prompts, rule="exact", tree="root", max_new_tokens=4, **given)
        except hydrajax.HydrajaxError:
            continue
        raise Failure(f"{prompts!r}, {given}: answered")
    return len(calls)
