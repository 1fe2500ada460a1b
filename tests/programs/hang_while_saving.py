"""Save a checkpoint and hang before its last file, to be killed there. Argument: the folder of the checkpoints."""

import sys
import time

import jax.numpy as jnp

from hydrajax.train.checkpoints import TrainCheckpoints


def hang(self) -> None:
    print("saving", flush=True)
    time.sleep(60)


if __name__ == "__main__":
    checkpoints = TrainCheckpoints(sys.argv[1], keep=1, higher_is_better=True)
    TrainCheckpoints._write_record = hang
    checkpoints.save(3, {"kernel": jnp.ones((8, 4)), "count": jnp.int32(3)}, {}, wait=True)
