"""Conversations on the shipped model: every answer equals the one from an empty cache."""

import io

import pytest

import hydrajax
from helpers import letters
from helpers.lab import hybrid_lab
from hydrajax import assets
from hydrajax.conversation import Chat, Turn
from hydrajax.decoding.processors import LogitBias, Penalties
from hydrajax.decoding.request import Request
from hydrajax.decoding.state_snapshots import TAIL
from hydrajax.errors import HydrajaxError
from hydrajax.trees import presets

TREE, NEW = presets.chain(2), 16
MESSAGES = ["def first(items):", "import sys", "class Third:"]


@pytest.fixture(scope="module", autouse=True)
def one_width():
    """All prompts of these conversations are padded to 128 tokens, so that they share the programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hydrajax.decoding.prompt_batch.SMALLEST_BUCKET", 128)
        yield


@pytest.fixture(scope="module")
def loaded():
    return hydrajax.load(assets.base(), assets.path("hydra_pp"))


def executor(loaded):
    return loaded.executor(loaded.program(tree=TREE, max_new_tokens=NEW))


def make(loaded) -> Chat:
    return Chat(executor(loaded), template="plain")


def cold(loaded, chat: Chat) -> str:
    """Return the last answer, generated from an empty cache."""
    ids = loaded.tokenizer.encode(
        "".join(
            message["content"] + ("\n" if message["role"] == "user" else loaded.tokenizer.eos_token)
            for message in chat.messages[:-1]
        ),
        add_special_tokens=False,
    )
    assert chat.turn.prompt_tokens == len(ids)
    return next(hydrajax.generate(executor(loaded), [ids])).text


def test_every_turn_answers_the_whole_conversation(loaded):
    chat, reused = make(loaded), []
    for message in MESSAGES:
        answer = "".join(chat.send(message))
        assert answer == cold(loaded, chat)
        assert chat.messages[-2:] == [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
        assert 0 < chat.turn.new_tokens <= NEW
        assert chat.turn.steps < chat.turn.new_tokens
        reused.append(chat.turn.reused)
    assert reused[0] == 0
    assert max(reused) > NEW  # the prompt before and its answer


def test_the_rate_leaves_out_prefill_and_compilation():
    turn = Turn(new_tokens=21, steps=9, seconds=12.0, first_tokens=1, first_seconds=10.0)  # 10 s of compilation
    assert turn.tokens_per_second == pytest.approx(10)
    assert Turn(new_tokens=3, steps=1, seconds=10.0, first_tokens=3, first_seconds=10.0).tokens_per_second is None


def test_the_first_turn_compiles_before_its_first_token(loaded):
    chat = make(loaded)
    pieces = chat.send(MESSAGES[0])
    next(pieces)
    first = chat.turn.first_seconds
    assert (chat.turn.first_tokens, chat.turn.seconds) == (chat.turn.new_tokens, first)
    assert "".join(pieces)
    assert (chat.turn.first_seconds, chat.turn.steps > 1) == (first, True)
    assert chat.turn.seconds > first


def test_an_edited_conversation_keeps_the_cache_up_to_the_edit(loaded):
    """An answer that the tokenizer splits into other tokens than the model wrote is such an edit."""
    chat = make(loaded)
    list(chat.send(MESSAGES[0]))
    chat.messages[1]["content"] = "    return items[0]\n"
    answer = "".join(chat.send(MESSAGES[1]))
    assert 0 < chat.turn.reused < len(loaded.tokenizer.encode(MESSAGES[0] + "\n    return items[0]"))
    assert answer == cold(loaded, chat)


@pytest.mark.slow
def test_an_edited_conversation_is_penalised_for_what_it_holds_now(loaded):
    request = Request(processors=(Penalties(repetition_penalty=1.5),), max_new_tokens=NEW)
    program = loaded.program(request, tree=TREE)
    chat, fresh = (Chat(loaded.executor(program, request), template="plain") for _ in range(2))
    list(chat.send(MESSAGES[0]))
    chat.messages[1]["content"] = "    return items[0]\n"
    fresh.messages = [dict(message) for message in chat.messages]
    assert "".join(chat.send(MESSAGES[1])) == "".join(fresh.send(MESSAGES[1]))
    assert (chat.turn.reused > 0, fresh.turn.reused) == (True, 0)


@pytest.mark.slow
def test_a_chat_on_recurrent_layers_returns_to_snapshots():
    m = letters.model("hydra++", hybrid_lab())
    request = Request(processors=(LogitBias({letters.END: -1e9}),), max_new_tokens=9)  # each answer has nine letters
    program = m.program(request, tree=letters.TREE)
    chat, fresh = (Chat(m.executor(program, request)) for _ in range(2))

    def reused(message: str, keep: int | None = None, answer: str | None = None) -> int:
        """Send a message after the first ``keep``, the last of which may be replaced; compare with a new chat."""
        del chat.messages[len(chat.messages) if keep is None else keep :]
        if answer is not None:
            chat.messages[-1]["content"] = answer
        fresh.reset()
        fresh.messages = [dict(each) for each in chat.messages]
        assert "".join(chat.send(message)) == "".join(fresh.send(message))
        assert (fresh.turn.reused, fresh.turn.new_tokens) == (0, chat.turn.new_tokens)
        return chat.turn.reused

    first = "abcdefghijklmnoabcdefghijklmnoabcd"
    assert reused(first) == 0
    second = chat.turn.prompt_tokens + 9  # where the first answer ends
    assert reused("hello") == second
    third = chat.turn.prompt_tokens + 9
    assert reused("mine") == third
    assert reused("good", answer="fine") == third  # as a template that rewrites the last answer
    assert reused("name", keep=2) == second
    assert reused("face", keep=2) == second
    fourth = chat.turn.prompt_tokens + 9
    assert fourth < third  # whose snapshot is of another text
    assert reused("hello ko") == fourth
    assert reused("so", answer="me") == fourth
    assert reused(first[:28] + "aa", keep=0) == len(first) + 1 - TAIL
    assert reused("ok", keep=0) == 0


def test_an_answer_broken_off_stays_as_far_as_it_went(loaded):
    chat = make(loaded)
    pieces = chat.send(MESSAGES[0])
    first = next(pieces)
    pieces.close()
    assert chat.messages[-1] == {"role": "assistant", "content": first}
    answer = "".join(chat.send(MESSAGES[1]))
    assert answer == cold(loaded, chat)
    chat.reset()
    assert chat.messages == []
    list(chat.send(MESSAGES[2]))
    assert chat.turn.reused == 0


@pytest.mark.slow
def test_a_full_context_ends_the_answer_and_refuses_the_next_message(loaded):
    chat, context = make(loaded), loaded.model.config.max_positions

    def n_tokens(lines: int) -> int:
        return len(loaded.tokenizer.encode("x = 1\n" * (lines + 1), add_special_tokens=False))

    with pytest.raises(HydrajaxError, match=f"less than the context of {context}"):
        list(chat.send("x = 1\n" * context))
    assert chat.messages == []
    longest = max(lines for lines in range(1, context) if n_tokens(lines) < context - 4)
    list(chat.send("x = 1\n" * longest))
    if chat.turn.full:
        assert chat.turn.prompt_tokens + chat.turn.new_tokens == context
    with pytest.raises(HydrajaxError, match="message: got a conversation of"):
        list(chat.send(MESSAGES[0]))


def test_bad_conversations_are_refused(loaded):
    with pytest.raises(HydrajaxError, match="template: got 'nice', expected auto, vicuna, plain, raw"):
        Chat(executor(loaded), template="nice")
    chat = make(loaded)
    with pytest.raises(HydrajaxError, match="message: is empty"):
        list(chat.send("  "))
    with pytest.raises(HydrajaxError, match="message: contains the special token"):
        list(chat.send(f"a {loaded.tokenizer.eos_token} b"))
    assert chat.messages == []


def test_variables_of_the_template(loaded):
    with pytest.raises(HydrajaxError, match=r"^chat_template_kwargs: got a, which is no variable of the chat template"):
        Chat(executor(loaded), template="plain", chat_template_kwargs={"a": 1})
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ a if a }}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded.tokenizer, "chat_template", template)
        chat = Chat(executor(loaded), chat_template_kwargs={"a": " = 1"})
    list(chat.send("x"))
    assert chat.turn.prompt_tokens == len(loaded.tokenizer.encode("x = 1", add_special_tokens=False))


def test_in_the_terminal(loaded, monkeypatch, capfd, tmp_path):
    """Messages from a pipe, through the program."""
    from hydrajax.cli import main

    monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    common = ["chat", "--base", str(assets.base()), "--draft", str(assets.path("hydra_pp")), "--tree", "chain-2"]
    common += ["--max-new-tokens", str(NEW)]
    lines = [MESSAGES[0], "", "no text \udcff", MESSAGES[1], "/reset", MESSAGES[0], "/exit", "no", ""]
    given = io.BytesIO("\n".join(lines).encode(errors="surrogateescape"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(given, "utf-8"))
    assert main([*common, "--template", "plain"]) == 0
    out, err = capfd.readouterr()
    chat = make(loaded)
    first, second = ("".join(chat.send(message)) for message in MESSAGES[:2])
    assert out == f"{first}\n{second}\n{first}\n"
    assert err.count("τ ") == 3
    assert err.count("message: is not valid Unicode text\n") == 1
    assert "prompt tokens were cached" in err
    monkeypatch.setattr("sys.stdin", io.StringIO(MESSAGES[0]))
    monkeypatch.setattr("hydrajax.cli.options.load_from", lambda args: loaded)  # loading takes a second
    assert main(common) == 0  # in the tokenizer's own template
    assert capfd.readouterr().out == "".join(Chat(executor(loaded)).send(MESSAGES[0])) + "\n" != f"{first}\n"
