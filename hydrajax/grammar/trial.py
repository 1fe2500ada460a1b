"""Compile a grammar in a process of its own first: nothing else ends llguidance, whose compiler has no limit of time.

Run as a program, this file is that process, which imports llguidance alone.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

CPU_SECONDS = 2  # of a compilation; 128 kB of an ordinary schema take 0.2
MEMORY = 1 << 30  # bytes of address space, of which the stack and Python take 0.4 GB
# Bytes of the stack of a compilation. llguidance follows references recursively: 1,000 nested definitions overflow the
# usual 8 MB, which ends the process. Grammars have at most `hydrajax.grammar.grammar.MOST_BYTES`.
STACK = 256 << 20
TOO_MUCH = f"takes more than {CPU_SECONDS} s or {MEMORY >> 20} MB to compile; use smaller numbers or fewer parts"
_lock = threading.Lock()
_worker: subprocess.Popen[bytes] | None = None


@functools.lru_cache(maxsize=64)
def fault_of(source: str, limits: str) -> str:
    """Return why a grammar cannot be used, "" if it can.

    Args:
        source: the grammar in llguidance's own form.
        limits: arguments of `llguidance.LLParserLimits` as JSON.
    """
    global _worker
    answer = b""
    with _lock:
        for _ in range(2):
            if _worker is None or _worker.poll() is not None:
                _worker = _started()
            try:
                _worker.stdin.write(json.dumps([source, limits]).encode() + b"\n")
                _worker.stdin.flush()
                answer = _worker.stdout.readline()
            except OSError:  # it has been killed
                pass
            finally:
                if not answer:
                    with suppress(OSError), _worker:
                        _worker.kill()
            if answer or _worker.returncode != -signal.SIGKILL:  # of another process
                break
    if answer:
        return json.loads(answer)
    return TOO_MUCH


def _started() -> subprocess.Popen[bytes]:
    # In a session of its own Ctrl-C does not reach it. It ends with its standard input.
    pipe, path = subprocess.PIPE, os.pathsep.join(filter(None, sys.path))
    options: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": subprocess.DEVNULL, "start_new_session": True}
    return subprocess.Popen([sys.executable, "-P", __file__], env=os.environ | {"PYTHONPATH": path}, **options)


def _work() -> None:
    import llguidance

    byte = llguidance.LLTokenizer("byte")
    for line in sys.stdin:
        source, limits = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process
        matcher = llguidance.LLMatcher(
            byte, source, log_level=0, limits=llguidance.LLParserLimits(**json.loads(limits))
        )
        for _ in range(2):  # at the start, and after the text that all others begin with
            if not matcher.is_stopped():
                matcher.compute_bitmask()
                matcher.try_consume_tokens(matcher.compute_ff_tokens())
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(matcher.get_error()), flush=True)


if __name__ == "__main__":
    import resource

    for kind, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # macOS has no limit of memory
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
    threading.stack_size(STACK)
    thread = threading.Thread(target=_work)
    thread.start()
    thread.join()
