"""Contents of the compiled decode loop, and the calls that compile it.

A copy of the KV cache inside the loop costs more than the step itself (docs/design.md 7) and changes no result, so
these tests read the optimised HLO. CPU only: other backends schedule differently.
"""

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import lab
from helpers.compilations import no_compilation
from helpers.how import sampling
from hydrajax import ops
from hydrajax.api import make_decode_fn
from hydrajax.decoding import engine as engine_module
from hydrajax.decoding import step as step_module
from hydrajax.decoding.acceptance import AcceptanceRule, Greedy
from hydrajax.decoding.decode import result_of
from hydrajax.decoding.decode_loop import run_steps
from hydrajax.decoding.engine import Engine
from hydrajax.decoding.program import Program
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.decoding.state import Params
from hydrajax.drafters.block import BlockSettings
from hydrajax.drafters.dflash import DFlash
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.drafters.none import NoDrafter
from hydrajax.models.base_model import BoundBase
from hydrajax.models.expert_settings import Experts
from hydrajax.models.init import init_base
from hydrajax.models.layers import DecoderLayer
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LayerKind
from hydrajax.models.recurrent_settings import GatedDelta
from hydrajax.trees import presets
from hydrajax.trees.dynamic import BestFirstTree, DynamicTree

# With 1000 new tokens the cache of one sequence is larger than any other array of this tiny model.
CONFIG = lab.CONFIG.replace(max_positions=2048)
MAX_NEW, BUCKET = 1000, 16
TREE, GROWN = presets.cartesian([3, 2]), DynamicTree(8, 2, 3)
# A drafter, its tree, and its layers with a KV cache of the base's shape; a draft model's cache has one more slot.
DRAFTERS = {
    "none": (NoDrafter(), presets.root(), 0),
    "medusa": (lab.DRAFTERS["medusa"], TREE, 0),
    "hydra": (lab.DRAFTERS["hydra"], TREE, 0),
    "hydra++": (lab.DRAFTERS["hydra++"], TREE, 1),
    "amphista": (lab.DRAFTERS["amphista"], TREE, 2),
    "eagle": (lab.DRAFTERS["eagle"], GROWN, 1),
    "eagle3": (lab.DRAFTERS["eagle3"], TREE, 1),
    "mtp": (lab.DRAFTERS["mtp of mimo"], GROWN, 1),
    "dflash": (lab.MORE["dflash"], BestFirstTree(8).reaching(4), 2),
    "dspark": (lab.MORE["dspark"], TREE, 2),
    "p-eagle": (lab.MORE["p-eagle"], TREE, 2),
    "lookup with hydra++": (lab.MORE["lookup with hydra++"], TREE, 1),
    "model": (DraftModel(Llama(CONFIG), 17), TREE, 2),
    "sure model": (DraftModel(Llama(CONFIG), 17, confidence=0.5), TREE, 2),
    "experts": (lab.DRAFTERS["hydra++"], TREE, 1),
    "gemma4 assistant": (lab.DRAFTERS["gemma4 assistant"], TREE, 0),
    "hybrid": (lab.DRAFTERS["hydra++"], TREE, 1),
    "hybrid by kernels": (lab.DRAFTERS["hydra++"], TREE, 1),
    "hybrid alone": (NoDrafter(), presets.root(), 0),
}
# Experts in both layers, of which the first has a window.
EXPERTS = Experts(4, 2, 16)
# States of shapes that nothing else has: for XLA's matmuls, and for the CPU's kernels, whose vectors fill a key.
STATES = {"hybrid": GatedDelta(4, 2, 4, 24, 40), "hybrid by kernels": GatedDelta(4, 2, 4, 32, 40)}
HYBRIDS = {
    name: CONFIG.replace(layer_kinds=(LayerKind(None, None, recurrent=x), LayerKind())) for name, x in STATES.items()
}
BASES = {
    "experts": CONFIG.replace(layer_kinds=(LayerKind(5, experts=EXPERTS), LayerKind(experts=EXPERTS))),
    "gemma4 assistant": CONFIG.replace(layer_kinds=(LayerKind(), LayerKind(shared_kv=True))),
    **HYBRIDS,
    "hybrid alone": HYBRIDS["hybrid"],
}


