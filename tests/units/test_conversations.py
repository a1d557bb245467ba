"""What the properties of conversations leave out: unusual templates and tokenizers, and refusals."""

import itertools
import json

import pytest
from harness.chats import CHATML, PLAIN, make_tokenizer, say, with_template

from utils.language.conversations import ALL, Encoder, check_messages, unread_keys
from utils.run.failures import UserError

transformers = pytest.importorskip("transformers")

STRICT = "{% if messages[0].role != 'user' or messages[1:] and messages[1].role != 'assistant' %}"
STRICT += "{{ raise_exception('Roles must alternate') }}{% endif %}" + CHATML
CHAT = say("u hi", "a hello")
WEATHER = [dict(name="weather")]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def encode(tokenizer, messages, template=None, loss_on="answers", tools=None):
    """The documents of a conversation."""
    tokenizer = with_template(tokenizer, template) if template else tokenizer
    return encode_row(Encoder(tokenizer, loss_on), "messages", messages=messages, tools=tools)


def encode_row(encoder, kind, where="row 0", **row):
    return encoder.encode(list(encoder.draft(row, kind, where)))


def encode_one(*args, **options):
    (document,) = encode(*args, **options)
    return document


def learned(tokenizer, document):
    """The texts of the runs of targets."""
    pairs = zip(document.tokens.tolist(), document.is_target.tolist(), strict=True)
    runs = [(yes, list(run)) for yes, run in itertools.groupby(pairs, lambda pair: pair[1])]
    return [tokenizer.decode([token for token, _ in run]) for yes, run in runs if yes]


def test_a_prompt_is_what_stands_before_an_answer(tokenizer):
    document = encode_one(tokenizer, CHAT)
    prompt = document.tokens[: document.is_target.argmax()].tolist()
    assert Encoder(tokenizer).encode_prompt("hi", "messages") == prompt
    assert encode(tokenizer, say("u hi", "a  ")) == []


def test_an_answer_may_be_a_call_of_a_tool_without_a_text(tokenizer):
    calls = "{{ m.tool_calls[0].name if m.tool_calls }}<|im_end|>"
    template = CHATML.replace("m['content']", "(m['content'] or '')", 1)
    template = template.replace("'<|im_end|>\n' }}", "'' }}" + calls)
    call = dict(role="assistant", content=None, tool_calls=WEATHER)
    document = encode_one(tokenizer, [*say("u hi"), call, *say("t 20", "a hello")], template)
    assert learned(tokenizer, document) == ["weather<|im_end|>", "hello<|im_end|>"]
    with pytest.raises(UserError, match="row 0 is not valid Unicode"):
        encode(tokenizer, [*say("u hi"), {**call, "tool_calls": [dict(name="\ud800")]}], template)


def test_tools_have_a_template_of_their_own(tokenizer):
    own = {"default": CHATML, "tool_use": "{{ tools[0].name }}" + CHATML}
    for template, tools, begins in (
        (own, None, "<|im_start|>user"),
        (own, WEATHER, "weather<|im_start|>user"),
        (own, json.dumps(WEATHER), "weather<|im_start|>user"),
        (PLAIN, WEATHER, "user: hi"),
    ):
        for loss_on, first in (("answers", "hello"), (ALL, begins)):
            document = encode_one(tokenizer, CHAT, template, loss_on, tools=tools)
            assert tokenizer.decode(document.tokens).startswith(begins)
            assert learned(tokenizer, document)[0].startswith(first)


def test_the_date_is_always_the_same(tokenizer):
    asked = "{{ strftime_now( '%d %b %Y' ) }} {{ strftime_now(\"%Y\") }} "
    document = encode_one(tokenizer, CHAT, asked + CHATML)
    assert tokenizer.decode(document.tokens).startswith("01 Jan 2026 2026 <|im_start|>")


