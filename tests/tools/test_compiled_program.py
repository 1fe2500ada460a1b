"""Kernels, bytes and collectives of compiled programs: handwritten HLO as XLA's GPU compiler writes, and a program."""

import jax
import jax.numpy as jnp

from helpers.scripts import TOOLS, module

collectives = module(TOOLS / "gpu" / "collectives.py")
CompiledProgram = module(TOOLS / "gpu" / "compiled_program.py").CompiledProgram

# One turn of the loop: a product, a slice of a cache, a row written into it, a transposed copy, a kernel of somebody's,
# and collectives: asynchronous ones, and one in a fusion.
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

%fused_slice (param_0: bf16[4,1000,8], param_1: s32[]) -> bf16[4,10,8] {
  %param_0 = bf16[4,1000,8]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %cut = bf16[4,10,8]{2,1,0} dynamic-slice(%param_0, %zero, %param_1, %zero), dynamic_slice_sizes={4,10,8}
}

%fused_write (param_0.1: bf16[4,1000,8], param_1.1: f32[4,1,8], param_2: s32[]) -> bf16[4,1000,8] {
  %param_0.1 = bf16[4,1000,8]{2,1,0} parameter(0)
  %param_1.1 = f32[4,1,8]{2,1,0} parameter(1)
  %row = bf16[4,1,8]{2,1,0} convert(%param_1.1)
  %param_2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %put = bf16[4,1000,8]{2,1,0} dynamic-update-slice(%param_0.1, %row, %zero.1, %param_2, %zero.1)
}

