"""Hold the lock of an output until the process is killed. Argument: the output."""

import sys
import time

from hydrajax.locking import in_use

if __name__ == "__main__":
    with in_use(sys.argv[1]):
        print("held", flush=True)
        time.sleep(600)
