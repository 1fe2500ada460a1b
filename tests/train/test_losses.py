"""Training objectives against torch (values and gradients), the official Hydra code, and documents apart.

Nothing here uses the package's own loss as the reference: torch differentiates the formulas of the released trainer
with respect to logits and hidden states, and `jax.vjp` carries that through the drafter.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from helpers.draft_heads import forced_logits
from helpers.loss_examples import HEADS, MIXED, VOCAB, WIDTH, random_params
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.models.base_model import BoundBase
from hydrajax.models.init import init_base
from hydrajax.models.llama import Llama
from hydrajax.train.chunks import sum_over_chunks
from hydrajax.train.losses import IGNORED, Objective, draft_loss, language_model_loss


@pytest.fixture
def base(tiny_model):
    return BoundBase(*tiny_model)


def compared_in_torch(name, eta, logits, p):
    """The losses of arXiv 2602.23881 by torch's own functions, one for each row."""
    if name == "cross_entropy":
        return torch.nn.functional.cross_entropy(logits, p, reduction="none")
    distance = (logits.softmax(-1) - p).abs().sum(-1) / 2
    if name == "tv":
        return distance
    if name == "lk":
        return -torch.log1p(-distance)
    share = torch.exp(-eta * (1 - distance.detach()))
    kl = torch.nn.functional.kl_div(logits.log_softmax(-1), p, reduction="none").sum(-1)
    return share * kl + (1 - share) * distance


def d_pace_in_torch(head_logits, labels, alpha):
    """Weights by autograd: the derivative of the expected number of accepted guesses in each log-confidence."""
    weights = torch.zeros(head_logits.shape[:-1])
    for row, at in np.ndindex(*labels.shape):
        targets = {k: at + k + 2 for k in range(len(head_logits))}
        heads = [k for k, t in targets.items() if t < labels.shape[1] and labels[row, t] != IGNORED]
        found = [head_logits[k, row, at].softmax(-1)[labels[row, targets[k]]].item() for k in heads]
        logs = torch.log((1 - alpha) * torch.tensor(found) + alpha).requires_grad_()
        if heads:
            logs.cumsum(0).exp().sum().backward()
            weights[heads, row, at] = logs.grad
    return weights


def in_torch(objective, head_logits, read, base_logits, hidden, labels):
    """The formulas of the released code: ``(loss, metrics, d loss / d logits, d loss / d read)``."""
    head_logits, read = (torch.from_numpy(np.array(x)).requires_grad_() for x in (head_logits, read))
    base_logits, hidden, labels = (torch.from_numpy(np.array(x)) for x in (base_logits, hidden, labels))
    cross_entropy, total, metrics = torch.nn.functional.cross_entropy, 0.0, []
    weights = torch.full(head_logits.shape[:-1], 1.0)
    if objective.position_weights == "d_pace":
        weights = d_pace_in_torch(head_logits.detach(), labels, objective.d_pace_alpha)
    for k in range(len(head_logits)):
        shift = k + 2
        counts = labels[:, shift:] != IGNORED
        logits, text = head_logits[k][:, :-shift][counts], labels[:, shift:][counts].long()
        taught = base_logits[:, shift - 1 : -1][counts]
        lm = cross_entropy(logits, text, reduction="none")
        sharp = (taught / objective.teacher_temperature).softmax(-1)
        teacher = compared_in_torch(objective.loss, objective.lk_eta, logits, sharp)
        weight = weights[k][:, :-shift][counts]
        counts = labels[:, shift - 1 :] != IGNORED
        gap = read[k][:, : 1 - shift][counts], hidden[:, shift - 1 :][counts]
        reconstruction = torch.nn.functional.smooth_l1_loss(*gap)
        best = logits.argmax(-1)
        metrics.append([lm.mean(), teacher.mean(), reconstruction, (best == text).float().mean()])
        metrics[-1].append((best == taught.argmax(-1)).float().mean())
        part = (weight * (objective.lm_weight * lm + objective.teacher_weight * teacher)).mean()
        decay = objective.head_decay if objective.position_weights == "decay" else 1.0
        total = total + decay**k * (part + objective.reconstruction_weight * reconstruction)
    gradients = torch.autograd.grad(total, [head_logits, read], allow_unused=True, materialize_grads=True)
    metrics = np.array([[x.item() for x in row] for row in metrics]).T
    return total.item(), metrics, *(x.numpy() for x in gradients)


