"""Base and draft on two of eight CPU devices: the tokens of the fused executor, after hits and after misses.

XLA fixes the number of CPU devices at its start, so the work runs in subprocesses, whose results the tests read.
"""

import itertools
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hydrajax.cli import main
from hydrajax.decoding.program import Program
from hydrajax.decoding.state import Params
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.errors import HydrajaxError
from hydrajax.sharding import Placement, make_mesh
from hydrajax.ssd.fan_out import FanOut, power_law
from hydrajax.ssd.record import SpeculationRecord
from hydrajax.ssd.speculator import MISS
from hydrajax.ssd.split_executor import SplitExecutor
from hydrajax.trees import presets

VOCAB, NEW, EOS = 96, 20, 7
PROMPTS = [[5, 17, 60, 2, 33], [90, 1, 4], [8, 8, 8, 8]]
LIMITS = [NEW, NEW, 5]


@pytest.fixture(scope="module")
def models(llama_checkpoint, tmp_path_factory):
    """A base, and a draft that is the base without its second layer, so that some of its tokens are accepted."""
    base, draft = llama_checkpoint(num_hidden_layers=2), tmp_path_factory.mktemp("draft")
    config = json.loads((base / "config.json").read_text()) | {"num_hidden_layers": 1}
    (draft / "config.json").write_text(json.dumps(config))
    tensors = load_file(base / "model.safetensors")
    for name in [name for name in tensors if ".layers.1." in name]:
        del tensors[name]
    save_file(tensors, draft / "model.safetensors")
    return base, draft


@pytest.fixture(scope="module")
def run(models, tmp_path_factory, on_eight_devices):
    def run(*cases, draft_devices=1, compare=False, generate=False):
        folder = tmp_path_factory.mktemp("split")
        settings = {"prompts": PROMPTS, "limits": LIMITS, "eos": EOS, "new": NEW, "draft_devices": draft_devices}
        (folder / "settings.json").write_text(json.dumps(settings | {"compare": compare, "generate": generate}))
        flags = "--xla_backend_optimization_level=0"
        return on_eight_devices(folder, "decode_split", *models, ",".join(cases), flags=flags)

    return run


