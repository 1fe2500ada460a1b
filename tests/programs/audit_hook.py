"""Install the sandbox's audit hook and try forbidden operations. Argument: the path of ``confined.py``."""

import os
import runpy
import socket
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.addaudithook(runpy.run_path(sys.argv[1])["refuse_event"])
    for one in (lambda: Path("x").write_text(""), os.fork, lambda: os.remove("y"), socket.socket):
        try:
            one()
        except PermissionError:
            print("refused", end=" ")
    Path(os.__file__).read_bytes()
