"""Run all TPU measurements unattended in half an hour, most important first.

    python tools/tpu/half_hour.py --out FOLDER                  # 28 minutes on one TPU with 16 GB, such as a v5e
    python tools/tpu/half_hour.py --out FOLDER --minutes 9      # in several calls, which keep finished parts
    python tools/tpu/half_hour.py --out FOLDER --tiny           # seconds per part, on a CPU, to test the scripts

The parts are the scripts of ``tools/gpu``. A 7B has int8 weights, as 16 GB hold none in bfloat16. It has not run on a
TPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

from half_hour import Part, main

WITHOUT_KERNELS = {"HYDRAJAX_TPU_KERNELS": "0"}
SMALL = "--shape 1b --contexts 2048 --nodes 64 --steps-only"
PARTS = (
    Part("check", 4, "device_check", suffix="json"),
    Part("steps", 6, "decode_bench", "--shape 1b --contexts 2048,512 --nodes 64,16 --steps-only"),
    Part("int8", 5, "decode_bench", "--quantize int8 --contexts 2048 --nodes 64 --steps-only"),
    Part("without_kernels", 3, "decode_bench", SMALL, WITHOUT_KERNELS),
    Part("batches", 5, "decode_bench", "--shape 1b --contexts 2048 --batches 8,16 --nodes 64,8 --steps-only"),
    Part("training", 4, "train_bench", "--shape 1b --batches 4"),
    Part("phases", 4, "decode_bench", "--shape 1b --contexts 2048 --nodes 64"),
)

if __name__ == "__main__":
    sys.exit(main(PARTS, __doc__))
