"""Chat templates, conversations and small tokenizers, for tests of language models."""

import copy
import json

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# With marks around what the assistant says.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The last answer has a block for its reasoning, earlier ones have none.
REASONING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if loop.last and m['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Without special tokens.
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def say(*turns):
    """`say("u hi", "a hello")`"""
    return [dict(role=ROLES[turn[0]], content=turn[2:]) for turn in turns]


def conversations(numbers):
    """Rows of very different length; each seventh has two answers."""
    for number in numbers:
        question = f"u Say {number}." + " Do!" * (number % 5)
        turns = say(question, "a " + "w " * (1 + number * number % 17))
        yield {"messages": turns * (1 + (number % 7 == 0))}


def write_rows(path, rows):
    """Writes JSON Lines; returns the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_files(root, **files):
    """Writes files, and returns their folder: `a_jsonl` becomes a.jsonl, `sub__a_txt` sub/a.txt."""
    for name, content in files.items():
        path = root.joinpath(*name.replace("_", ".").split(".."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def make_tokenizer(kind="bytes", bos=False, **special):
    """A tokenizer trained on the spot, of bytes or of words that begin with a space."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    special = {"eos_token": "<|im_end|>", **special}
    names = ["<|im_start|>", "<|im_end|>", "<pad>", "<s>", "<unk>"]
    texts = ["user assistant system\nthe date is hello world, what?\n\n"] * 8
    if kind == "bytes":
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Metaspace()
        core.decoder = decoders.Metaspace()
        alphabet = list("abcdefghijklmnopqrstuvwxyz\n<|_>:,?{}%")
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=names, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    if bos:
        pair = [("<s>", core.token_to_id("<s>"))]
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=pair)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)
    tokenizer.chat_template = CHATML
    return tokenizer


def with_template(tokenizer, template):
    """A copy of a tokenizer with another chat template."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer
