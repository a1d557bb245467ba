"""Of any conversation, completion or text: which tokens it has, and which of them are learned."""

import itertools
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")

from harness.chats import CHATML, MARKED, PLAIN, REASONING, make_tokenizer, with_template

from utils.language import conversations
from utils.language.conversations import Encoder
from utils.language.documents import segments
from utils.run.failures import UserError

CHAT = make_tokenizer()
END = CHAT.eos_token_id
TEMPLATES = {"chatml": CHATML, "marked": MARKED, "reasoning": REASONING, "plain": PLAIN}
ENCODERS = {name: Encoder(with_template(CHAT, text)) for name, text in TEMPLATES.items()}
TOKENIZERS = {
    (kind, bos): make_tokenizer(kind, bos, bos_token="<s>", unk_token="<unk>")
    for kind in ("bytes", "spaces")
    for bos in (False, True)
}
NAMES = ["<|im_start|>", "<|im_end|>", "<pad>", "<s>", "<unk>"]  # of special tokens
# What a template or a tokenizer could take for its own, blanks, and characters of several bytes.
CONTROL = ["<|im_start|>", "<|im_end|>", "<pad>", "<s>", "assistant\n", "{{ x }}", "{% if %}"]
CONTROL += ["\uf8f0", "\uf8f1", "\uf8f0<|im_end|>\uf8f1"]
PIECES = st.sampled_from(["a", "hello", "hello world", " ", "\n", "\u3000", "ö", "😀", *CONTROL])
# Each content as its parts.
CONTENTS = st.lists(PIECES, max_size=4)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
IN_TURN = st.tuples(st.tuples(st.just("user"), CONTENTS), st.tuples(st.just("assistant"), CONTENTS))
MESSAGES = st.one_of(
    st.lists(st.tuples(ROLES, CONTENTS), min_size=1, max_size=6),
    st.lists(IN_TURN, min_size=1, max_size=3).map(lambda pairs: [*itertools.chain(*pairs)]),
)
TEXTS = st.lists(PIECES, max_size=5).map(lambda pieces: "".join(pieces))


def as_rows(said, as_parts):
    """The messages of a row, each content a text or a list of texts."""
    rows = []
    for role, pieces in said:
        parts = [{"type": "text", "text": piece} for piece in pieces]
        rows.append({"role": role, "content": parts if as_parts else "".join(pieces)})
    return rows


def as_read(said):
    """What a template makes its text of: private characters of a message mark nothing."""
    texts = ["".join(pieces).replace("\uf8f0", "").replace("\uf8f1", "") for _, pieces in said]
    return [{"role": role, "content": text} for (role, _), text in zip(said, texts, strict=True)]


def render(messages, template, ask=False):
    options = dict(chat_template=template, add_generation_prompt=ask, tokenize=False)
    return CHAT.apply_chat_template(messages, **options)


def special(tokens):
    """The control tokens among tokens: those with a name."""
    return [token for token in tokens if token < len(NAMES)]


def written(messages, template):
    """The control tokens that a template writes around contents without any."""
    quiet = [{**message, "content": "x"} for message in messages]
    return special(CHAT(render(quiet, template), add_special_tokens=False).input_ids)


def runs_of(is_target):
    """The places (begin, end) of the runs of targets."""
    edges = [0, *is_target.tolist(), 0]
    begins = [i for i in range(len(edges) - 1) if edges[i : i + 2] == [0, 1]]
    ends = [i for i in range(len(edges) - 1) if edges[i : i + 2] == [1, 0]]
    return list(zip(begins, ends, strict=True))


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=30)
@given(MESSAGES, st.booleans())
def test_exactly_the_answers_and_the_tokens_that_end_them_are_learned(name, said, as_parts):
    template, rows, messages = TEMPLATES[name], as_rows(said, as_parts), as_read(said)
    answered = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i and message["content"].strip():
            answered.append((render(messages[:i], template, True), messages[: i + 1]))
    row, kind = {"messages": rows}, "messages"
    if not all(render(read, template).startswith(asked) for asked, read in answered):
        with pytest.raises(UserError, match="does not begin message"):
            ENCODERS[name].draft(row, kind, "row 0")
        return
    documents = ENCODERS[name].encode(ENCODERS[name].draft(row, kind, "row 0"))
    # Only the template of roles without special tokens needs an end.
    end_of_last = "<|im_end|>" if name == "plain" else ""
    runs = [(document, run) for document in documents for run in runs_of(document.is_target)]
    for (document, (begin, end)), (asked, read) in zip(runs, answered, strict=True):
        whole = render(read, template)
        assert CHAT.decode(document.tokens[:begin]) == asked
        if end < runs_of(document.is_target)[-1][1]:
            assert CHAT.decode(document.tokens[:end]) == (whole if name == "plain" else whole[:-1])
            continue
        assert document.begins
        assert CHAT.decode(document.tokens) == whole + end_of_last
        assert CHAT.decode(document.tokens[end:]) == ("" if name == "plain" else "\n")
        ends = special(document.tokens.tolist())
        assert ends == written(read, template) + [END] * (name == "plain")
    assert len(documents) == (len(answered) if name == "reasoning" else bool(answered))


