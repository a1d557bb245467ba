"""train_lm.py: the same losses on every topology, exact resume, LoRA, and what others can load."""

import contextlib
import json
import math
import shutil
from hashlib import sha256
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from harness.data import Loader
from harness.gpu_rules import FORBIDDEN
from harness.launches import ROOT, Started, load_script, metrics, results, run, run_once, status
from safetensors import safe_open
from torch.utils.data import DataLoader

from utils.run.failures import UserError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LM, EVALUATE = "scripts/train_lm.py", "scripts/evaluate.py"
MODEL = "--block_size 128 --batch_size 8"
SMALL = f"{MODEL} --max_train_steps 12 --log_every 1 --eval_every 6 --checkpoint_every 4 --eval_samples 3"
COUNT = 210  # conversations
LORA = f"{SMALL} --lora_rank 4"


@pytest.fixture(scope="session")
def chats(made_once):
    """Conversations of very different length, as JSON lines."""

    def make(folder):
        rows = []
        for number in range(COUNT):
            turns = [
                {"role": "user", "content": f"Say {number}." + " Do!" * (number % 5)},
                {"role": "assistant", "content": "w " * (1 + number * number % 17)},
            ]
            rows.append(json.dumps({"messages": turns * (1 + (number % 7 == 0))}) + "\n")
        (folder / "chats.jsonl").write_text("".join(rows))
        return folder / "chats.jsonl"

    return made_once("chats", make)


@pytest.fixture(scope="session")
def lm(chats, made_once):
    """The uninterrupted run of SMALL: `lm("cpu")` has its output, and its folder as `.folder`."""
    return lambda config: run_once(
        made_once, f"lm/{config}", config, LM, f"--dataset {chats} {SMALL}"
    )


@pytest.mark.slow
def test_evaluations_take_some_blocks_always_the_same_and_the_last_one_all(lm):
    whole, lines = results(lm("cpu").folder), metrics(lm("cpu").folder, "val")
    assert "evaluations: 3 of " in lm("cpu").stdout and [line["step"] for line in lines] == [
        0,
        6,
        12,
    ]
    assert len({line["tokens"] for line in lines}) == 1
    assert whole["val_tokens"] > lines[0]["tokens"] and whole["val_loss"] != lines[-1]["loss"]
    others = metrics(lm("2cpu").folder, "val")
    for name in ("loss", "tokens", "loss_standard_error"):
        expected = [line[name] for line in lines]
        assert [line[name] for line in others] == pytest.approx(expected, abs=1e-4), name


class Losses(torch.nn.Module):
    """The loss of each target is the token itself."""

    def forward(self, targets, per_block=False, **_):
        assert not self.training
        losses = targets.clamp(min=0).sum(1).float()
        return (losses.sum(), losses) if per_block else losses.sum()


def loader_of(batches, size, target_tokens, bytes=None):
    """The loader of one of two processes, with batches of `size` blocks."""
    loader = Loader(batches, SimpleNamespace(target_tokens=target_tokens, bytes=bytes))
    loader.total_batch_size = 2 * size
    return loader


def held_out(ids, targets):
    targets = torch.tensor(targets)
    empty = torch.zeros_like(targets)
    return dict(input_ids=empty, position_ids=empty, targets=targets, ids=torch.tensor(ids))


def test_a_model_with_its_own_loss_is_evaluated_without_a_standard_error():
    """It returns the sum of its losses, and not that of each block."""
    script = load_script("train_lm")

    class Model(torch.nn.Module):
        def forward(self, targets, per_block, **_):
            return 2.0 * (targets >= 0).sum(), torch.full((len(targets),), math.nan)

    loader = loader_of([held_out([0, 1], [[1, 2, 3], [4, 5, -100]])], 1, 5)
    alone = SimpleNamespace(num_processes=1, process_index=0, reduce=lambda value, _: value)
    found = script.evaluate(alone, Model(), {"a": loader}, iter)
    assert found == {"loss": 2.0, "perplexity": math.exp(2), "tokens": 5}


