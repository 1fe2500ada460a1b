"""Compile decode steps for a GPU without one, and count kernels, bytes, copies and CUDA graphs.

    pip install 'jax[cuda12]'                    # or cuda13; 2 to 3 GB. The compiler alone takes 0.5 GB:
                                                 # nvidia-cuda-nvcc-cu12, and without dependencies jax-cuda12-plugin
                                                 # and jax-cuda12-pjrt of jax's own version
    python tools/gpu/compile_report.py --what ar,verify,medusa,hydra++ --batches 1,8 --contexts 512,2048,8192
    python tools/gpu/compile_report.py --device h100 --devices 8 --shape 70b --layers 2 --collectives
    hydrajax report OUTPUT_FOLDER

Nothing is allocated or run, so there are no timings. A program of a 7B compiles in 10 to 40 seconds. The floor is the
bytes that a step must move: the base's weights (of experts, those that its tokens are expected to choose), keys and
values of the filled slots, and for a whole step the draft's weights. Several devices share the weights; bytes, kernels
and floor are those of one, and a collective is a kernel that reads its operand and writes its result. ``--what`` is any
of

    ar        the loop's body of decoding without a draft
    ar-step   the same as a single call
    verify    one pass of the base over the tree, in a loop
    prefill   a prompt of --contexts tokens, for its temporary memory
    medusa, hydra, hydra++, lookup    the loop's body with this drafter
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from compile_command import cells_of, parser_of, remarks_of, run

DUMPS = tempfile.TemporaryDirectory(prefix="hydrajax_hlo_")
FLAGS = f"--xla_dump_to={DUMPS.name} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*hydrajax_.*"


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, layers=None)
    parser.add_argument(
        "--lm-head",
        choices=["full", "shared", "low-rank", "reduced"],
        default="full",
        help="lm heads of the draft heads",
    )
    parser.add_argument("--device", default="h200", choices=["h200", "h100", "a100", "t4"])
    parser.add_argument(
        "--gemm", default="triton", choices=["triton", "cublas"], help="XLA's kernels of products (default %(default)s)"
    )
    parser.add_argument("--flags", default="", help="further XLA_FLAGS")
    parser.add_argument("--show", action="store_true", help="list every kernel")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the optimised HLO to this directory")
    return parser.parse_args()


def main(args: argparse.Namespace) -> int:
    from compiled_step import Case  # after XLA_FLAGS are set

    def cases() -> list[Case]:
        names = ("shape", "dtype", "lm_head", "device", "layers")
        shared = {name: getattr(args, name) for name in names}
        return [
            Case(what, batch=batch, context=context, nodes=nodes, devices=devices, weights=weights, **shared)
            for devices, weights, what, nodes, batch, context in cells_of(args)
        ]

    settings = {name: getattr(args, name) for name in ("shape", "dtype", "lm_head", "gemm")}
    settings |= {"compiled for": args.device}
    settings |= {name: found for name in ("layers", "flags") if (found := getattr(args, name))}
    return run(
        args, cases, report, kind="program", settings=settings,
        title=f"the program of a decode step, {args.shape}, {args.dtype}",
        remarks=["compiled for a described device, not run: no autotuning, no timings", *remarks_of(args)],
    )  # fmt: skip


def report(args: argparse.Namespace, cases: list) -> list[dict]:
    """Compile and print every case; return the rows of the result."""
    from collectives import listed
    from compiled_step import kernels_of, row_of

    rows = []
    for case in cases:
        row, hlo = row_of(case, Path(DUMPS.name))
        rows.append(row)
        print(line_of(row), flush=True)
        if args.save:
            args.save.mkdir(parents=True, exist_ok=True)
            (args.save / f"{case.name}.hlo").write_text(hlo)
        if args.show:
            for kernel in kernels_of(case, hlo)[0]:
                print(line_of_kernel(kernel))
        if args.collectives:
            print("\n".join(listed(hlo)), flush=True)
    return rows


def line_of(row: dict) -> str:
    several = "devices" in row
    devices = f"{row['devices']} devices " if several else ""
    exchanged = f"{row['collectives']} collectives of {row['collective_megabytes']:.2f} MB, " if several else ""
    return (
        f"{devices}{row['what']:8} {row['weights']} batch {row['batch']} context {row['context']:5}"
        f" nodes {row['nodes']:2}: {row['kernels']:4} kernels"
        f" ({row['kernels_per_layer']:g} a layer), {row['gigabytes']:.2f} GB of {row['floor_gigabytes']:.2f}"
        f" = {row['gigabytes'] / row['floor_gigabytes']:.3f}, {row['copies']} large copies"
        f" ({row['copied_megabytes']:.0f} MB), {exchanged}{row['temporary_megabytes']:.0f} MB temporary,"
        f" {'one graph' if row['one_graph'] else 'no single graph'}, {row['compile_seconds']:.0f} s"
    )


def line_of_kernel(kernel) -> str:
    megabytes = f"r {kernel.read / 1e6:9.3f} w {kernel.written / 1e6:9.3f} MB"
    inputs = " ".join(shape[:34] for shape in kernel.operands[:4])
    result = f"{kernel.name[:40]:40} {kernel.shape[:50]:50}"
    return f"  {kernel.kind:12} {megabytes}  {result} <- {inputs} | {kernel.source[-60:]}"


if __name__ == "__main__":
    parsed = arguments()
    gemm = "" if parsed.gemm == "triton" else "--xla_gpu_enable_triton_gemm=false"
    os.environ["XLA_FLAGS"] = f"{parsed.flags} {gemm} {FLAGS}"
    os.environ["JAX_PLATFORMS"] = "cpu"  # only CUDA's compiler is used
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare machine has no installed hydrajax
    sys.exit(main(parsed))
