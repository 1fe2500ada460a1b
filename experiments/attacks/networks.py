"""Attacks on a training run of two hosts: the network between them breaks. As root, with iproute2's `ip`."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from attacks.commands import done, finish
from attacks.registry import CannotTry, Fell, Place, attack
from attacks.training import STEPS, at_step, both, check_equal, undisturbed_two

from hydrajax.errors import one_line

ADDRESSES = "10.77.0.1", "10.77.0.2"
# gloo binds to what the host's name stands for, so a host is named by its address.
NAMED = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
ABORTED = 134  # JAX ends a process so whose coordinator or peers give no sign of life
RIDDEN_OUT = 5  # seconds; after 20 gRPC takes a connection for dead, and JAX the run


@dataclass(frozen=True)
class Hosts:
    """Two network namespaces with a cable between them."""

    names: tuple[str, str]

    def within(self, number: int) -> tuple[str, ...]:
        """What a command begins with that is to run on one of them."""
        host = ("ip", "netns", "exec", self.names[number])
        return (*host, "unshare", "--uts", "sh", "-c", NAMED, ADDRESSES[number])

    def cable(self, state: str) -> None:
        ip("-n", self.names[0], "link", "set", "cable", state)


def ip(*arguments: str) -> None:
    found = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if found.returncode:
        raise CannotTry(f"ip {' '.join(arguments)}: {one_line(found.stderr)}")


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    if not shutil.which("ip"):
        raise CannotTry("no ip command")
    names = tuple(f"hydrajax-{os.getpid()}-{number}" for number in range(2))
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield Hosts(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@attack("the network between two hosts breaks", count=4)
def breaks(place: Place) -> None:
    """For a few seconds, and nothing is lost; or longer, and both end and say why, and go on when it is back."""
    whole, run = undisturbed_two(place), place.folder / "run"
    seconds, step = place.random.choice((1, RIDDEN_OUT, 30, None)), place.random.randrange(STEPS)
    with two_hosts() as hosts:
        processes = both(place, run, ADDRESSES[0], hosts.within)
        while all(process.poll() is None for process in processes) and not at_step(run, step):
            time.sleep(0.01)
        hosts.cable("down")
        if seconds:
            time.sleep(seconds)
            hosts.cable("up")
        what = f"for {seconds} s" if seconds else "for good"
        for number, process in enumerate(processes):
            code, _, err = finish(process, place)
            ended = f"broken {what} at step {step}, process {number} ended with code {code}: {err[-200:]}"
            if code not in ((0,) if seconds and seconds <= RIDDEN_OUT else (0, 2, ABORTED)):
                raise Fell(ended)
            if code and "cannot be reached" not in err and "another task died" not in err:
                raise Fell(f"not said why: {ended}")
        hosts.cable("up")
        for process in both(place, run, ADDRESSES[0], hosts.within):
            done(process, place)
    check_equal(run, whole)