CASES = {
    "medusa": (MedusaHeads, Objective(lm_weight=1.0, teacher_weight=0.0, head_decay=0.8, chunk_tokens=8)),
    "reconstruction": (MedusaHeads, Objective(teacher_weight=0.0, reconstruction_weight=1.0)),
    "all": (HydraHeads, Objective(**MIXED, head_decay=0.9, chunk_tokens=2)),
    "tv": (HydraHeads, Objective(loss="tv", teacher_temperature=0.7)),
    "lk": (HydraHeads, Objective(loss="lk", head_decay=0.8)),
    "lk_hybrid": (MedusaHeads, Objective(loss="lk_hybrid", lk_eta=2.0, lm_weight=0.5, position_weights="d_pace")),
}


@pytest.mark.quick("all", "medusa", "reconstruction", "lk_hybrid")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_torch(base, example, name):
    aux_hidden_states, hidden, batch = example
    heads, objective = CASES[name]
    drafter = heads(HEADS, WIDTH, VOCAB, n_layers=2)
    params = random_params(drafter, base)

    def halves(params, aux_hidden_states):
        read = drafter.teacher_hidden(params, aux_hidden_states, batch["tokens"], base)
        return forced_logits(drafter, params, aux_hidden_states, batch["tokens"], base), jnp.stack(read)

    def pull(params, aux_hidden_states, *slopes):
        return jax.vjp(halves, params, aux_hidden_states)[1](slopes)

    def loss_fn(params, aux_hidden_states):
        return draft_loss(objective, drafter, params, aux_hidden_states, hidden, batch, base)

    outputs = jax.jit(halves)(params, aux_hidden_states)
    expected, metrics, *slopes = in_torch(objective, *outputs, base.logits(hidden), hidden, batch["labels"])
    step = jax.jit(jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True))
    (loss, ours), grads = step(params, aux_hidden_states)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    if name == "medusa":  # the program without gradients is another one
        assert float(jax.jit(loss_fn)(params, aux_hidden_states)[0]) == pytest.approx(expected, rel=1e-5)
    for ours_of, theirs, field in zip(ours, metrics, ours._fields, strict=True):
        weight = {"reconstruction": objective.reconstruction_weight, "teacher": objective.teacher_weight}
        weight["agreement"] = objective.teacher_weight
        if weight.get(field, objective.teacher_weight + objective.lm_weight):
            np.testing.assert_allclose(ours_of, theirs, rtol=1e-5, atol=1e-6, err_msg=field)
        else:
            assert np.isnan(ours_of).all(), field
    expected_grads = jax.jit(pull)(params, aux_hidden_states, *slopes)
    for mine, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def vocabulary_shapes(fn, *arrays) -> set[int]:
    """Elements of every array of logits (a multiple of the prime vocabulary, more than a kernel) in the compiled code.

    The whole program, inside fusions too.
    """
    hlo = jax.jit(fn).lower(*arrays).compile().as_text()
    sizes = {math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", hlo)}
    return {size for size in sizes if size % VOCAB == 0 and size > WIDTH * VOCAB}


def test_logits_never_exist_for_all_positions_at_once(base):
    random = np.random.default_rng(3)
    batch, length = 3, 40
    aux_hidden_states = random.standard_normal((batch, length, WIDTH)).astype(np.float32)
    tokens = random.integers(VOCAB, size=(batch, length), dtype=np.int32)
    drafter = HydraHeads(HEADS, WIDTH, VOCAB)
    params = random_params(drafter, base)

    def loss(params, chunk_tokens):
        objective = Objective(**MIXED, chunk_tokens=chunk_tokens)
        rows = {"tokens": tokens, "labels": tokens}
        return draft_loss(objective, drafter, params, aux_hidden_states, aux_hidden_states, rows, base)[0]

    whole, halo = batch * length * VOCAB, batch * (HEADS - 1) * VOCAB
    sizes = vocabulary_shapes(jax.grad(functools.partial(loss, chunk_tokens=45)), params)
    # 3 chunks of 14 positions: those of one head, and the base's with the halo that later heads need.
    assert max(sizes) == batch * 14 * VOCAB + halo
    assert batch * 14 * VOCAB in sizes
    # The search finds such arrays where they exist.
    assert whole in vocabulary_shapes(jax.grad(functools.partial(loss, chunk_tokens=10**6)), params)


def test_heads_that_know_some_tokens_learn_their_share(base, example):
    """Their loss is the cross entropy between both distributions over these tokens, where the base's best of all tokens
    is one of them (the text's token, for the loss of the text); elsewhere nothing.
    """
    aux_hidden_states, hidden, batch = example
    known = np.arange(0, VOCAB, 3)
    drafter = HydraHeads(1, WIDTH, VOCAB, small_lm_head=LmHead(vocabulary=Vocabulary(known.tolist())))
    params = random_params(drafter, base)

    def both(weights):
        objective = Objective(**weights, chunk_tokens=8)
        return jax.jit(lambda x: draft_loss(objective, drafter, x, aux_hidden_states, hidden, batch, base))(params)

    teacher, metrics = both({"teacher_weight": 1.0})
    lm, _ = both({"teacher_weight": 0.0, "lm_weight": 1.0})
    forced = jax.jit(lambda x: forced_logits(drafter, x, aux_hidden_states, batch["tokens"], base))
    logits = np.asarray(forced(params))[0]
    log_p = np.log(np.exp(logits[..., known]) / np.exp(logits[..., known]).sum(-1, keepdims=True))
    teacher_logits = np.asarray(base.logits(hidden))
    expected, n_targets = {"teacher": 0.0, "lm": 0.0, "agreement": 0, "top1": 0}, 0
    for row, at in np.ndindex(2, 9):
        text = batch["labels"][row, at + 2]
        if text == IGNORED:
            continue
        n_targets += 1
        wanted, best = teacher_logits[row, at + 1], known[log_p[row, at].argmax()]
        if wanted.argmax() in known:
            p = np.exp(wanted[known]) / np.exp(wanted[known]).sum()
            expected["teacher"] -= p @ log_p[row, at]
            expected["agreement"] += best == wanted.argmax()
        if text in known:
            expected["lm"] -= log_p[row, at, list(known).index(text)]
            expected["top1"] += best == text
    assert min(expected["lm"], expected["teacher"]) > 0
    assert float(teacher) == pytest.approx(expected["teacher"] / n_targets, rel=1e-5)
    assert float(lm) == pytest.approx(expected["lm"] / n_targets, rel=1e-5)
    for name, value in expected.items():
        assert float(getattr(metrics, name)[0]) == pytest.approx(value / n_targets, rel=1e-5), name


def test_bfloat16_is_summed_in_float32(base):
    """256 chunks of one position, the case in which sums in bfloat16 would lose most."""
    random = np.random.default_rng(0)
    cast = functools.partial(jax.tree.map, lambda x: jnp.asarray(x, jnp.bfloat16))
    low = BoundBase(Llama(base.config, jnp.bfloat16), cast(base.params))
    drafter = MedusaHeads(1, WIDTH, VOCAB, lm_head_bias=True, dtype=jnp.bfloat16)
    params = cast(random_params(drafter, low))
    aux_hidden_states = jnp.asarray(random.standard_normal((1, 256, WIDTH)), jnp.bfloat16)
    tokens = random.integers(VOCAB, size=(1, 256), dtype=np.int32)
    objective = Objective(lm_weight=1.0, teacher_weight=0.0, chunk_tokens=1)

    @jax.jit
    def step(params):
        rows = {"tokens": tokens, "labels": tokens}
        loss = functools.partial(draft_loss, objective, drafter)
        value_and_grad = jax.value_and_grad(lambda p: loss(p, aux_hidden_states, aux_hidden_states, rows, low)[0])
        return value_and_grad(params), forced_logits(drafter, params, aux_hidden_states, tokens, low)

    (value, grads), logits = step(params)
    logits = torch.from_numpy(np.array(logits[0, 0, :-2], np.float64)).requires_grad_()
    expected = torch.nn.functional.cross_entropy(logits, torch.from_numpy(tokens[0, 2:]).long())
    assert value.dtype == jnp.float32
    assert float(value) == pytest.approx(expected.item(), rel=1e-5)
    terms = torch.autograd.grad(expected, logits)[0]
    in_bfloat16 = functools.reduce(torch.add, terms.bfloat16())
    bias = grads["head_0"]["lm_bias"]
    assert bias.dtype == jnp.bfloat16
    wrong = np.abs(np.asarray(bias, np.float64) - terms.sum(dim=0).numpy()).mean()
    assert wrong < 0.3 * (in_bfloat16.double() - terms.sum(dim=0)).abs().mean()


def test_language_model_loss_equals_torch(base, example):
    _, hidden, batch = example
    kernel, rows = (torch.from_numpy(np.array(x)).requires_grad_() for x in (base.params["lm_head"], hidden))
    text = torch.from_numpy(batch["labels"][:, 1:]).long()
    logits = (rows @ kernel)[:, :-1]
    cross_entropy = functools.partial(torch.nn.functional.cross_entropy, ignore_index=IGNORED, reduction="sum")
    expected = cross_entropy(logits.reshape(-1, VOCAB), text.reshape(-1))

    def loss(params, hidden):
        found = language_model_loss(base.model, params, hidden, batch["labels"], chunk_tokens=8)
        return found.nats, found.n_targets

    (total, count), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(base.params, hidden)
    assert float(total) == pytest.approx(expected.item(), rel=1e-5)
    assert float(count) == (batch["labels"][:, 1:] != IGNORED).sum()
    slopes = torch.autograd.grad(expected, [kernel, rows])
    for ours, theirs in zip((grads[0]["lm_head"], grads[1]), slopes, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    segments = jnp.asarray([[1] * 5 + [2] * 6] * 2)
    # The two documents of one sequence, in separate sequences of the same length.
    labels = np.where(np.array(segments) == np.array([[[1]], [[2]]]), batch["labels"], IGNORED)
    labels[1, :, 5] = IGNORED  # would cross the documents

    @jax.jit
    def sums(labels, segments):
        return language_model_loss(base.model, base.params, hidden, labels, segments, chunk_tokens=8)[:2]

    apart, packed = [sums(x, jnp.ones_like(segments)) for x in labels], sums(batch["labels"], segments)
    np.testing.assert_allclose(packed, np.sum(apart, axis=0), rtol=1e-5)


def test_what_a_model_learns_from_another_equals_torch(base, example):
    """A teacher of another width: only the vocabulary must be equal."""
    _, hidden, batch = example
    config = base.model.config.replace(width=24, n_layers=1)
    params = jax.jit(lambda: init_base(Llama(config), jax.random.key(4)))()
    teacher = BoundBase(Llama(config), jax.tree.map(lambda x: 30 * x, params))  # sure of some tokens
    theirs = jax.random.normal(jax.random.key(6), (*batch["tokens"].shape, 24))
    counts = torch.from_numpy(batch["labels"][:, 1:] != IGNORED)
    rows = torch.from_numpy(np.array(hidden)).requires_grad_()
    log_q = torch.log_softmax(rows @ torch.from_numpy(np.array(base.params["lm_head"])), -1)[:, :-1][counts]
    log_p = torch.log_softmax(torch.from_numpy(np.array(jax.jit(teacher.logits)(theirs))), -1)[:, :-1][counts]
    kl = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="sum")

    def loss(hidden):
        settings = {"chunk_tokens": 8, "teacher": (teacher, theirs)}
        found = language_model_loss(base.model, base.params, hidden, batch["labels"], **settings)
        return found.nats, found

    (total, found), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(hidden)
    assert float(total) == pytest.approx(kl.item(), rel=1e-5)
    np.testing.assert_allclose(grad, torch.autograd.grad(kl, rows)[0], rtol=1e-4, atol=1e-5)
    overlap = torch.minimum(log_p.exp(), log_q.exp()).sum().item()
    assert float(found.similarity["acceptance"]) == pytest.approx(overlap, rel=1e-5)
    assert float(found.similarity["agreement"]) == (log_p.argmax(-1) == log_q.argmax(-1)).sum()


def test_parameters_that_no_part_reads_are_not_carried():
    """Their gradients are zeros, which would take memory and time in every chunk."""
    params = {"both": jnp.ones((4, 3)), "unread": jnp.ones((7, 11))}
    x, targets = jnp.ones((5, 2, 4)), jnp.ones((5, 2, 3))

    def part(params, x, targets, shared):
        gap = jnp.sum((x @ params["both"] - targets) ** 2)
        return shared * gap, gap

    def loss(params):
        return sum_over_chunks([part], lambda scale, i: scale, params, [x], [targets], 0.5)[0]

    program = jax.make_jaxpr(jax.grad(loss))(params)
    (loop,) = (one for one in program.eqns if one.primitive.name == "scan")
    shapes = [var.aval.shape for var in loop.outvars]
    assert params["both"].shape in shapes
    assert params["unread"].shape not in shapes