def test_each_held_out_target_counts_once_on_any_process():
    """The second of two processes has blocks 1, 3 and, to fill the last batch up, 0 once more."""
    script, model = load_script("train_lm"), Losses().train()
    second, kinds = SimpleNamespace(num_processes=2, process_index=1), []
    second.reduce = lambda value, kind: kinds.append(kind) or value

    def one(target_tokens=3, bytes=None):
        blocks = ((1, [0, 2]), (3, [-100, 7]), (0, [5, 5]))
        return loader_of([held_out([i], [row]) for i, row in blocks], 1, target_tokens, bytes)

    two = loader_of([held_out([2, 3], [[4, 0], [6, -100]])], 2, 3, bytes=4)
    found = script.evaluate(second, model, {"one": one(bytes=4), "two": two}, iter)
    assert found["loss"] == pytest.approx(19 / 6) and found["tokens"] == 6
    assert kinds == ["sum", "sum"]
    assert found["perplexity"] == pytest.approx(math.exp(19 / 6))
    assert found["bits_per_byte"] == pytest.approx(19 / 8 / math.log(2))
    assert (found["loss/one"], found["loss/two"]) == pytest.approx((9 / 3, 10 / 3))
    assert found["loss_standard_error"] > 0 and model.training
    assert set(script.evaluate(second, model, {"one": one()}, iter)) == {
        "loss", "loss_standard_error", "perplexity", "tokens"
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="evaluated 3 of 4 held-out targets"):
        script.evaluate(second, model, {"one": one(target_tokens=4)}, iter)


@pytest.mark.parametrize("stream", [False, True])
def test_the_losses_of_blocks_are_computed_where_they_are_needed(stream):
    script, asked = load_script("train_lm"), []

    def model(**inputs):
        asked.append(inputs)
        return ("sum", "of blocks") if inputs["per_block"] else "sum"

    batch = dict(input_ids=1, position_ids=2, targets=3) | ({"source": 4} if stream else {})
    for per_block in (False, True):
        assert script.compute_loss(model, batch, per_block=per_block) == "sum"
        assert ("block_losses" in batch) == (per_block or stream)
    expected = dict(input_ids=1, position_ids=2, targets=3)
    assert asked == [expected | {"per_block": stream}, expected | {"per_block": True}]
    script.compute_loss(model, batch)
    assert asked[2]["per_block"] == stream


def test_an_epoch_begins_with_the_batches_that_are_left():
    script = load_script("train_lm")
    loader, epochs = DataLoader(list(range(6)), batch_size=2), []
    loader.set_epoch = epochs.append
    assert script.epoch_batches(loader, 3, 0) is loader
    left = [batch.tolist() for batch in script.epoch_batches(loader, 4, 2)]
    assert left == [[4, 5]] and epochs == [3, 4]
    stream = SimpleNamespace(dataset=object.__new__(script.TokenStream))
    assert script.epoch_batches(stream, 5, 2) is stream  # it continues at its own position


@pytest.mark.parametrize("training", [False, True])
def test_prompts_are_answered_25_at_a_time(training, monkeypatch):
    script, calls, gathered = load_script("train_lm"), [], []

    class Model(torch.nn.Linear):
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())

        def generate(self, inputs, **options):
            assert not self.training
            calls.append((inputs, options))
            return torch.cat([inputs, inputs[:, -1:] + 1], 1)

    def gather(model):
        gathered.append(model)
        return contextlib.nullcontext()

    monkeypatch.setattr(script.fsdp, "gathered", gather)
    monkeypatch.setattr(script.causal_lm, "ends", lambda *both: dict(pad_token_id=9, ends=both))
    tokenizer = SimpleNamespace()
    tokenizer.batch_decode = lambda new, skip_special_tokens: [
        f"{some} {skip_special_tokens}" for some in new.tolist()
    ]
    model = Model(1, 1).train(training)
    prompts = [list(range(1 + number % 7)) for number in range(60)]
    answers = script.generate(model, tokenizer, prompts, 12)
    assert answers == [f"{[prompt[-1] + 1]} True" for prompt in prompts]
    assert [len(inputs) for inputs, _ in calls] == [25, 25, 10] and gathered == [model] * 3
    assert model.training == training
    rows = [row for inputs, _ in calls for row in inputs]
    masks = [mask for _, options in calls for mask in options.pop("attention_mask")]
    for prompt, row, mask in zip(prompts, rows, masks, strict=True):
        assert row[mask.bool()].tolist() == prompt and mask.tolist() == sorted(mask.tolist())
        assert (row[~mask.bool()] == 9).all()
    expected = dict(pad_token_id=9, ends=(model, tokenizer), max_new_tokens=12, do_sample=False)
    assert [options for _, options in calls] == [expected] * 3


def test_targets_are_counted_over_processes_and_never_none():
    script, kinds = load_script("train_lm"), []
    two = SimpleNamespace(reduce=lambda count, kind: kinds.append(kind) or 2 * count)
    batches = [held_out([0], [[0, -100, 3]]), held_out([1], [[-100, -100, 1]])]
    assert script.count_targets(two, batches).item() == 6
    assert script.count_targets(two, [held_out([0], [[-100]])]).item() == 1
    assert kinds == ["sum", "sum"]


def test_each_source_has_its_share_of_the_evaluated_blocks():
    script = load_script("train_lm")

    class Blocks(list):
        def select(self, indices):
            return [self[i] for i in indices]

    sets = {"many": Blocks(range(90)), "few": Blocks(range(10)), "one": Blocks([0])}
    chosen = script.choose_blocks(sets, 20, seed=3)
    assert {name: len(blocks) for name, blocks in chosen.items()} == dict(many=18, few=2, one=1)
    assert chosen == script.choose_blocks(sets, 20, 3) != script.choose_blocks(sets, 20, 4)
    assert script.choose_blocks(sets, 101, 3) == sets


def test_prompts_are_those_of_each_source_in_turn_or_of_a_file(tmp_path, monkeypatch):
    script, asked = load_script("train_lm"), []

    class Encoder:
        def __init__(self, tokenizer):
            assert tokenizer == "tokenizer"

        def encode_prompt(self, line, kind):
            asked.append((line, kind))
            return [len(line)]

    monkeypatch.setattr(script, "Encoder", Encoder)
    args = SimpleNamespace(prompts=None, kind="messages")
    sets = {
        name: SimpleNamespace(prompts=lambda count, name=name: [(name, i) for i in range(count)])
        for name in "ab"
    }
    sets["c"] = SimpleNamespace(prompts=lambda count: [])
    read = lambda: script.read_prompts("tokenizer", sets, args)  # noqa: E731
    assert read() == [("a", 0), ("b", 0), ("a", 1)]
    args.prompts = str(tmp_path / "prompts.txt")
    for content, says in (
        (None, "cannot be read: No such file"),
        (b"caf\xe9", "cannot be read: not UTF-8"),
        (b" \n", "is empty: give one prompt per line"),
    ):
        if content:
            (tmp_path / "prompts.txt").write_bytes(content)
        with pytest.raises(UserError, match=says):
            read()
    (tmp_path / "prompts.txt").write_text("who?\n\n höw\n")
    assert read() == [([4], None), ([4], None)]
    assert asked == [("who?", "messages"), (" höw", "messages")]


def test_samples_show_the_prompt_the_answer_and_that_of_the_data(monkeypatch):
    script = load_script("train_lm")

    def generate(model, given, prompts, length):
        assert (model, length, prompts) == ("model", script.SAMPLE_TOKENS, [[1], [2], [3]])
        assert given is tokenizer
        return [" yes ", "no", "yes"]

    monkeypatch.setattr(script, "generate", generate)
    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: f"prompt {tokens}")
    prompts = [([1], "yes"), ([2], "yes "), ([3], "yes")]
    assert script.share_of_exact("model", tokenizer, prompts) == pytest.approx(2 / 3)
    prompts[1] = ([2], None)
    assert script.show_samples("model", tokenizer, prompts) == (
        "> prompt [1]\n yes \n(in the data: yes)\n> prompt [2]\nno\n"
        "> prompt [3]\nyes\n(in the data: yes)\n"
    )


@pytest.mark.parametrize("part", ["model", "adapter"])
def test_the_card_names_what_is_on_the_hub(part, tmp_path, monkeypatch):
    script = load_script("train_lm")
    monkeypatch.chdir(tmp_path)
    (tmp_path / part).mkdir()
    (tmp_path / "mine").mkdir()
    args = SimpleNamespace(model="a/b", from_scratch=False, sources=["mine", "synthetic", "c/d"])
    card = script.describe_model(args, tmp_path)
    assert card["metadata"] == {"base_model": "a/b", "datasets": ["c/d"]}
    assert card["library"] == {"model": "transformers", "adapter": "peft"}[part]
    assert f'from_pretrained("{part}")' in card["usage"] and f"`{part}`" in card["weights"]
    args.from_scratch, args.sources = True, ["mine"]
    assert script.describe_model(args, tmp_path)["metadata"] == {}
    for args.model in ("mine", "tiny"):
        args.from_scratch = False
        assert script.describe_model(args, tmp_path)["metadata"] == {}
    assert card["task"] == "text-generation" and "language model" in card["title"]