%fused_dot (param_0.2: bf16[1,16], param_1.2: bf16[16,32]) -> f32[1,32] {
  %param_0.2 = bf16[1,16]{1,0} parameter(0)
  %param_1.2 = bf16[16,32]{1,0} parameter(1)
  ROOT %dot = f32[1,32]{1,0} dot(%param_0.2, %param_1.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_transpose (param_0.3: bf16[16,32]) -> bf16[32,16] {
  %param_0.3 = bf16[16,32]{1,0} parameter(0)
  ROOT %turned = bf16[32,16]{1,0} transpose(%param_0.3), dimensions={1,0}
}

%fused_gather (p: bf16[8]) -> bf16[64] {
  %p = bf16[8]{0} parameter(0)
  ROOT %gathered = bf16[64]{0} all-gather(%p), dimensions={0}
}

%turn (carry: (bf16[4,1000,8], bf16[16,32], s32[])) -> (bf16[4,1000,8], bf16[16,32], s32[]) {
  %carry = (bf16[4,1000,8]{2,1,0}, bf16[16,32]{1,0}, s32[]) parameter(0)
  %cache = bf16[4,1000,8]{2,1,0} get-tuple-element(%carry), index=0
  %weight = bf16[16,32]{1,0} get-tuple-element(%carry), index=1
  %place = s32[] get-tuple-element(%carry), index=2
  %part = bf16[4,10,8]{2,1,0} fusion(%cache, %place), kind=kLoop, calls=%fused_slice
  %call = (f32[4,1,8]{2,1,0}, u8[100]{0}) custom-call(%part, %cache), custom_call_target="__gpu$xla.gpu.triton"SOURCE
  %new = f32[4,1,8]{2,1,0} get-tuple-element(%call), index=0
  %x = bf16[1,16]{1,0} bitcast(%new)
  %y = f32[1,32]{1,0} fusion(%x, %weight), kind=kCustom, calls=%fused_dot
  %copied = bf16[32,16]{1,0} fusion(%weight), kind=kLoop, calls=%fused_transpose
  %flat = bf16[512]{0} bitcast(%copied)
  %all-reduce-start = bf16[512]{0} all-reduce-start(%flat), metadata={op_name="while/body/Llama/dot" stack_frame_id=2}
  %all-reduce-done = bf16[512]{0} all-reduce-done(%all-reduce-start)
  %some = bf16[8]{0} bitcast(%all-reduce-done)
  %fusion = bf16[64]{0} fusion(%some), kind=kCustom, calls=%fused_gather
  %all-to-all-start = ((bf16[8]{0}), bf16[8]{0}) all-to-all-start(%some), dimensions={0}
  %all-to-all-done = bf16[8]{0} all-to-all-done(%all-to-all-start)
  %written = bf16[4,1000,8]{2,1,0} fusion(%cache, %new, %place), kind=kLoop, calls=%fused_write
  ROOT %next = (bf16[4,1000,8]{2,1,0}, bf16[16,32]{1,0}, s32[]) tuple(%written, %weight, %place)
}

%goes_on (carry.1: (bf16[4,1000,8], bf16[16,32], s32[])) -> pred[] {
  %carry.1 = (bf16[4,1000,8]{2,1,0}, bf16[16,32]{1,0}, s32[]) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

ENTRY %main (cache.1: bf16[4,1000,8], weight.1: bf16[16,32]) -> bf16[4,1000,8] {
  %cache.1 = bf16[4,1000,8]{2,1,0} parameter(0)
  %weight.1 = bf16[16,32]{1,0} parameter(1)
  %start = s32[] constant(0)
  %own = bf16[4,1000,8]{2,1,0} copy(%cache.1)
  %before = bf16[16,32]{1,0} all-reduce(%weight.1), to_apply=%add
  %state = (bf16[4,1000,8]{2,1,0}, bf16[16,32]{1,0}, s32[]) tuple(%own, %before, %start)
  %loop = (bf16[4,1000,8]{2,1,0}, bf16[16,32]{1,0}, s32[]) while(%state), condition=%goes_on, body=%turn
  ROOT %out = bf16[4,1000,8]{2,1,0} get-tuple-element(%loop), index=0
}
""".replace("SOURCE", ', metadata={op_name="jit(decode)/while/body/attend"}, backend_config={name = "ours"}')
CACHE, WEIGHT = 4 * 1000 * 8 * 2, 16 * 32 * 2


def test_kernels_and_their_bytes():
    found = {kernel.name: (kernel.kind, kernel.read, kernel.written) for kernel in CompiledProgram(HLO).loop()}
    assert found == {
        "part": ("elementwise", 4 * 10 * 8 * 2 + 4, 4 * 10 * 8 * 2),  # the slice and its place, not the cache
        "call": ("custom call", 4 * 10 * 8 * 2 + CACHE, 4 * 8 * 4 + 100),
        "y": ("matmul", 16 * 2 + WEIGHT, 32 * 4),
        "copied": ("copy", WEIGHT, WEIGHT),
        "all-reduce-start": ("collective", WEIGHT, WEIGHT),  # an asynchronous one is one kernel
        "fusion": ("elementwise", 2 * 8, 2 * 64),
        "all-to-all-start": ("collective", 2 * 8, 2 * 8),
        "written": ("write", 4 * 8 * 4 + 4, 4 * 8 * 2),  # the row, not the cache
    }
    outside = [(kernel.name, kernel.kind, kernel.moved) for kernel in CompiledProgram(HLO).entry()]
    assert outside == [("own", "copy", 2 * CACHE), ("before", "collective", 2 * WEIGHT), ("loop", "control", 0)]

    def moves(instruction, operands):  # the caller gives the bytes of a custom call
        assert "ours" in instruction.attributes
        assert operands == ("bf16[4,10,8]{2,1,0}", "bf16[4,1000,8]{2,1,0}")
        return 7, 5

    (call,) = (kernel for kernel in CompiledProgram(HLO).loop(moves) if kernel.name == "call")
    assert (call.read, call.written, call.source) == (7, 5, "jit(decode)/while/body/attend")


def test_collectives_are_counted_once_with_the_bytes_of_their_results():
    """In the loop, or in the whole program; a TPU's program has a collective in parts that share its channel."""
    in_loop = 2 * (512 + 64 + 8)
    assert collectives.counted(HLO) == {"collectives": 3, "collective_megabytes": in_loop / 1e6}
    parts = "".join(f"  %part.{i} = bf16[8]{{0}} all-gather(%own), channel_id=7, dimensions={{0}}\n" for i in range(3))
    found = collectives.counted(HLO.replace("  %before =", parts + "  %before ="), whole=True)
    assert found == {"collectives": 5, "collective_megabytes": (2 * 8 + WEIGHT + in_loop) / 1e6}


def test_collectives_are_listed_with_the_lines_that_they_come_from():
    first, *others = collectives.listed(HLO)
    line = "1 x 0.0010 MB all-reduce bf16[512] Llama/dot hydrajax/ops/__init__.py:42 contract"
    assert " ".join(first.split()) == f"{line} < hydrajax/models/layers.py:109 DecoderLayer.__call__"
    assert [line.split()[4] for line in others] == ["all-gather", "all-to-all"]
    assert all("(added by XLA)" in line for line in others)


def test_the_turns_of_a_loop_are_those_of_its_condition():
    counting = """\
  %i = s32[] get-tuple-element(%carry.1), index=2
  %end = s32[] constant(4)
  ROOT %yes = pred[] compare(%i, %end), direction=LT"""
    for hlo, turns in ((HLO, None), (HLO.replace("  ROOT %yes = pred[] constant(true)", counting), 4)):
        program = CompiledProgram(hlo)
        (loop,) = [one for one in program.entry_instructions() if one.opcode == "while"]
        assert program.turns(loop) == turns


def test_a_program_compiled_here():
    """The weight is most of the bytes of a product, whatever this backend's compiler adds."""
    x, weight = jnp.ones((8, 256)), jnp.ones((256, 256))

    def once(x, weight):
        return jnp.tanh(x @ weight)

    def loop(x, weight):
        return jax.lax.fori_loop(0, 3, lambda _, x: once(x, weight), x)

    for program in (once, loop):
        compiled = CompiledProgram(jax.jit(program).lower(x, weight).compile().as_text())
        kernels = compiled.loop() if program is loop else compiled.entry()
        assert weight.nbytes < sum(kernel.moved for kernel in kernels) < 2 * weight.nbytes
        assert bool(compiled.loop()) == (program is loop)
