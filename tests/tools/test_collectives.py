"""Collectives of a compiled step of several devices, in the text of its HLO."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers.scripts import TOOLS, module

collectives = module(TOOLS / "gpu" / "collectives.py")
compiled_program = module(TOOLS / "gpu" / "compiled_program.py")

HLO = """\
HloModule jit_step

FileNames
1 "/home/me/hydrajax/ops/__init__.py"
2 "/home/me/hydrajax/models/layers.py"

FunctionNames
1 "contract"
2 "DecoderLayer.__call__"

FileLocations
1 {file_name_id=2 function_name_id=2 line=109 end_line=109 column=19 end_column=19}
2 {file_name_id=1 function_name_id=1 line=42 end_line=42 column=11 end_column=11}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

%fused (p: bf16[8]) -> bf16[64] {
  %p = bf16[8]{0} parameter(0)
  ROOT %gathered = bf16[64]{0} all-gather(%p), dimensions={0}
}

%body (carry: (bf16[4096])) -> (bf16[4096]) {
  %carry = (bf16[4096]{0}) parameter(0)
  %x = bf16[4096]{0} get-tuple-element(%carry), index=0
  %all-reduce-start = bf16[4096]{0} all-reduce-start(%x), metadata={op_name="while/body/Llama/dot" stack_frame_id=2}
  %all-reduce-done = bf16[4096]{0} all-reduce-done(%all-reduce-start)
  %part = bf16[8]{0} slice(%all-reduce-done), slice={[0:8]}
  %fusion = bf16[64]{0} fusion(%part), kind=kCustom, calls=%fused
  %all-to-all-start = ((bf16[8]{0}), bf16[8]{0}) all-to-all-start(%part), dimensions={0}
  %all-to-all-done = bf16[8]{0} all-to-all-done(%all-to-all-start)
  ROOT %out = (bf16[4096]{0}) tuple(%all-reduce-done)
}

%cond (carry: (bf16[4096])) -> pred[] {
  %carry = (bf16[4096]{0}) parameter(0)
  ROOT %on = pred[] constant(true)
}

ENTRY %main (x: bf16[4096]) -> (bf16[4096]) {
  %x = bf16[4096]{0} parameter(0)
  %before = bf16[4096]{0} all-reduce(%x), to_apply=%add
  %start = (bf16[4096]{0}) tuple(%before)
  ROOT %while = (bf16[4096]{0}) while(%start), condition=%cond, body=%body
}
"""


def test_collectives_of_the_loop_are_counted_once_with_the_bytes_of_their_results():
    assert collectives.counted(HLO) == {"collectives": 3, "collective_megabytes": 2 * (4096 + 64 + 8) / 1e6}


def test_collectives_of_a_whole_program_are_counted_by_their_channels():
    """A TPU's program has a collective in parts that share its channel."""
    parts = "".join(f"  %part.{i} = bf16[8]{{0}} all-gather(%x), channel_id=7, dimensions={{0}}\n" for i in range(3))
    hlo = HLO.replace("  %before =", parts + "  %before =")
    assert collectives.counted(hlo, whole=True) == {
        "collectives": 5, "collective_megabytes": 2 * (8 + 4096 + 4096 + 64 + 8) / 1e6,
    }  # fmt: skip


def test_the_turns_of_a_loop_are_those_of_its_condition():
    counting = """\
  %i = s32[] get-tuple-element(%carry), index=0
  %end = s32[] constant(4)
  ROOT %on = pred[] compare(%i, %end), direction=LT"""

    def turns(hlo):
        program = compiled_program.CompiledProgram(hlo)
        (loop,) = [one for one in program.entry_instructions() if one.opcode == "while"]
        return program.turns(loop)

    assert turns(HLO) is None  # it ends when the text does
    assert turns(HLO.replace("  ROOT %on = pred[] constant(true)", counting)) == 4


def test_collectives_are_listed_with_the_lines_that_they_come_from():
    first, *others = collectives.listed(HLO)
    assert first.split() == [
        "1", "x", "0.0082", "MB", "all-reduce", "bf16[4096]", "Llama/dot", "hydrajax/ops/__init__.py:42",
        "contract", "<", "hydrajax/models/layers.py:109", "DecoderLayer.__call__",
    ]  # fmt: skip
    assert [line.split()[4] for line in others] == ["all-gather", "all-to-all"]
    assert all("(added by XLA)" in line for line in others)


def test_an_asynchronous_collective_is_one_kernel_that_reads_and_writes_each_number_once():
    found = {kernel.name: kernel for kernel in compiled_program.CompiledProgram(HLO).loop()}
    assert set(found) == {"all-reduce-start", "part", "fusion", "all-to-all-start"}
    for name, size in (("all-reduce-start", 4096), ("all-to-all-start", 8)):
        assert (found[name].kind, found[name].read, found[name].written) == ("collective", 2 * size, 2 * size)


@pytest.mark.slow
def test_mistakes_end_in_one_line():
    for flags, message in (
        ("--devices 3", "--devices: got 3, expected 1 or 8"),
        ("--devices 8 --what ar,prefill", "--what: got prefill, which has no loop"),
        ("--what train", "--what: got train, expected one of"),
    ):
        command = [sys.executable, TOOLS / "gpu" / "compile_report.py", *flags.split()]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr.splitlines()[-1]