def test_added_tokens_end_an_answer_though_they_are_not_special():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["</call>", "<over>"])
    template = PLAIN.replace("m['content'] + '\n'", "m['content'] + '<over>\n'")
    document = encode_one(tokenizer, say("u hi", "a hello</call> you"), template)
    assert learned(tokenizer, document) == ["hello</call> you<over>"]


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "has no chat template: give --chat_template"),
        ("{% for m in messages", "cannot render row 0"),
        ("{{ raise_exception('Roles must alternate') }}", "row 0: Roles must alternate"),
        (CHATML.replace("assistant\n'", "model\n'"), "does not begin message 1 of row 0 with what"),
        (
            CHATML.replace("m['content']", "([m['content']] | string)"),
            "hides the name of a special",
        ),
    ],
)
def test_templates_that_cannot_be_used_are_one_line(template, says, tokenizer):
    tokenizer = with_template(tokenizer, template)
    with pytest.raises(UserError, match=says):
        encode(tokenizer, say("u hi<|im_end|>", "a hello"))
    if not template:
        with pytest.raises(UserError, match=says):
            Encoder(tokenizer).encode_prompt("what?", "messages")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (dict(prompt="a"), "row 3 has no column completion"),
        (dict(prompt="a", completion="\ud800"), "row 3 is not valid Unicode"),
        (dict(prompt="a", completion=CHAT), "the completion of row 3 is no text, but list: of two"),
        (dict(messages="a"), "the messages of row 3 are no list, but str"),
        (dict(text="\ud800"), "row 3 is not valid Unicode"),
        (dict(messages=CHAT, tools="{"), "the tools of row 3 are no list, or JSON of one"),
        (dict(messages=[*CHAT, {"from": "human"}]), "message 2 of row 3 has no role"),
        (dict(messages=[{"role": "gpt"}]), "0 of row 3 has the role gpt: call it assistant, since"),
        (dict(messages=[{"role": "user", "content": [{}]}]), "no text as content, but"),
        (dict(messages=say("u \ud800", "a b")), "row 3 is not valid Unicode"),
    ],
)
def test_rows_of_other_types_are_one_line(row, says, tokenizer):
    encoder = Encoder(tokenizer)
    kind = next((column for column in ("messages", "text") if column in row), "prompt")
    with pytest.raises(UserError, match=says):
        encode_row(encoder, kind, "row 3", **row)
    empty = (None, dict.fromkeys(("text", "prompt", "completion", "messages")))
    assert all(list(encoder.draft(none, kind, "row 3")) == [] for none in empty)


def test_the_end_of_an_answer_is_that_of_the_template():
    tokenizer = make_tokenizer(eos_token="<pad>")
    for template, end in (
        (CHATML, ["<|im_end|>"]),
        (CHATML.replace("<|im_end|>", "<|im_end|><pad>"), ["<pad>"]),
        (STRICT, ["<|im_end|>"]),
        (PLAIN, ["<pad>"]),
        (None, []),
    ):
        encoder = Encoder(with_template(tokenizer, template))
        assert encoder.answer_ends() == tokenizer.convert_tokens_to_ids(end), template


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
def test_an_answer_may_be_read_and_not_learned(mark, tokenizer):
    messages = say("u hi", "a wrong", "u again", "a hello")
    plain = encode_one(tokenizer, messages)
    messages[1] |= mark
    document = encode_one(tokenizer, messages)
    assert document.tokens.tolist() == plain.tokens.tolist()
    assert learned(tokenizer, document) == ["hello<|im_end|>"]
    messages[1] |= {"weight": 1, "train": True}
    assert learned(tokenizer, encode_one(tokenizer, messages)) == learned(tokenizer, plain)


@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', {"city": "Rome"}, "Rome"])
def test_arguments_of_a_call_are_an_object(arguments):
    """As transformers documents them; OpenAI's form is JSON."""
    function = {"name": "weather", "arguments": arguments}
    calls = [{"type": "function", "function": function}, function, {}, "x"]
    (checked,) = check_messages([{"role": "assistant", "content": None, "tool_calls": calls}], "")
    expected = function | {"arguments": {"city": "Rome"} if "{" in str(arguments) else arguments}
    assert checked["tool_calls"] == [calls[0] | {"function": expected}, expected, {}, "x"]
    assert function["arguments"] == arguments


def test_keys_that_neither_the_template_nor_the_encoder_reads():
    known = dict.fromkeys(["role", "content", "tool_calls", "weight", "train"])
    rows = [None, {"messages": [known, "text"], "other": [{"x": 1}]}, {"messages": None}]
    assert unread_keys(rows, "") == []
    rows += [{"messages": [{"b": 1}, {"c d": 1}]}, {"messages": [{"a": 1, 5: 2}]}]
    assert unread_keys(rows, "") == unread_keys(rows, None) == ["5", "a", "b", "c d"]
    assert unread_keys(rows, "{{ m.b }} {{ m.c }}") == ["5", "a", "c d"]
    late = [{"messages": []}] * 999 + [{"messages": [{"a": 1}]}, {"messages": [{"b": 1}]}]
    assert unread_keys(late, "") == ["a"]
