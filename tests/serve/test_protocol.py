"""Request bodies: fields of OpenAI's and vLLM's clients that change nothing, and numbers in texts."""

import contextlib
import json

import jsonschema
import pytest
from openai.types import completion_create_params as completion
from openai.types.chat import completion_create_params as chat

from hydrajax.errors import HydrajaxError
from hydrajax.serve.openapi import document
from hydrajax.serve.protocol import ChatBody, CompletionBody, RequestBody, TokenizeBody, parse_body
from hydrajax.serve.responses_body import ResponsesBody

CHAT, TEXT = {"messages": [{"role": "user", "content": "a"}]}, {"prompt": "a"}
# Defaults of vLLM's requests that are not null.
SAMPLING = {
    "use_beam_search": False, "length_penalty": 1.0, "stop_token_ids": [], "include_stop_str_in_output": False,
    "ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "bad_words": [], "priority": 0, "request_id": "1", "routed_experts_prompt_start": 0, "return_token_offsets": False,
    "return_mm_kwargs": True, "logit_bias": {}, "n": 1, "stop": [], "stream": False, "presence_penalty": 0.0,
    "repetition_penalty": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "stream_options": {"include_usage": False},
}  # fmt: skip
TEMPLATE = {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False}
ANSWER = {"role": "assistant", "content": "b", "refusal": None, "annotations": [], "audio": None, "tool_calls": []}
NULLS = ("guided_json", "structured_outputs", "prompt_logprobs", "truncate_prompt_tokens", "cache_salt", "vllm_xargs")
BODIES = [
    (
        ChatBody,
        CHAT,
        SAMPLING | TEMPLATE | {"logprobs": False, "top_logprobs": 0, "tool_choice": "none", "echo": False},
    ),
    (ChatBody, CHAT, {"parallel_tool_calls": True, "include_reasoning": True, "messages": [*CHAT["messages"], ANSWER]}),
    (ChatBody, CHAT, dict.fromkeys((*NULLS, *chat.CompletionCreateParamsBase.__annotations__)) | CHAT),
    (ChatBody, CHAT, {"stream": None, "response_format": {"type": "text", "json_schema": None}, "verbosity": "medium"}),
    (CompletionBody, TEXT, SAMPLING | {"add_special_tokens": True, "echo": False, "max_tokens": 16}),
    (CompletionBody, TEXT, dict.fromkeys((*NULLS, *completion.CompletionCreateParamsBase.__annotations__)) | TEXT),
    (TokenizeBody, CHAT, TEMPLATE | dict.fromkeys(("chat_template", "chat_template_kwargs", "tools", "model"))),
    (TokenizeBody, TEXT, {"add_special_tokens": True, "return_token_strs": False, "add_generation_prompt": None}),
]


def test_what_changes_nothing_is_accepted():
    for kind, least, fields in BODIES:
        found = [parse_body(kind, json.dumps(body).encode()) for body in (least, least | fields)]
        if issubclass(kind, ChatBody | CompletionBody):
            plain, given = ([body.sampling() | {"logit_bias": None, "top_p": None, "min_p": None}] for body in found)
            assert plain == given
            assert found[0].stops() == found[1].stops() == ()


def test_what_would_change_an_answer_is_refused():
    for kind, body, message in [
        (ChatBody, CHAT | {"skip_special_tokens": False}, "skip_special_tokens: this field is not supported"),
        (ChatBody, CHAT | {"priority": False}, "priority: this field is not supported"),
        (ChatBody, CHAT | {"add_special_tokens": True}, "add_special_tokens: this field is not supported"),
        (ChatBody, CHAT | {"reasoning_effort": "extreme"}, "reasoning_effort: got 'extreme', expected 'none', "),
        (CompletionBody, TEXT | {"add_special_tokens": False}, "add_special_tokens: this field is not supported"),
        (CompletionBody, TEXT | {"suffix": "b"}, "suffix: got 'b', expected none, as this server only continues"),
        (CompletionBody, {"prompt": None}, "prompt: is missing"),
        (CompletionBody, {"prompt": False}, "prompt: got false, expected a text"),
        (CompletionBody, TEXT | {"max_tokens": "1_0"}, "max_tokens: got '1_0', expected an integer"),
        (CompletionBody, TEXT | {"n": True}, "n: got true, expected an integer"),
        (CompletionBody, TEXT | {"logit_bias": {"5": None}}, "logit_bias: got null, expected a finite number"),
        (CompletionBody, TEXT | {"top_p": "0_1"}, "top_p: got '0_1', expected a finite number"),
        (CompletionBody, TEXT | {"stop": [None, True]}, r"stop: got \[null, true\], expected a text or a list"),
    ]:
        with pytest.raises(HydrajaxError, match=f"^{message}"):
            parse_body(kind, json.dumps(body).encode())


def test_the_schemas_accept_what_is_accepted():
    components = {"components": document(has_key=False, vocab_size=9)["components"]}
    wrong = [{"skip_special_tokens": False}, {"priority": False}, {"beam": 1}, {"n": "1"}, {"stream": 1}, {"seed": -1}]
    wrong += [{"logit_bias": {"5": None}}, {"stop": [None]}, {"stream_options": {"a": 1}}, {"model": 1}]
    right = [{"beam": None, "user": "a", "n": None, "stop": [], "stream_options": None}, {"length_penalty": 1.0}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": None}]}]
    others = [(ResponsesBody, {"input": "a"}, {"truncation": "disabled"}), (ResponsesBody, {"input": parts}, {})]
    for kind, body, fields in [*BODIES, *others, (ChatBody, {"messages": parts}, {})]:
        own = {"$ref": f"#/components/schemas/{kind.__name__}"}
        schema = jsonschema.Draft202012Validator(own | components)
        schema.validate(body | fields)
        for more in [*right, *wrong] if issubclass(kind, RequestBody) else ():
            assert schema.is_valid(body | more) == (more in right), more
            with contextlib.nullcontext() if more in right else pytest.raises(HydrajaxError):
                parse_body(kind, json.dumps(body | more).encode())