def in_transformers(base) -> list[list[int]]:
    """Each prompt continued greedily by transformers, alone, as far as `LIMITS` and `EOS` let it go."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    texts = []
    for prompt, limit in zip(PROMPTS, LIMITS, strict=True):
        settings = {"do_sample": False, "max_new_tokens": limit, "eos_token_id": EOS, "pad_token_id": 0}
        texts.append(model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist())
    return texts


def ids(answer) -> list[list[int]]:
    return [[token for token in row if token >= 0] for row in answer["tokens"]]


@pytest.mark.slow
def test_the_tokens_equal_transformers_and_little_is_transferred(run, models):
    """With hits and misses, and sequences that end at a limit and at EOS; on the first and the last device."""
    found = run(case := "greedy/3/chain-2/24-24-24")
    assert found["homes"] == [[0], [7]]
    answer = found[case]
    wanted = in_transformers(models[0])
    assert ids(answer) == wanted
    assert len(wanted[2]) == 5
    assert any(row[-1] == EOS for row in wanted)
    assert 0 < answer["hits"] < answer["rounds"]
    assert max(map(max, answer["accept_lengths"])) > 0
    # 3 tokens for each of 3 sequences one way; a count, a token and a flag for each back.
    assert answer["crossings"] == {"hand over": [3 * 3 * 4], "tell": [3 * 4, 3 * 4, 3]}


CASES = {
    "greedy": ["greedy/1/chain-3/9-0-5-12", "greedy/3/chain-2/0-0-0"],
    "exact": ["exact/3/chain-2/24-24-24"],
    "rejection": ["rejection/3/chain-2/24-24-24", "rejection/1/chain-1/30-20"],
    "block": ["block/3/chain-2/24-24-24"],
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", CASES)
def test_every_rule_gives_the_tokens_and_steps_of_the_fused_executor(rule, run):
    """Also the same accept lengths, so a cached draft equals the draft after a miss."""
    found = run(*CASES[rule], compare=True)
    for case in CASES[rule]:
        answer = found[case]
        assert [answer["tokens"], answer["accept_lengths"]] == answer["in one program"], case
        assert answer["beside the base"] == answer["tokens"], case  # a prompt that was put there
        pairs = zip(answer["log-probabilities"], answer["log-probabilities in one program"], strict=True)
        for number, (found_there, wanted) in enumerate(pairs):
            np.testing.assert_allclose(found_there, wanted, rtol=1e-4, atol=1e-4, err_msg=f"{case} {number}")
        assert np.shape(answer["log-probabilities"][1])[2] == 3, case
        assert (answer["hits"] > 0) == ("0-0-0" not in case), case
        assert answer["hits"] < answer["rounds"], case


@pytest.mark.slow
def test_a_sharded_draft_and_bursts(run):
    """`generate`, which decodes in bursts, with a draft sharded over two devices."""
    found = run(draft_devices=2, generate=True)
    assert found["homes"] == [[0], [6, 7]]
    assert found["split"] == found["together"]


@pytest.mark.slow
def test_chat_and_serve_answer_as_on_one_device(tmp_path, on_eight_devices):
    """All verbs of the executor: turns on a prefix cache, sequences that join and leave, chunked and cached prompts."""
    found = on_eight_devices(tmp_path, "talk_split", flags="--xla_backend_optimization_level=0")
    assert found["kinds"] == ["SplitExecutor", "FusedExecutor"]
    assert found["split"] == found["one device"]
    turns, (answers, cached) = found["split"]["turns"], found["split"]["answers"]
    for each in (turns, found["split"]["recurrent"]):
        assert each[0][1] == 0 < each[1][1] < each[2][1] >= each[3][1] > 0  # cached from turn to turn
    assert sum(steps for _, steps in answers) < sum(len(ids) for ids, _ in answers)
    assert cached > 0


@pytest.mark.slow
def test_bench_compares_with_the_pair_in_turn(models, tmp_path, on_eight_devices):
    found = on_eight_devices(tmp_path, "bench_split", *models, flags="--xla_backend_optimization_level=0")
    assert found["code"] == 0
    rows = found["rows"]
    assert [row["name"] for row in rows] == ["autoregressive", "one program", "in turn", "ahead, 40 outcomes"]
    assert all(row["equal"] for row in rows)
    assert len({row["tokens_per_step"] for row in rows[1:]}) == 1
    assert [row["fan_out"] and sum(row["fan_out"]) for row in rows] == [None, None, 0, 40]
    assert [row["hit_rate"] is None for row in rows] == [True, True, True, False]


def test_speculation_record():
    """Two sequences, of which one continues after three rounds and one after a single round."""
    numbers = np.array([[0, MISS, 3, -2], [MISS, -2, -2, -2]])
    record = SpeculationRecord(numbers, np.array([[0, 1, 2, 0], [1, 0, -1, -1]]), FanOut((2, 0, 2)))
    assert (record.rounds, record.hits, record.hit_rate) == (4, 2, 0.5)
    assert record.ready_rate == pytest.approx(1 / 3)  # only in the third round no sequence waited
    assert record.outcomes().tolist() == [[1, 0, 0], [0, 0, 2], [0, 1, 0]]
    nothing = SpeculationRecord(np.full((1, 2), -2), np.zeros((1, 2), int), FanOut((1, 1)))
    assert (nothing.hit_rate, nothing.ready_rate) == (0.0, 0.0)


def test_unsupported_drafters_trees_and_fan_outs(tiny_model):
    for changes, message in [
        ({"drafter": "medusa"}, "draft_devices: got Medusa.*, expected a draft model"),
        ({"confidence": 0.3}, r"draft_confidence: got 0\.3, expected 0 with draft_devices"),
        ({"tree": "cartesian-2x2"}, "tree: got a tree that is no chain, expected a chain with draft_devices"),
        ({"tree": "root"}, "tree: got a tree that is no chain"),
        ({"fan_out": (1, 2)}, r"fan_out: got \[1, 2\], expected 4 counts for a chain of 3"),
        ({"fan_out": -3}, "fan_out: got -3, expected 0 to 1024"),
    ]:
        model, params = tiny_model
        drafter = DraftModel(model, model.config.vocab_size, confidence=changes.get("confidence", 0.0))
        if "drafter" in changes:
            drafter = MedusaHeads(3, model.config.width, model.config.vocab_size)
        program = Program(drafter, presets.by_name(changes.get("tree", "chain-3")))
        placement = Placement()
        object.__setattr__(placement, "draft", make_mesh())  # on the only device, which a `Placement` refuses
        with pytest.raises(HydrajaxError, match=message):
            SplitExecutor(model, Params(params, params), program, placement=placement, fan_out=changes.get("fan_out"))


def test_base_and_draft_on_one_device(tiny_model):
    model, params = tiny_model
    with pytest.raises(HydrajaxError, match="draft_devices: base and draft share"):
        Placement(draft=make_mesh())
    program = Program(DraftModel(model, model.config.vocab_size), presets.chain(2))
    with pytest.raises(HydrajaxError, match="placement: got no devices for the draft alone"):
        SplitExecutor(model, Params(params, params), program, placement=Placement())


def test_too_many_draft_devices(models, capsys):
    for command in ("generate --prompt x", "bench", "certify", "chat", "serve"):
        flags = f"--base {models[0]} --draft {models[1]} --tree chain-2 --draft-devices 9"
        assert main(f"{command} {flags}".split()) == 2
        *_, said = capsys.readouterr().err.strip().splitlines()
        assert said == "hydrajax: --draft-devices: got 9, expected at most 0: the base uses 1 of 1 devices"


def test_the_outcomes_of_a_fan_out():
    fan_out = FanOut((2, 0, 1))
    assert (fan_out.total, fan_out.depth) == (3, 2)
    assert fan_out.accept_lengths.tolist() == [0, 0, 2]
    assert fan_out.ranks.tolist() == [0, 1, 0]
    assert FanOut.from_budget(4).total == 12
    assert FanOut.from_budget(3, 0) == FanOut((0, 0, 0, 0))


def test_no_other_fan_out_of_the_same_size_is_likelier():
    def hits(chances, counts):
        return sum(row[:count].sum() for row, count in zip(chances, counts, strict=True))

    for budget in range(8):
        chances = np.sort(np.random.default_rng(budget).random((3, 4)), axis=1)[:, ::-1]
        chances /= 1.5 * chances.sum()
        every = [counts for counts in itertools.product(range(5), repeat=3) if sum(counts) == budget]
        likeliest = FanOut.likeliest(chances, budget).counts
        assert hits(chances, likeliest) == pytest.approx(max(hits(chances, counts) for counts in every))


def test_probabilities_that_rise_with_the_rank_are_averaged():
    assert FanOut.likeliest([[0.1, 0.4, 0.0], [0.2, 0.15, 0.0]], 2) == FanOut((2, 0))
    assert FanOut.likeliest([[0.0, 0.0], [0.0, 1.0]], 4) == FanOut((0, 2))  # no guess for an outcome of probability 0


def test_the_power_law_gives_a_geometric_series():
    """With acceptance α and exponent r the counts decrease by about α ** (1 / (1 + r))."""
    alpha, exponent = 0.5, 1.0
    counts = np.array(FanOut.likeliest(power_law(5, alpha, exponent, ranks=4000), 400).counts[:-1], float)
    ratios = counts[1:] / counts[:-1]
    np.testing.assert_allclose(ratios, alpha ** (1 / (1 + exponent)), atol=0.03)


def test_refusals():
    for call, message in [
        (lambda: FanOut((1, -1)), r"fan_out: got \[1, -1\], expected one count from 0 up"),
        (lambda: FanOut(()), r"fan_out: got \[\], expected one count"),
        (lambda: FanOut((1000, 1000)), "at most 1024 in total"),
        (lambda: FanOut.from_budget(3, -1), "fan_out: got -1, expected 0 to 1024"),
        (lambda: power_law(3, 1.0, 1.0), "acceptance: got 1.0, expected a number between 0 and 1"),
        (lambda: power_law(3, 0.5, 0.0), "exponent: got 0.0, expected a positive number"),
    ]:
        with pytest.raises(HydrajaxError, match=message):
            call()
