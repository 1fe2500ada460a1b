"""`LanguageModel` and `make_decode_fn` on the shipped model."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import hydrajax
from helpers.compilations import no_compilation
from hydrajax.cli import run_command
from hydrajax.decoding.keywords import make_request
from hydrajax.decoding.state import Params
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.none import NoDrafter
from hydrajax.drafters.several import FromText
from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.formats.draft_ref import DraftRef
from hydrajax.trees import presets
from hydrajax.trees.tree_json import content_of

ENDING = 'if __name__ == "__main__":\n    main()\n'  # the shipped model ends the text here
PROMPT = "def area(width"
NEW = 12


@pytest.fixture(scope="module")
def m():
    return hydrajax.load("shipped", "medusa")


def refused(call, message: str) -> None:
    with pytest.raises(HydrajaxError) as caught:
        call()
    assert str(caught.value) == message


def test_one_text_gives_one_result_and_a_list_gives_a_list(m):
    one = m.generate(PROMPT, tree="chain-2", max_new_tokens=NEW)
    (listed,) = m.generate([PROMPT], tree=[[0], [0, 0]], rule="greedy", max_new_tokens=NEW)
    executor = m.executor(m.program(tree=presets.chain(2), max_new_tokens=NEW))
    (by_executor,) = hydrajax.generate(executor, [PROMPT])
    assert one.output_ids == listed.output_ids == by_executor.output_ids
    assert one.text == "".join(m.stream(PROMPT, tree="chain-2", max_new_tokens=NEW))
    assert one.seed is None  # nothing was drawn


def test_a_batch_has_a_sequence(m):
    for draft in (None, "lookup"):
        refused(partial(m.generate, ["x"], draft=draft, batch_size=0), "batch_size: got 0, expected at least 1")


def test_no_prompts_give_no_results(m):
    assert m.generate([]) == []
    assert list(hydrajax.generate(m.executor(), [])) == []


def test_another_draft_gives_equal_output_and_is_loaded_once(m):
    alone = m.generate(PROMPT, draft="none", tree="root", max_new_tokens=NEW)
    drafted = m.generate(PROMPT, tree="chain-2", max_new_tokens=NEW)
    assert alone.output_ids == drafted.output_ids
    assert alone.steps == NEW > drafted.steps
    assert m._drafting("lookup") is m._drafting("lookup")


@pytest.mark.slow
def test_a_corpus_shortens_the_second_time(m):
    """`generate`, `stream` and `chat` remember, each for all calls with this draft, and nothing is compiled again."""
    drafted = m.with_draft("corpus+hydra", corpus=500)
    assert (drafted.corpus.capacity, len(drafted.corpus), m.corpus) == (500, 0, None)
    first, again = (drafted.generate(PROMPT, tree="chain-2", max_new_tokens=NEW) for _ in range(2))
    assert first.output_ids == again.output_ids
    assert again.steps <= 2 < first.steps
    assert len(drafted.corpus) == 2 * NEW
    assert "".join(drafted.stream(PROMPT, tree="chain-2", max_new_tokens=NEW)) == first.text
    assert len(drafted.corpus) == 3 * NEW
    alone = m.with_draft("none", corpus=500)
    assert (alone.drafter, alone.corpus.capacity) == (FromText(), 500)
    refused(lambda: m.with_draft("corpus", corpus=9), "corpus: got 9 tokens, expected 65 to 16777216")


def test_a_conversation_is_a_prompt(m, monkeypatch):
    template = "{% for x in messages %}{{ x.role }}: {{ x.content }}\n{% endfor %}{{ 'assistant:' }}"
    monkeypatch.setattr(m.tokenizer, "chat_template", template)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    (answer,) = m.generate([messages], tree="chain-2", max_new_tokens=NEW)
    assert answer.prompt_ids == m.tokenizer.encode("system: be brief\nuser: hi\nassistant:")
    wrong = "prompt 0: message 0: got {'role': 'user'}, expected texts role and content"
    refused(lambda: m.generate([[{"role": "user"}]]), wrong)
    wrong = "prompts: got one conversation, expected a list of prompts; write [messages]"
    refused(lambda: m.generate(messages), wrong)


def test_a_seed_is_drawn_and_reported(m):
    settings = {"rule": "exact", "temperature": 3.0, "tree": "chain-2", "max_new_tokens": NEW}
    first, second = m.generate(PROMPT, **settings), m.generate(PROMPT, **settings)
    assert first.seed != second.seed
    assert first.output_ids != second.output_ids
    assert m.generate(PROMPT, seed=first.seed, **settings).output_ids == first.output_ids


def test_seeds_that_jax_would_wrap_or_refuse(m):
    for seed in [2**63, 2**32, -1, 1.5, "3", [2**32], [-1]]:
        for rule in ("greedy", "exact"):
            with pytest.raises(HydrajaxError, match=r"^seed: got .*, expected an integer from 0 to 4294967295$"):
                m.generate([PROMPT], rule=rule, seed=seed, tree="chain-2", max_new_tokens=NEW)
        if not isinstance(seed, list):
            with pytest.raises(HydrajaxError, match=r"^seed: got "):
                m.stream(PROMPT, rule="exact", seed=seed, tree="chain-2")
            with pytest.raises(HydrajaxError, match=r"^seed: got "):
                m.chat(template="plain", rule="exact", seed=seed)


def test_prompts_that_are_none(m, unchecked):
    for prompts in (None, 5, b"ab"):
        refused(lambda: m.generate(prompts), f"prompts: got {prompts!r}, expected a text or a list of prompts")  # noqa: B023
    for prompt in (5.0, None, b"ab"):
        message = f"prompt 0: got {prompt!r}, expected text, token ids or messages"
        refused(lambda: m.generate([prompt]), message)  # noqa: B023
        refused(lambda: m.encode([prompt]), message)  # noqa: B023
    refused(lambda: m.encode(None), "prompts: got None, expected a list of prompts")
    refused(lambda: m.stream(None, tree="root"), "prompt: got None, expected text, token ids or messages")


def test_a_rule_of_traced_parameters(unchecked):
    todo = "make the ExactSampling outside of the program and pass it as an argument"
    message = f"top_p: got a traced value, expected a number: {todo}"
    refused(lambda: jax.eval_shape(lambda share: hydrajax.ExactSampling(top_p=share), 0.5), message)


def test_a_decode_function_of_a_loaded_model_ends_at_eos(m):
    decode_fn = hydrajax.make_decode_fn(m, tree="chain-2", rule="greedy", max_new_tokens=NEW)
    out = decode_fn(m.params, *m.encode([PROMPT, ENDING]))
    assert out.lengths.tolist() == [NEW, 1]
    assert out.ids()[1] == [m.eos_ids[0]]
    assert m.decode(out) == [m.generate(PROMPT, tree="chain-2", max_new_tokens=NEW).text, ""]
    parts = hydrajax.make_decode_fn(m.model, m.drafter, presets.chain(2), max_new_tokens=NEW)
    assert parts(m.params, *m.encode([ENDING])).lengths.tolist() == [NEW]  # no EOS ids were named


def test_a_rule_that_samples_needs_a_key(m):
    decode_fn, prompt = hydrajax.make_decode_fn(m, tree="chain-2", rule="exact"), m.encode([PROMPT])
    wrong = "rng: got None, expected a key because this rule samples: pass rng=jax.random.key(seed)"
    refused(lambda: decode_fn(m.params, *prompt), wrong)
    wrong = "rng: got int32 [1], expected a jax.random.key or one per prompt"
    refused(lambda: decode_fn(m.params, *prompt, rng=jnp.zeros(1, jnp.int32)), wrong)


def test_the_default_tree_is_small_on_a_cpu(m, tmp_path, monkeypatch):
    without_one = dataclasses.replace(m, draft_directory=None)
    assert without_one.drafter.spec.default_tree == "mc_sim_7b_63"
    assert without_one.default_tree() == presets.tree_of([[0], [0, 0], [0, 0, 0], [1], [0, 0, 0, 0]])
    sizes = [without_one.default_tree(batch_size).size for batch_size in (2, 4, 5, 6, 64)]
    assert sizes == [5, 2, 2, 1, 1]  # of a step's 10 rows
    for draft, batch_size, rule, expected in (
        (m, 5, "greedy", (MedusaHeads, 2)),
        (m, 6, "greedy", (NoDrafter, 1)),  # heads would read the text for nothing
        (m.with_draft("lookup"), 6, "greedy", (PromptLookup, 1)),  # the last sequences have guesses
        (m, 6, "typical", (MedusaHeads, m.default_tree().size)),  # whose output depends on the tree
    ):
        request = make_request(rule)
        program = draft.with_tree(draft.program(request), request, batch_size=batch_size)
        assert (type(program.drafter), program.tree.size) == expected
    int4 = dataclasses.replace(m, model=m.model.clone(quantize="int4"))
    assert int4.default_tree() == presets.chain(1)
    searched = {None: presets.chain(3), "int4": presets.chain(2)}  # it is not cut for the type that it was searched for
    for quantize, tree in searched.items():
        presets.searched_path(tmp_path, 1, quantize).write_text(json.dumps(content_of(tree)))
    of_floats, of_int4 = (dataclasses.replace(each, draft_directory=tmp_path) for each in (m, int4))
    int8 = dataclasses.replace(of_int4, model=m.model.clone(quantize="int8"))
    trees = [each.default_tree() for each in (of_floats, of_int4, int8)]
    assert trees == [presets.chain(3), presets.chain(2), presets.chain(1)]
    presets.searched_path(tmp_path, 8).write_text(json.dumps(content_of(presets.chain(2))))
    assert [of_floats.default_tree(batch_size).size for batch_size in (4, 8, 16)] == [2, 3, 3]
    presets.searched_path(tmp_path, 1, "avx512").write_text(json.dumps(content_of(presets.chain(5))))
    monkeypatch.setattr("hydrajax.ops.trace.has_cpu_kernels", lambda: True)
    monkeypatch.setattr("hydrajax.ops.cpu.library.is_avx512", lambda: True)
    with_branch = dataclasses.replace(of_floats, drafter=DraftRef.parse("lookup+heads").wrap(m.drafter))
    trees = [each.default_tree() for each in (of_floats, of_int4, with_branch)]
    assert trees == [presets.chain(5), presets.chain(2), presets.chain(3)]
    monkeypatch.setattr("hydrajax.ops.trace.on_cpu", lambda: False)
    assert without_one.default_tree() == presets.by_name("mc_sim_7b_63")


def test_a_chat_of_a_loaded_model(m):
    chat = m.chat(template="plain", rule="exact", temperature=0.8, tree="chain-2", max_new_tokens=4)
    again = m.chat(template="plain", rule="exact", temperature=0.8, tree="chain-2", max_new_tokens=4, seed=chat.seed)
    assert "".join(chat.send("def f(")) == "".join(again.send("def f("))


def test_repr_is_a_line_that_fetches_nothing(m):
    abstract = m.with_draft("medusa")
    abstract.params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), m.params)
    drafted = "Medusa with 2.9M; vocabulary 4096, context 1024; tokenizer"
    assert repr(abstract) == repr(m) == f"<LanguageModel: Llama with 18.1M parameters, float32; {drafted}>"


def test_parameters_are_counted_rather_than_printed(m):
    """`repr(m.params)` printed every weight: 321,000 characters. A tree of other leaves keeps its repr."""
    count = sum(leaf.size for leaf in jax.tree.leaves(m.params.base))
    assert f"Params(base=<{count:,} parameters in " in repr(m.params)
    assert len(repr(m.params)) < 200
    assert repr(m.params._replace(draft={})).endswith("draft={})")
    assert repr(m.params._replace(draft={"scale": "data"})).endswith("draft={'scale': 'data'})")


def test_a_temperature_alone_samples_and_0_is_greedy(m):
    how = {"tree": "chain-2", "max_new_tokens": NEW}
    greedy, sample = m.generate(PROMPT, **how), m.generate(PROMPT, rule="exact", temperature=1.5, seed=3, **how)
    assert m.generate(PROMPT, temperature=1.5, seed=3, **how).output_ids == sample.output_ids != greedy.output_ids
    for numbers in ({"temperature": 0}, {"temperature": 0.0, "top_p": 0.9}, {"rule": "greedy", "temperature": 0}):
        assert m.generate(PROMPT, **numbers, **how).output_ids == greedy.output_ids
    both = m.generate([PROMPT, PROMPT], temperature=[0, 1.5], seed=[3, 3], batch_size=2, **how)
    assert [one.output_ids for one in both] == [greedy.output_ids, sample.output_ids]
    assert "".join(m.stream(PROMPT, temperature=1.5, seed=3, **how)) == sample.text


def test_unknown_arguments_get_a_hint(m):
    for name, hint in {
        "max_tokens": "did you mean max_new_tokens?",
        "do_sample": "did you mean temperature=0.7, which samples (0 is greedy)?",
        "temprature": "did you mean temperature?",
        "drft": "did you mean draft?",
        "streamer": "did you mean the method stream?",
        "num_beams": "hydrajax has no beam search",
    }.items():
        refused(partial(m.generate, PROMPT, **{name: 1}), f"{name}: unknown argument; {hint}")
    message = "max_tokens: unknown argument; did you mean max_new_tokens?"
    refused(lambda: m.stream(PROMPT, max_tokens=8), message)
    refused(lambda: m.chat(max_tokens=8), message)
    with pytest.raises(HydrajaxError, match="synced_gpus: unknown argument; expected one of temperature, top_k, "):
        m.generate(PROMPT, synced_gpus=True)


def test_what_cannot_be_used_is_named_as_in_python(m, monkeypatch):
    others = "typical, exact, rejection, traversal, block"
    refused(lambda: m.generate(PROMPT, rule="oak"), f"rule: got 'oak', expected greedy, {others}")
    message = f": got a value for the rule greedy, expected none, only with {others}"
    refused(lambda: m.generate(PROMPT, rule="greedy", temperature=0.5), f"temperature{message}")
    refused(lambda: m.generate(PROMPT, top_p=0.5), f"top_p{message} or with a temperature")
    given = hydrajax.ExactSampling()
    message = "top_k: got a value next to a rule object, expected none: set it in the rule"
    refused(lambda: m.generate(PROMPT, rule=given, top_k=3), message)
    message = "temperature: got 3 values for 1 prompts, expected one or one per prompt"
    refused(lambda: m.generate([PROMPT], rule="exact", temperature=[1, 2, 3]), message)
    refused(lambda: hydrajax.load("/nowhere"), "base: no such directory: /nowhere")
    refused(lambda: hydrajax.load("shiped"), "base: no such directory: shiped; known names: shipped, smollm2")
    message = "draft: no such directory: eagle; 'eagle' is a kind of draft with weights: name the directory with "
    refused(lambda: hydrajax.load("shipped", "eagle"), f"{message}its files")
    message = "draft: no such directory: hydra+; known names: hydra++, hydra, draft-model, medusa, dspark, "
    refused(lambda: hydrajax.load("shipped", "hydra+"), f"{message}lookahead, corpus, none, lookup, mtp")
    refused(lambda: m.encode(PROMPT), "prompts: got one text, expected a list: write [text]")
    monkeypatch.setattr(m.tokenizer, "chat_template", None)
    message = "template: the tokenizer has no chat template; choose one of vicuna, plain, raw; for a base without chat "
    refused(lambda: m.chat(), f"{message}training --template plain")
    message = "prompt 0: got messages, but the base has no chat template; give text, or use m.chat(template='plain')"
    refused(lambda: m.generate([[{"role": "user", "content": "hi"}]]), message)
    message = "drafter: is required with a base model; the result of hydrajax.load has one"
    refused(lambda: hydrajax.make_decode_fn(m.model), message)


def test_a_field_is_a_flag_where_the_command_has_it(capsys):
    error = not_allowed("max_nodes", 7, ("1", "2"))
    assert (error.field, error.found, error.allowed) == ("max_nodes", 7, ("1", "2"))
    assert HydrajaxError("no field here").field is None

    def run(args):
        raise error

    for flag, name in (("--max-nodes", "--max-nodes"), ("--other", "max_nodes")):
        assert run_command("x", "help", lambda parser, flag=flag: parser.add_argument(flag), run, []) == 2
        assert capsys.readouterr().err == f"hydrajax: {name}: got '7', expected 1, 2\n"


def test_new_weights_reach_every_draft_and_compile_nothing(m):
    m = dataclasses.replace(m, params=Params(jax.tree.map(jnp.copy, m.params.base), m.params.draft))
    old = jax.tree.map(jnp.copy, m.params.base)
    changed = old | {"embedding": jnp.flip(old["embedding"], axis=0)}

    def texts():
        drafts = (None, "lookup")
        return [m.generate([PROMPT], draft=draft, tree="chain-2", max_new_tokens=NEW)[0].output_ids for draft in drafts]

    before = texts()
    with no_compilation():
        m.update_params(changed)
        after = texts()
        m.update_params(old)
        assert texts() == before
    assert before[0] == before[1] != after[0] == after[1]
    del old["layers_3"]["qkv"]
    wrong = "got nothing, expected float32 [384, 6, 3, 64]; pass the parameters that were loaded"
    refused(
        lambda: m.update_params(old),
        f"params.base['layers_3']['qkv']: {wrong} with this model and draft, in their own dtype",
    )