@pytest.mark.slow
def test_two_processes_send_only_what_nccl_takes(chats, tmp_path):
    """As `test_gpu_rules.py` does for the other scripts."""
    words = [f"gpu_rules@0:{tmp_path}/seen.json", LM, "--dataset", str(chats), *MODEL.split()]
    words += ["--max_train_steps", "2", "--gradient_accumulation_steps", "2"]
    run("2cpu", "tests/harness/wrapped.py", words, output_dir=tmp_path / "run")
    collectives, operations, strict = json.loads((tmp_path / "seen.json").read_text())
    assert strict and collectives >= 5 and not set(operations) & FORBIDDEN


def losses(folder, split="train"):
    return {line["step"]: line["loss"] for line in metrics(folder, split)}


def weights(folder):
    """The hash of what a run exports, and of nothing else."""
    part = next(folder / part for part in ("model", "adapter") if (folder / part).is_dir())
    digest = sha256()
    for file in sorted(part.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def assert_same_losses(one, other, tolerance=1e-4):
    assert losses(one).keys() == losses(other).keys() and losses(one)
    for step, loss in losses(one).items():
        assert losses(other)[step] == pytest.approx(loss, abs=tolerance), step


def test_leaves_a_model_that_transformers_loads(lm):
    done, folder = lm("cpu"), lm("cpu").folder
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.chat_template and tokenizer.eos_token_id is not None
    for name in ("args.json", "metrics.jsonl", "sample.txt", "curves.png", "tensorboard"):
        assert (folder / name).exists(), name
    assert status(folder)["state"] == "finished"
    result = results(folder)
    assert losses(folder, "val")[12] < losses(folder, "val")[0]
    assert result["val_perplexity"] == pytest.approx(math.exp(result["val_loss"]))
    assert result["parameters"] == sum(weight.numel() for weight in model.parameters())
    card = (folder / "README.md").read_text()
    assert "library_name: transformers" in card and "pipeline_tag: text-generation" in card
    assert "of them trained" in done.stdout and "target" in done.stdout
    said = run(None, LM, f"--generate {folder} --prompt Hello").stdout
    assert said.strip() or said == "\n"


@pytest.mark.slow
def test_two_processes_and_two_micro_batches_compute_what_one_does(lm, chats, tmp_path):
    """Documents differ in length: a mean of means would differ from the first step on."""
    assert_same_losses(lm("cpu").folder, lm("2cpu").folder)
    assert results(lm("2cpu").folder)["num_processes"] == 2
    again = "--gradient_accumulation_steps 2 --activation_checkpointing"
    run("cpu", LM, f"--dataset {chats} {SMALL} {again}", output_dir=tmp_path / "run")
    assert_same_losses(lm("cpu").folder, tmp_path / "run")
    norms = [
        {line["step"]: line["grad_norm"] for line in metrics(folder, "train")}
        for folder in (lm("cpu").folder, lm("2cpu").folder, tmp_path / "run")
    ]
    assert norms[0][1] == pytest.approx(norms[1][1], rel=1e-5)
    assert norms[0][1] == pytest.approx(norms[2][1], rel=1e-5)
    for split in ("val",):
        one, two = losses(lm("cpu").folder, split), losses(lm("2cpu").folder, split)
        assert one[0] == pytest.approx(two[0], abs=1e-6)


def test_after_a_kill_it_continues_exactly(lm, chats, tmp_path):
    started = Started("2cpu", LM, f"--dataset {chats} {SMALL}", output_dir=tmp_path)
    started.wait_for("step  9/12")
    started.kill_all()
    again = run("2cpu", LM, f"--dataset {chats} {SMALL}", output_dir=tmp_path)
    assert "continuing from" in again.stdout
    assert weights(tmp_path) == weights(lm("2cpu").folder)
    assert losses(tmp_path) == losses(lm("2cpu").folder)
    assert losses(tmp_path, "val") == losses(lm("2cpu").folder, "val")


@pytest.mark.slow
def test_lora_trains_and_saves_the_adapter_only(lm, chats, tmp_path):
    base = lm("cpu").folder / "model"
    arguments = f"--model {base} --dataset {chats} {LORA}"
    run("cpu", LM, arguments, output_dir=tmp_path / "whole")
    started = Started("cpu", LM, arguments, output_dir=tmp_path / "killed")
    started.wait_for("step  9/12")
    started.kill_all()
    run("cpu", LM, arguments, output_dir=tmp_path / "killed")
    assert results(tmp_path / "killed")["resumed_from"] > 0
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    newest = tmp_path / "whole" / "checkpoints" / "step_00000012"
    with safe_open(newest / "model.safetensors", "pt") as file:
        assert all("lora_" in name for name in file.keys())  # noqa: SIM118 (not a dict)
    run(None, EVALUATE, str(tmp_path / "whole"), output_dir=tmp_path / "scores")
    found, expected = results(tmp_path / "scores"), results(tmp_path / "whole")
    assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-6)
    assert found["val_loss"] != pytest.approx(results(lm("cpu").folder)["val_loss"], rel=1e-6)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "whole" / "adapter").eval()
    run(None, LM, f"--merge {tmp_path / 'whole'}")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model").eval()
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, merged(ids).logits, atol=1e-4)
        plain = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
        assert not torch.allclose(plain(ids).logits, merged(ids).logits, atol=1e-4)