def make_engine(name: str, kind=Engine) -> Engine:
    drafter, tree, _ = DRAFTERS[name]
    return kind(Llama(BASES.get(name, CONFIG)), Program(drafter, tree, max_new_tokens=MAX_NEW))


def shapes(engine: Engine, batch: int, rule: AcceptanceRule):
    """Return the shapes of the parameters and of a state."""
    base = jax.eval_shape(lambda: init_base(engine.model, jax.random.key(0)))
    draft = jax.eval_shape(
        lambda base: engine.program.drafter.init(jax.random.key(0), BoundBase(engine.model, base)), base
    )
    params = Params(base, draft)
    prompt, lengths = jax.ShapeDtypeStruct((batch, BUCKET), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    return params, jax.eval_shape(engine.prefill, params, prompt, lengths, sampling(rule, batch, CONFIG.vocab_size))


def optimised_hlo(engine: Engine, batch: int, donate: bool = True, rule: AcceptanceRule | None = None) -> str:
    """Compile the loop from shapes and return its HLO."""
    params, state = shapes(engine, batch, rule or Greedy())
    loop = jax.jit(lambda params, state: run_steps(engine, params, state), donate_argnums=1 if donate else ())
    # LLVM's optimisation follows the final HLO and would double the time.
    return loop.lower(params, state).compile({"xla_backend_optimization_level": 0}).as_text()


def instructions(hlo: str) -> list[tuple[str, str]]:
    """Return ``(result type, opcode)`` of every instruction, including those inside fusions."""
    pattern = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([a-z][\w\-]*)\(", re.MULTILINE)
    return pattern.findall(hlo)


def unordered(hlo: str) -> Counter:
    """Count the instructions by result type and opcode. Tuples, such as a loop's state, may have any order."""
    parts = ((re.findall(r"\w+\[.*?\](?:\{.*?\})?", result), opcode) for result, opcode in instructions(hlo))
    return Counter((tuple(sorted(types)), opcode) for types, opcode in parts)


def element_counts(result_type: str) -> list[int]:
    return [math.prod(map(int, filter(None, dims.split(",")))) for dims in re.findall(r"\w+\[([\d,]*)\]", result_type)]


def cache_copies(engine: Engine, hlo: str) -> list[str]:
    """Return copies of at least the size of one sequence of one cache array; base and draft have equal shapes."""
    smallest = CONFIG.n_kv_heads * engine.cache_slots(BUCKET) * CONFIG.head_dim
    return [
        f"{result} {opcode}"
        for result, opcode in instructions(hlo)
        if opcode in ("copy", "copy-start") and max(element_counts(result), default=0) >= smallest
    ]


def cache_shapes(engine: Engine, batch: int) -> tuple[str, ...]:
    slots = engine.cache_slots(BUCKET)
    return tuple(f"f32[{batch},{CONFIG.n_kv_heads},{n},{CONFIG.head_dim}]" for n in (slots, slots + 1))


def cache_makers(engine: Engine, hlo: str, batch: int) -> dict[str, int]:
    """Count the instructions that return an array of exactly the shape of a cache, by opcode."""
    shapes = cache_shapes(engine, batch)
    makers: dict[str, int] = {}
    for result, opcode in instructions(hlo):
        if result.startswith(shapes):
            makers[opcode] = makers.get(opcode, 0) + 1
    return makers


def take_updates(makers: dict[str, int], engine: Engine, hlo: str, batch: int) -> int:
    """Remove the updates of a few slots from `cache_makers` and return their number, with those of our CPU kernel."""
    kernel = re.findall(r"= (\(.*?\)) custom-call\(.*custom_call_target=\"hydrajax_append_rows\"", hlo)
    written = sum(result.count(shape) for result in kernel for shape in cache_shapes(engine, batch))
    return written + makers.pop("dynamic-update-slice", 0) + makers.pop("scatter", 0)


@pytest.mark.quick("experts-3-Greedy", "model-1-Greedy", "gemma4 assistant-3-Greedy")  # experts: with Hydra++ heads
@pytest.mark.parametrize(
    ("name", "batch", "rule"),
    [
        *((name, 3, Greedy()) for name in DRAFTERS if name not in ("hydra", "sure model") and name not in BASES),
        ("experts", 3, Greedy()),
        ("gemma4 assistant", 3, Greedy()),
        *((name, 1, Greedy()) for name in ("none", "hydra++", "model")),
        ("eagle", 3, RejectionSampling()),
        ("eagle3", 1, RejectionSampling()),
        ("dspark", 3, RejectionSampling()),
        ("sure model", 3, RejectionSampling()),
    ],
    ids=lambda x: str(x) if isinstance(x, str | int) else type(x).__name__,
)
def test_the_loop_updates_its_caches_in_place(name, batch, rule):
    engine = make_engine(name)
    check_updates(engine, optimised_hlo(engine, batch, rule=rule), batch, DRAFTERS[name][2])


def check_updates(engine: Engine, hlo: str, batch: int, own_layers: int) -> None:
    """No cache is copied, and no instruction rewrites a whole one, such as a select over all slots: every cache-shaped
    result updates a few slots, alone or as the only instruction of its shape in a fusion.
    """
    assert cache_copies(engine, hlo) == []
    makers = cache_makers(engine, hlo, batch)
    updates = take_updates(makers, engine, hlo, batch)
    assert updates == 2 * (len(engine.model.config.kv_shapes) + own_layers)
    assert makers.pop("fusion", 0) <= updates
    assert set(makers) <= {"parameter", "get-tuple-element", "bitcast"}


@pytest.mark.parametrize("name", ["hybrid", "hybrid by kernels", pytest.param("hybrid alone", marks=pytest.mark.slow)])
def test_the_loop_reads_and_writes_a_state_in_place(name):
    """Nothing copies the state, and one operation adds what was accepted."""
    engine = make_engine(name)
    hlo = optimised_hlo(engine, 3)
    check_updates(engine, hlo, 3, DRAFTERS[name][2])
    state = STATES.get(name, STATES["hybrid"])
    shape = f"f32[3,{','.join(map(str, state.state_shape))}]"
    makers = Counter(opcode for result, opcode in instructions(hlo) if result.startswith(shape))
    for view in ("parameter", "get-tuple-element", "bitcast"):
        makers.pop(view, None)
    if ops.here().path_kernel(1, state.key_dim):
        assert makers == {"custom-call": 1}  # in place, as its function demands
    else:
        assert makers == {"fusion": 1, "add": 1, "multiply": 1, "broadcast": 1}  # kept S + what was accepted


def extended_hlo(engine: Engine, batch: int, donate: bool = True) -> str:
    """Return the HLO of `Engine.extend` for a next message of 16 tokens; executors donate the state."""
    params, state = shapes(engine, batch, Greedy())
    more, counts = jax.ShapeDtypeStruct((batch, BUCKET), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    extend = jax.jit(engine.extend, donate_argnums=1 if donate else ())
    arguments = params, state, more, counts, sampling(Greedy(), batch, CONFIG.vocab_size)
    return extend.lower(*arguments).compile({"xla_backend_optimization_level": 0}).as_text()


@pytest.mark.parametrize(
    ("name", "batch"),
    [("hydra++", 3), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("none", "eagle", "model"))],
)
def test_extend_updates_the_caches_in_place(name, batch):
    """A conversation turn must not copy the caches, which happens if the write waits for an input."""
    engine = make_engine(name)
    # A draft model first writes the last token of the previous answer if that token is pending.
    writes = 2 if name == "model" else 1
    check_updates(engine, extended_hlo(engine, batch), batch, writes * DRAFTERS[name][2])


class CopyingEngine(Engine):
    """Read the old cache at a position that is known only after the update."""

    def decode_step(self, params, state):
        new = super().decode_step(params, state)
        seen = state.target.cache.layers[0][0][:, 0, new.target.root, 0].sum()
        return new._replace(target=new.target._replace(root=new.target.root + (seen > 1e9)))


class RewritingEngine(Engine):
    """Freeze finished sequences by selecting between the old and the new cache."""

    def decode_step(self, params, state):
        new = super().decode_step(params, state)
        keep, before, after = state.output.done[:, None, None, None], state.target.cache, new.target.cache
        layers = jax.tree.map(lambda old, new: jnp.where(keep, old, new), before.layers, after.layers)
        return new._replace(target=new.target._replace(cache=after._replace(layers=layers)))


def test_control_a_write_without_the_data_dependency_is_found(monkeypatch):
    """Without the data dependency in `append`, jax 0.10 copies every cache in the autoregressive loop on a CPU."""
    append = step_module.append
    for module in (step_module, engine_module):
        monkeypatch.setattr(module, "append", lambda *args, index=None, after=None: append(*args, index=index))
    engine = make_engine("none")
    assert len(cache_copies(engine, optimised_hlo(engine, 3))) >= 2 * CONFIG.n_layers
    assert len(cache_copies(engine, extended_hlo(engine, 3))) >= 2 * CONFIG.n_layers


@pytest.mark.slow
def test_control_a_read_of_the_old_cache_is_found():
    engine = make_engine("hydra", CopyingEngine)
    assert cache_copies(engine, optimised_hlo(engine, 3))


def test_control_a_rewritten_cache_is_found():
    engine = make_engine("medusa", RewritingEngine)
    assert "select" in cache_makers(engine, optimised_hlo(engine, 3), 3)


@pytest.mark.slow
def test_control_a_state_that_is_not_donated_is_found():
    engine = make_engine("medusa")
    assert cache_copies(engine, optimised_hlo(engine, 1, donate=False))
    assert cache_copies(engine, extended_hlo(engine, 1, donate=False))


def test_prompts_of_one_bucket_and_rules_of_one_kind_share_a_compilation(lab):
    rule = ExactSampling(0.7, top_k=5, top_p=0.9)
    decode_fn = make_decode_fn(lab.model, lab.drafters["none"], presets.root(), rule, max_new_tokens=4)
    params, others = (Params(lab.base(seed), {}) for seed in (0, 1))

    def run(params, lengths, width, **kwargs):
        prompt = np.random.default_rng(width).integers(0, lab.vocab, size=(len(lengths), width), dtype=np.int32)
        out = decode_fn(params, prompt, np.array(lengths, np.int32), **{"rng": jax.random.key(7)} | kwargs)
        assert out.lengths.tolist() == kwargs.get("limits", np.full(len(lengths), 4)).tolist()

    run(params, [5, 2], 5)
    rules = [ExactSampling(1.3, top_k=2, top_p=0.5), ExactSampling(0.2, top_k=17, top_p=0.99)]
    with no_compilation():
        run(params, [9, 1], 9)  # another width
        run(others, [16, 16], 16, rng=jax.random.key(8))  # the largest width of the bucket
        run(params, [5, 2], 5, rule=rules[0], limits=np.array([2, 4]))
        run(params, [5, 2], 5, rule=rules, limits=np.array([0, 3]))  # one rule per sequence
    with pytest.raises(AssertionError), no_compilation():
        run(params, [17, 3], 17)  # the next bucket
    run(params, [17, 3], 17)


@pytest.fixture(scope="module")
def small_run(lab):
    decode_fn = make_decode_fn(lab.model, lab.drafters["hydra"], presets.cartesian([3, 2]), max_new_tokens=12)
    params = Params(lab.base(0), lab.draft("hydra", 0))
    prompt = np.random.default_rng(4).integers(0, lab.vocab, size=(2, 16), dtype=np.int32)
    lengths = np.array([16, 3], np.int32)
    return decode_fn, params, prompt, lengths, jax.device_get(decode_fn(params, prompt, lengths))


def assert_same(out, expected):
    for name, value in expected._asdict().items():
        np.testing.assert_array_equal(getattr(out, name), value, err_msg=name)


def test_a_plain_call_gives_the_tokens_of_the_base(lab, small_run):
    """Call `decode_fn` as a user does, fully optimised; the other tests compare with this result."""
    _, _, prompt, lengths, expected = small_run
    for row, length in enumerate(lengths):
        texts, _ = lab.references(0, [prompt[row, :length].tolist()])
        assert expected.tokens[row].tolist() == lab.expected(texts[0], length, 12)


def test_decode_fn_under_an_outer_jit(lab, small_run):
    decode_fn, params, prompt, lengths, expected = small_run

    @lab.quick_jit
    def outer(params, prompt, lengths):
        out = decode_fn(params, prompt[:, :16], lengths)
        return out._replace(steps=out.steps + 0)

    assert_same(outer(params, prompt, lengths), expected)


def test_prompts_that_are_traced_or_on_the_device(lab, small_run):
    """A traced prompt without lengths is padded in the trace."""
    decode_fn, params, prompt, lengths, expected = small_run
    assert_same(decode_fn(params, jnp.asarray(prompt), jnp.asarray(lengths)), expected)
    short = prompt[:, :7]
    assert_same(lab.quick_jit(decode_fn)(params, short), jax.device_get(decode_fn(params, short)))


def test_separate_prefill_and_donated_loop(lab, small_run):
    decode_fn, params, prompt, lengths, expected = small_run
    engine = decode_fn.engine
    state = lab.quick_jit(engine.prefill)(params, prompt, lengths, sampling(Greedy(), 2, lab.vocab))
    loop = lab.quick_jit(lambda params, state: run_steps(engine, params, state), donate_argnums=1)
    final = loop(params, state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.target.cache.layers, state.draft)))
    assert_same(result_of(final.output), expected)