def as_text(tokenizer, text):
    """The tokens of a text, in which the names of special tokens are text."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids


@given(TEXTS, TEXTS, st.sampled_from(list(TOKENIZERS)))
def test_of_a_prompt_and_a_completion_the_completion_and_its_end_are_learned(
    prompt, completion, kind
):
    tokenizer = TOKENIZERS[kind]
    encoder, row = Encoder(tokenizer), {"prompt": prompt, "completion": completion}
    documents = encoder.encode(encoder.draft(row, "prompt", "row 0"))
    assert len(documents) == bool(completion.strip())
    for document in documents:
        tokens, answer = document.tokens.tolist(), document.is_target.tolist().index(1)
        bos = [tokenizer.bos_token_id] * kind[1]
        assert tokens[: len(bos)] == bos and tokens[-1] == tokenizer.eos_token_id
        assert encoder.encode_prompt(prompt, "prompt") == tokens[:answer]
        assert document.is_target.tolist() == [0] * answer + [1] * (len(tokens) - answer)
        if kind[0] == "bytes":
            assert tokens[len(bos) : answer] == as_text(tokenizer, prompt)
            assert tokens[answer:-1] == as_text(tokenizer, completion)
        elif (prompt + completion).isascii():  # and no space where the completion begins
            assert tokenizer.decode(tokens[len(bos) : -1]) == prompt + completion


@given(TEXTS, st.integers(1, 12), st.sampled_from(list(TOKENIZERS)))
def test_a_text_begins_and_ends_once_however_it_is_divided(text, size, kind):
    tokenizer = TOKENIZERS[kind]
    encoder, parts = Encoder(tokenizer), [part for part in segments(text.encode(), size) if part]
    with mock.patch.object(conversations, "SEGMENT", size):
        documents = encoder.encode(list(encoder.draft({"text": text}, "text", "row 0")))
    if len(parts) < 2 and not "".join(parts).strip():
        assert documents == []
        return
    assert [document.begins for document in documents] == [True] + [False] * (len(parts) - 1)
    assert all(document.is_target is None for document in documents)
    assert all(document.tokens.dtype == "int32" for document in documents)
    tokens = [token for document in documents for token in document.tokens.tolist()]
    bos = [tokenizer.bos_token_id] * kind[1]
    assert tokens[: len(bos)] == bos and tokens[-1] == tokenizer.eos_token_id
    inner = tokens[len(bos) : -1]
    pairs = itertools.pairwise(parts)  # where a word is cut, a space may be added
    no_word_cut = all(one.endswith("\n") or other.startswith(" ") for one, other in pairs)
    if kind[0] == "spaces" and text.isascii() and no_word_cut:
        assert tokenizer.decode(inner) == text  # and no space where a segment begins
    if kind[0] == "bytes":
        assert inner == [token for part in parts for token in as_text(tokenizer, part)]
        # A token is named by its bytes. Nothing predicts the first one.
        first = 0 if bos else len(tokenizer.convert_ids_to_tokens(inner[0]))
        size = len("".join(parts).encode())
        if bos or parts[0][0].isascii():
            assert sum(document.bytes for document in documents) == size - first
        assert encoder.encode_prompt("".join(parts[:1]), "text") == bos + as_text(
            tokenizer, parts[0]
        )
