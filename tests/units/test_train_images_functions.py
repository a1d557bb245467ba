"""Functions of train_images.py: options, optimizer and loaders."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness.data import encoded, make_photos, noise
from harness.fakes import accelerator
from harness.launches import load_script

from utils.images import pretrained
from utils.images.decoding import Images, Rows
from utils.images.sources import find_images
from utils.run.plan import Plan

script = load_script("train_images")
PLAN = Plan(total_steps=100, steps_per_epoch=10)


@pytest.fixture
def parse(monkeypatch):
    """Parses the words of a command line."""

    def parsed(words):
        monkeypatch.setattr(sys, "argv", ["train_images.py", *words.split()])
        return script.parse_args()

    return parsed


def test_weights_that_are_gone_have_the_same_path_as_before(parse, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for path in ("runs/a", "a.pth", "here"):
        assert parse(f"--dataset a --weights {path}").weights == str(tmp_path / path)
    assert parse("--dataset a --weights DEFAULT").weights == "DEFAULT"


@pytest.mark.parametrize("preset", ["scratch", "finetune", "small"])
def test_a_preset_is_a_set_of_known_options_that_flags_override(preset, parse, capsys):
    wanted = script.COMMON | script.PRESETS[preset] | {"epochs": 7}
    args = vars(parse(f"--dataset synthetic --preset {preset} --epochs 7"))
    assert wanted.items() <= args.items() and args["momentum"] == 0.9
    with pytest.raises(SystemExit):
        parse("--help")
    shown = set(capsys.readouterr().out.split())
    flags = {name for name in wanted if f"--{name}" in shown}
    assert flags | script.COMMON.keys() == wanted.keys() and not flags & script.COMMON.keys()


def test_one_batch_is_trained_without_a_schedule_or_smoothing(parse):
    one_batch = parse("--dataset a --overfit_batch --lr_schedule linear")
    assert (one_batch.lr_schedule, one_batch.label_smoothing) == ("constant", 0)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weight_decay_and_learning_rates_of_the_groups(optimizer):
    model = torch.nn.Sequential()
    model.body, model.pos_embedding = torch.nn.Conv2d(3, 4, 1), torch.nn.Parameter(torch.ones(2, 2))
    model.norm, model.fc = torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 3)
    model.body.bias.requires_grad_(False)
    args = SimpleNamespace(
        lr=0.1, head_lr_multiplier=10, weight_decay=0.3, optimizer=optimizer, momentum=0.9
    )
    made = script.build_optimizer(model, args)
    groups = {id(p): group for group in made.param_groups for p in group["params"]}
    found = {
        name: (groups[id(p)]["lr"], groups[id(p)]["weight_decay"])
        for name, p in model.named_parameters()
        if id(p) in groups
    }
    undecayed = dict.fromkeys(["pos_embedding", "norm.weight", "norm.bias"], (0.1, 0.0))
    decayed = {"body.weight": (0.1, 0.3), "fc.weight": (1.0, 0.3)}
    assert found == {**undecayed, **decayed, "fc.bias": (1.0, 0.0)}
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    assert isinstance(made, kinds[optimizer]) and made.defaults["fused"]
    momentum = (made.defaults.get("momentum"), made.defaults.get("nesterov"))
    assert momentum == ((0.9, True) if optimizer == "sgd" else (None, None))


def options(parse, words):
    return parse(f"--dataset a --model squeezenet1_1 --batch_size 4 --num_workers 0 {words}")


def test_data_is_shortened_for_quick_checks(parse, tmp_path, capsys, monkeypatch):
    args = options(parse, f"--dataset {make_photos(tmp_path / 'd', 4)} --overfit_batch")
    data = script.load_data(accelerator(), args)
    assert data.details[-1] == "only 12 held-out images: each is 8.3% of accuracy"
    assert data.description in capsys.readouterr().out
    fitted, micro_batch_size = script.fit_batch(accelerator(), data, args)
    assert data.splits["train"].rows.tolist() == data.splits["val"].rows.tolist() == [0, 3, 7, 11]
    assert micro_batch_size == fitted.batch_size == 4
    rows = Images(Rows([encoded(noise(0))], "", ""), np.zeros(700, int), np.arange(700) % 2)
    large = SimpleNamespace(splits={"train": rows, "val": rows}, description="d", details=[])
    monkeypatch.setattr(script, "find_images", lambda name, **more: large)
    args = options(parse, "--dry_run")
    large = script.load_data(accelerator(), args)
    script.fit_batch(accelerator(), large, args)
    assert {split: len(part) for split, part in large.splits.items()} == {"train": 700, "val": 500}
    assert large.details == []


def test_loaders_have_the_sizes_that_options_say(parse, tmp_path):
    data, prepared = find_images(str(make_photos(tmp_path / "d", 4))), []
    preprocess = dict(resize=36, crop=32, interpolation="bilinear", **pretrained.IMAGENET)
    process = accelerator(prepare=lambda loader: prepared.append(loader) or loader)
    args = options(parse, "--gradient_accumulation_steps 2")
    loaders = script.build_loaders(process, data, preprocess, 5, PLAN, args)
    assert set(loaders) == {"train", "val", "sample"} and len(prepared) == 3
    assert len(loaders["sample"].dataset) == 5 and len(loaders["val"].dataset) == 12
    batches = list(loaders["train"])
    assert len(batches) == 6 and all(batch["images"].shape == (2, 3, 32, 32) for batch in batches)
    assert next(iter(loaders["val"]))["images"].shape[1:] == (3, 32, 32)
    # One batch, again and again, looks as in an evaluation.
    data.splits["train"] = data.splits["val"]
    args = options(parse, "--overfit_batch")
    plain = script.build_loaders(process, data, preprocess, 12, PLAN, args)
    whole = torch.cat([batch["images"] for batch in plain["val"]])
    for batch in plain["train"]:
        assert torch.equal(batch["images"], whole[batch["ids"]])
    assert script.blank_batch(8, "cpu")["images"].shape == (2, 3, 8, 8)