@pytest.mark.parametrize("what", ["own", "moved", "another"])
def test_evaluate_finds_the_same_loss_and_scores_other_data(what, lm, chats, tmp_path):
    folder, config, words = lm("cpu").folder, None, []
    if what == "own":
        config = "2cpu"
    elif what == "moved":
        words = ["--dataset", str(shutil.copy(chats, tmp_path / "moved.jsonl"))]
    else:
        (tmp_path / "a.txt").write_text("ab" * 150)
        words = ["--dataset", str(tmp_path / "a.txt")]
    done = run(config, EVALUATE, [str(folder), *words], output_dir=tmp_path / "scores")
    found = results(tmp_path / "scores")
    if what == "another":  # all of its 300 bytes, and the end; the first is not predicted
        assert found["all_tokens"] == 300
        expected = found["all_loss"] * 300 / 299 / math.log(2)
        assert found["all_bits_per_byte"] == pytest.approx(expected)
        return
    assert found["val_loss"] == pytest.approx(results(folder)["val_loss"], rel=1e-6)
    assert found["val_perplexity"] == pytest.approx(math.exp(found["val_loss"]))
    last = done.stdout.splitlines()[-1]
    error = found["val_loss_standard_error"]
    assert f"loss {found['val_loss']:.4f} ± {error:.4f} nats per token" in last
    assert f"on {found['val_tokens']:,} tokens" in last and str(tmp_path / "scores") in last


def test_evaluate_names_what_it_needs_for_a_language_model(lm, tmp_path, monkeypatch):
    folder, script = lm("cpu").folder, load_script("evaluate")
    (tmp_path / "model").mkdir()
    for run_folder, words, says in (
        (tmp_path, [], "has no args.json"),
        (folder, ["--tta"], "--tta is for classifiers"),
        (folder / "checkpoints" / "step_00000012", [], "give the folder of a finished run"),
    ):
        done = run(None, EVALUATE, [str(run_folder), *words], check=False)
        assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1
    monkeypatch.setattr(load_script("train_lm"), "MISSING", ["transformers"])
    with pytest.raises(UserError, match="needs transformers: pip install -r"):
        script.evaluate_lm(None, SimpleNamespace(), folder)


