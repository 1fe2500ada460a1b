"""Counts in compiled programs: handwritten HLO in the format of XLA's GPU compiler, and a real program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from compiled_program import CompiledProgram

# One turn of the loop: a product, a slice of a cache, a row written into it, a transposed copy, a kernel of somebody's.
HLO = r"""
HloModule jit_decode

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
  %written = bf16[4,1000,8]{2,1,0} fusion(%cache, %new, %place), kind=kLoop, calls=%fused_write
  ROOT %next = (bf16[4,1000,8]{2,1,0}, bf16[16,32]{1,0}, s32[]) tuple(%written, %weight, %place)
}

%goes_on (carry.1: (bf16[4,1000,8], bf16[16,32], s32[])) -> pred[] {
  %carry.1 = (bf16[4,1000,8]{2,1,0}, bf16[16,32]{1,0}, s32[]) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (cache.1: bf16[4,1000,8], weight.1: bf16[16,32]) -> bf16[4,1000,8] {
  %cache.1 = bf16[4,1000,8]{2,1,0} parameter(0)
  %weight.1 = bf16[16,32]{1,0} parameter(1)
  %start = s32[] constant(0)
  %own = bf16[4,1000,8]{2,1,0} copy(%cache.1)
  %state = (bf16[4,1000,8]{2,1,0}, bf16[16,32]{1,0}, s32[]) tuple(%own, %weight.1, %start)
  %loop = (bf16[4,1000,8]{2,1,0}, bf16[16,32]{1,0}, s32[]) while(%state), condition=%goes_on, body=%turn
  ROOT %out = bf16[4,1000,8]{2,1,0} get-tuple-element(%loop), index=0
}
""".replace("SOURCE", ', metadata={op_name="jit(decode)/while/body/attend"}, backend_config={name = "ours"}')
CACHE, WEIGHT = 4 * 1000 * 8 * 2, 16 * 32 * 2


def test_kernels_of_the_loop_and_their_bytes():
    found = {kernel.name: (kernel.kind, kernel.read, kernel.written) for kernel in CompiledProgram(HLO).loop()}
    assert found == {
        "part": ("elementwise", 4 * 10 * 8 * 2 + 4, 4 * 10 * 8 * 2),  # the slice and its place, not the cache
        "call": ("custom call", 4 * 10 * 8 * 2 + CACHE, 4 * 8 * 4 + 100),
        "y": ("matmul", 16 * 2 + WEIGHT, 32 * 4),
        "copied": ("copy", WEIGHT, WEIGHT),
        "written": ("write", 4 * 8 * 4 + 4, 4 * 8 * 2),  # the row, not the cache
    }
    outside = [(kernel.name, kernel.kind, kernel.moved) for kernel in CompiledProgram(HLO).entry()]
    assert outside == [("own", "copy", 2 * CACHE), ("loop", "control", 0)]


def test_the_caller_gives_the_bytes_of_a_custom_call():
    def moves(instruction, operands):
        assert "ours" in instruction.attributes
        assert operands == ("bf16[4,10,8]{2,1,0}", "bf16[4,1000,8]{2,1,0}")
        return 7, 5

    (call,) = (kernel for kernel in CompiledProgram(HLO).loop(moves) if kernel.name == "call")
    assert (call.read, call.written, call.source) == (7, 5, "jit(decode)/while/body/attend")


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