@pytest.mark.parametrize("name", ["medusa", "model"])
@pytest.mark.quick("medusa")
def test_layers_that_are_traced_once_leave_the_program_as_it_is(name, monkeypatch):
    """Layers after the first one are one function of the program, which XLA inlines."""
    config = CONFIG.replace(n_layers=4)
    drafter = DRAFTERS[name][0] if name == "medusa" else DraftModel(Llama(config), 17)
    engine, calls = Engine(Llama(config), Program(drafter, TREE, max_new_tokens=16)), []
    layer = DecoderLayer.__call__
    monkeypatch.setattr(DecoderLayer, "__call__", lambda self, *inputs: (calls.append(1), layer(self, *inputs))[1])
    once, n_once = optimised_hlo(engine, 2), len(calls)
    monkeypatch.setattr(Llama, "_calls", lambda self, x: list(self.layers))
    each, n_each = optimised_hlo(engine, 2), len(calls) - n_once
    assert unordered(once) == unordered(each)
    assert n_once < n_each
    assert once.count(" cosine(") == once.count(" sine(")  # of one table for all layers


@pytest.mark.slow
def test_the_program_of_a_drafted_block_does_not_grow_with_the_block():
    """A block is one pass, whatever its size. (A Markov head links the tokens of a chain, so its chains grow.)"""

    def proposals(size: int) -> int:
        drafter = DFlash.for_base(CONFIG, jnp.float32, BlockSettings(2, size, (0, 1)))
        engine = Engine(Llama(CONFIG), Program(drafter, presets.chain(3), max_new_tokens=MAX_NEW))
        params, state = shapes(engine, 1, Greedy())
        compiled = jax.jit(engine.propose).lower(params, state).compile({"xla_backend_optimization_level": 0})
        return len(instructions(compiled.as_text()))

    assert proposals(16) <= proposals(5) * 1.02