def test_a_lora_run_refuses_another_base(lm, chats, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    for file in (lm("cpu").folder / "model").iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    arguments = f"--model {base} --dataset {chats} {LORA}"
    run(None, LM, f"{arguments} --max_train_steps 4", output_dir=tmp_path / "run")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    model.save_pretrained(base)
    done = run(None, LM, arguments, output_dir=tmp_path / "run", check=False)
    assert done.returncode == 2 and "--base" in done.stderr, done.stderr


BAD = {
    "no_model": ("--model ./nowhere", "nowhere"),
    "block_too_long": ("--block_size 100000", "block_size"),
    "lora_target": ("--model {model} --lora_rank 4 --lora_targets nothing", "nothing"),
    "lora_of_nothing": ("--lora_rank 4", "pretrained"),
    "other_adapter": ("--model {model} --adapter nowhere", "nowhere"),
    "bfloat16": ("--dtype bfloat16", "bfloat16"),
    "both_adapters": ("--lora_rank 4 --adapter x", "--adapter"),
    "no_prompts": ("--prompts nowhere.txt", "nowhere.txt"),
    "no_template": ("--chat_template nowhere.jinja", "nowhere.jinja"),
    "flex": ("--attention flex", "flex"),
    "shares": ("--mixture 0.5 0.5 --max_train_steps 4", "--mixture"),
    "no_end": ("--mixture 1", "--max_train_steps"),
    "twice": ("--dataset a.txt a.txt --mixture 1 1 --max_train_steps 4", "twice"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name, lm, chats, tmp_path):
    arguments, words = BAD[name]
    arguments = arguments.format(model=lm("cpu").folder / "model")
    arguments = f"--dataset {chats} {MODEL} {arguments}"
    done = run(None, LM, arguments, output_dir=tmp_path / "run", check=False)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("***")]
    assert done.returncode == 2 and len(errors) == 1 and words in errors[0], done.stderr
    assert not (tmp_path / "run").exists()


@pytest.fixture
def mixture(chats, tmp_path):
    """Arguments for the conversations and short texts, three to one."""
    rows = [{"text": f"text {number} of some words " * (1 + number % 9)} for number in range(400)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"--dataset {chats} {tmp_path}/texts.jsonl --mixture 3 1 {SMALL}"


@pytest.mark.slow
def test_a_mixture_logs_the_tokens_and_the_loss_of_each_source(mixture, tmp_path):
    done = run("2cpu", LM, f"{mixture} --max_train_steps 4", output_dir=tmp_path / "run")
    assert done.stdout.count("chats.jsonl is exhausted and repeats") == 1
    lines, last = metrics(tmp_path / "run", "train"), metrics(tmp_path / "run", "val")[-1]
    seen = [[line[f"tokens_seen/{name}.jsonl"] for name in ("chats", "texts")] for line in lines]
    assert all(0 < sum(b) - sum(a) <= 8 * 128 for a, b in pairwise(seen))
    assert min(seen[-1]) > 0
    for line in (lines[-1], last):
        parts = [line[f"loss/{name}.jsonl"] for name in ("chats", "texts")]
        assert min(parts) < line["loss"] < max(parts)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["", "--streaming"])
def test_a_mixture_continues_exactly_also_on_another_number_of_processes(
    flag, mixture, chats, tmp_path
):
    if flag:  # held out of a stream is 1 in 64
        mixture = mixture.replace(str(chats), "synthetic")
    run("cpu", LM, f"{mixture} {flag}", output_dir=tmp_path / "one")
    started = Started("2cpu", LM, f"{mixture} {flag}", output_dir=tmp_path / "two")
    started.wait_for("step  9/12")
    started.kill_all()
    other = mixture.replace("--mixture 3 1", "--mixture 1 1")
    refused = run("cpu", LM, f"{other} {flag}", output_dir=tmp_path / "two", check=False)
    assert refused.returncode != 0 and "--mixture 1.0 1.0 (was 3.0 1.0)" in refused.stderr
    run("cpu", LM, f"{mixture} {flag}", output_dir=tmp_path / "two")
    assert results(tmp_path / "two")["resumed_from"] > 0
    assert_same_losses(tmp_path / "one", tmp_path / "two")
    last = [metrics(tmp_path / name, "train")[-1] for name in ("one", "two")]
    assert last[0]["tokens_seen/texts.jsonl"] == last[1]["tokens_seen/texts.jsonl"] > 0


@pytest.mark.slow
def test_a_stream_continues_exactly_also_on_another_number_of_processes(tmp_path):
    arguments = f"--dataset synthetic --streaming {SMALL}"
    run("cpu", LM, arguments, output_dir=tmp_path / "one")
    started = Started("2cpu", LM, arguments, output_dir=tmp_path / "two")
    started.wait_for("step  9/12")
    started.kill_all()
    run("cpu", LM, arguments, output_dir=tmp_path / "two")
    assert results(tmp_path / "two")["resumed_from"] > 0
    assert_same_losses(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_a_sharded_run_computes_the_same_and_continues_exactly(lm, chats, tmp_path):
    arguments = f"--dataset {chats} {SMALL}"
    launcher = ("--mixed_precision", "no", "--num_processes", "2")
    run("4gpu_fsdp", LM, arguments, output_dir=tmp_path / "whole", launcher=launcher)
    assert_same_losses(lm("cpu").folder, tmp_path / "whole")
    killed = Started("4gpu_fsdp", LM, arguments, output_dir=tmp_path / "killed", launcher=launcher)
    killed.wait_for("step  9/12")
    killed.kill_all()
    run("4gpu_fsdp", LM, arguments, output_dir=tmp_path / "killed", launcher=launcher)
    assert results(tmp_path / "killed")["resumed_from"] > 0
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")


@pytest.mark.slow
def test_a_sharded_lora_run_continues_exactly(lm, chats, tmp_path):
    arguments = f"--model {lm('cpu').folder / 'model'} --dataset {chats} {LORA}"
    launcher = ("--mixed_precision", "no", "--num_processes", "2")
    run("4gpu_fsdp", LM, arguments, output_dir=tmp_path / "whole", launcher=launcher)
    killed = Started("4gpu_fsdp", LM, arguments, output_dir=tmp_path / "killed", launcher=launcher)
    killed.wait_for("step  9/12")
    killed.kill_all()
    run("4gpu_fsdp", LM, arguments, output_dir=tmp_path / "killed", launcher=launcher)
    assert results(tmp_path / "killed")["resumed_from"] > 0
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


def configuration(folder, name):
    """A folder with the configuration of a small model, and a tokenizer."""
    from test_causal_lm import CONFIGS

    from utils import causal_lm

    config = CONFIGS[name]()
    config.max_position_embeddings = config.n_positions = 128
    config.save_pretrained(folder)
    causal_lm.byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mixtral", "gemma2"])
def test_other_architectures_from_scratch_continue_exactly(name, chats, tmp_path):
    """GPT-2 has dropout, Conv1D and tied weights."""
    folder = configuration(tmp_path / "config", name)
    arguments = (
        f"--model {folder} --from_scratch --activation_checkpointing --dataset {chats} {SMALL}"
    )
    run("cpu", LM, arguments, output_dir=tmp_path / "one")
    run("2cpu", LM, arguments, output_dir=tmp_path / "whole")
    killed = Started("2cpu", LM, arguments, output_dir=tmp_path / "killed")
    killed.wait_for("step  9/12")
    killed.kill_all()
    run("2cpu", LM, arguments, output_dir=tmp_path / "killed")
    assert results(tmp_path / "killed")["resumed_from"] > 0
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    if name in ("qwen3", "gemma2"):  # dropout and the balance of experts depend on the topology
        assert_same_losses(tmp_path / "one", tmp_path / "whole")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")


@pytest.mark.slow
def test_lora_of_a_bfloat16_base_is_sharded(lm, chats, tmp_path):
    """With float32 adapters, computed in bf16."""
    config = (ROOT / "accelerate_configs" / "4gpu_fsdp.yaml").read_text()
    (tmp_path / "config.yaml").write_text(config.replace("use_cpu: false", "use_cpu: true"))
    arguments = f"--model {lm('cpu').folder / 'model'} --dataset {chats} {LORA} --dtype bfloat16"
    launcher = ("--num_processes", "2")
    run(tmp_path / "config.yaml", LM, arguments, output_dir=tmp_path / "run", launcher=launcher)
    found = losses(tmp_path / "run", "val")
    assert found[12] < found[0]
    base = transformers.AutoModelForCausalLM.from_pretrained(lm("cpu").folder / "model")
    peft.PeftModel.from_pretrained(base, tmp_path / "run" / "adapter")


def test_the_validation_loss_is_that_of_each_document_alone(lm, chats):
    """Computed again by transformers, from what the run exported, one conversation at a time."""
    from utils.data.packing import IGNORED
    from utils.data.tokens import load_tokens

    folder = lm("2cpu").folder
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    packed = load_tokens(str(chats), tokenizer, 128).splits["val"]
    assert len(packed) % 2, "no evaluation batch of two processes is filled up"
    alone = load_tokens(str(chats), tokenizer, 128, packed=False).splits["val"]
    assert len(alone) > 1.3 * len(packed) and len(packed) > 2
    total = 0.0
    for index in range(len(alone)):
        block = alone[index]
        with torch.no_grad():
            logits = model(input_ids=block["input_ids"][None]).logits[0].double()
        losses = torch.nn.functional.cross_entropy(
            logits, block["targets"], ignore_index=IGNORED, reduction="sum"
        )
        total += losses.item()
    expected = total / alone.target_tokens
    assert results(folder)["val_loss"] == pytest.approx(expected, rel=1e-5)
