"""Each recipe applies to the script as it is, and the changed script trains and resumes exactly."""

import importlib.util
import json
import math
import re

import numpy as np
import pytest
import recipes
import torch
from harness.chats import make_tokenizer
from harness.data import SMALL_DATA
from harness.language_models import make_model
from harness.launches import (
    ROOT,
    as_if_killed,
    final_weights,
    metrics,
    results,
    run,
    some_slow,
    status,
)
from PIL import Image

CIFAR = f"--dataset {SMALL_DATA} --batch_size 20 --track none"
MINIMAL = "--max_train_steps 6 --eval_every 6 --checkpoint_every 4 --log_every 1"
LM = f"--model {{folder}}/model --block_size 64 --batch_size 4 --track none {MINIMAL}"
IMAGES = (
    "--model squeezenet1_1 --image_size 32 --batch_size 8 --lr 1e-3 --num_workers 0 --epochs 1 "
    f"--track none {MINIMAL}"
)
USUAL = (
    "compression contrastive diffusion detection ema gan model_output optimizer preference "
    "segmentation text_classification tracker"
)
WITH_IMAGES = ("layer_decay", "mixup", "rare_classes", "unfreezing")
ARGUMENTS = {
    **dict.fromkeys(USUAL.split(), MINIMAL),
    **dict.fromkeys(WITH_IMAGES, f"--dataset synthetic {IMAGES}"),
    "distillation": f"{CIFAR} --model net --teacher {{folder}}/teacher {MINIMAL}",
    "folds": f"--dataset synthetic --fold 1 {IMAGES}",
    "freezing": LM,
    "mixture": f"--mix {{folder}}/more.jsonl 0.25 {LM}",
    "qlora": f"--lora_rank 4 --lr 1e-2 {LM}",
    "regression": f"--csv {{folder}}/table.csv {MINIMAL}",
    "schedule_and_accumulation": f"--gradient_accumulation_steps 2 {MINIMAL}",
    "several_labels": f"--dataset {{folder}}/photos {IMAGES}",
}
PACKAGES = {
    "freezing": "peft",
    "mixture": "peft",
    "model_output": "transformers",
    "optimizer": "schedulefree",
}
PACKAGES |= {"several_labels": "torchmetrics", "text_classification": "transformers"}
PACKAGES |= {"preference": "transformers", "detection": "pycocotools", "qlora": "bitsandbytes"}
# The kinds of training of the gallery: of a part of their defaults, the steps, and what they reach at
# least by then. scripts/recipes/README.md has the numbers of whole runs.
GALLERY = {
    "segmentation": (180, "val_iou", 0.8),
    "gan": (225, "val_wasserstein", 0.2),
    "diffusion": (225, "val_loss", 0.3),
    "contrastive": (240, "val_accuracy", 0.7),
    "detection": (160, "val_map", 0.15),
    "text_classification": (600, "val_f1", 0.85),
    "preference": (60, "val_accuracy", 0.95),
}
LOWER_IS_BETTER = ("val_wasserstein", "val_loss")
EXPORTED = {
    "cifar": f"{CIFAR} --model net --max_train_steps 1",
    "images": f"--dataset synthetic {IMAGES} --max_train_steps 1",
    "gpt": "--dataset synthetic --n_layer 1 --n_head 2 --n_embd 32 --block_size 32 --batch_size 4 "
    "--num_workers 0 --track none --max_train_steps 1",
    "lm": f"{LM} --max_train_steps 1",
}
# What is killed by a slow test; for the others it is enough that they train.
KILLED = ("several_labels", "mixture", "qlora", *GALLERY)
LONG = ("mixup", "rare_classes", "freezing", "distillation", "folds", "layer_decay", "unfreezing")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Data for the recipes, and a project with the changed scripts."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "utils").symlink_to(ROOT / "utils")
    for recipe in recipes.RECIPES:
        recipes.apply(recipe, folder / f"train_{recipe.stem}.py")
    for script in (ROOT / "scripts").glob("train_*.py"):  # which define models
        (folder / script.name).symlink_to(script)
    # With a column that is the same in all rows.
    rows = "".join(f"{i % 31},{i % 17},7,{i % 31 * (i % 17)}\n" for i in range(1000))
    (folder / "table.csv").write_text(f"a,b,c,product\n{rows}")
    pair = {"prompt": "2 and 2?", "completion": "4"}
    (folder / "more.jsonl").write_text(f"{json.dumps(pair)}\n" * 40)
    for camera in "ab":
        (folder / "photos" / camera).mkdir(parents=True)
    lines, random = ["name,red,green,blue"], np.random.default_rng(0)
    for number in range(60):
        on = random.integers(0, 2, 3)
        image = Image.new("RGB", (40, 40), tuple(int(200 * x) for x in on))
        image.save(folder / "photos" / "ab"[number % 2] / f"{number}.png")
        lines.append(f"{number}.png,{on[0]},{on[1]},{on[2]}")
    (folder / "photos" / "labels.csv").write_text("\n".join(lines) + "\n")
    if importlib.util.find_spec("transformers"):
        sizes = dict(hidden_size=128, intermediate_size=256, head_dim=32)  # 64 share a scale
        make_model("qwen3", **sizes).save_pretrained(folder / "model")
        make_tokenizer().save_pretrained(folder / "model")
    return folder


@pytest.fixture
def arguments(folder):
    """`arguments(name)`: those of a recipe, whose test is skipped without its packages."""

    def get(name):
        if name in PACKAGES:
            pytest.importorskip(PACKAGES[name])
        if name == "distillation":
            teacher = f"{CIFAR} --model resnet18 --max_train_steps 1"
            run(None, "scripts/train_cifar.py", teacher, output_dir=folder / "teacher")
        return ARGUMENTS[name].format(folder=folder)

    return get


@pytest.mark.parametrize("recipe", recipes.RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_is_short_and_as_written_against_the_script(recipe):
    """`python tests/recipes.py` writes it anew. Lines may have moved."""
    text = recipe.read_text()
    lines, renewed = (re.sub(r"(?m)^@@ .*", "@@", diff) for diff in (text, recipes.renewed(recipe)))
    assert lines == renewed
    most = 90 if recipe.stem in (*GALLERY, "onnx") else 35
    assert len(re.findall(r"^\+(?!\+\+)", text, re.MULTILINE)) <= most
    wish = text.partition("\n")[0]
    row = rf"^\| {re.escape(wish[0].lower() + wish[1:])} \| `{recipe.name}` \| `{recipes.base(recipe).name}`"
    assert re.search(row, (recipe.parent / "README.md").read_text(), re.MULTILINE), wish


@pytest.mark.parametrize(
    "name", some_slow([name for name in ARGUMENTS if name not in KILLED], *LONG)
)
def test_a_recipe_trains(name, folder, arguments, tmp_path):
    run(None, f"train_{name}.py", arguments(name), root=folder, output_dir=tmp_path / "run")
    check_results(name, tmp_path / "run")


def check_results(name, folder):
    """Whether a run has what its recipe is for."""
    lines = metrics(folder, "train")
    assert status(folder)["state"] == "finished" and len(lines) == 6
    assert all(math.isfinite(line["loss"]) for line in lines)
    if name == "tracker":
        tracked = [json.loads(line) for line in (folder / "lines.jsonl").open()]
        assert [line["step"] for line in tracked if "train/loss" in line] == [1, 2, 3, 4, 5, 6]
    elif name == "several_labels":
        assert results(folder)["per_label_f1"].keys() == {"red", "green", "blue"}
        assert 0 <= results(folder)["val_map"] <= 1
    elif name == "schedule_and_accumulation":
        rates = [line["lr"] for line in lines]
        assert rates == sorted(rates, reverse=True) and rates[-1] == 0


def test_rare_classes_are_drawn_as_often_as_the_others(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    labels, orders = np.array([0] * 990 + [1] * 10), []
    drawn = importlib.import_module("train_rare_classes").BalancedSampler(labels, 50, seed=3)
    for epoch in (0, 1):
        drawn.set_epoch(epoch)
        epochs, order = zip(*drawn, strict=True)
        orders.append(order)
        assert set(epochs) == {epoch} and len(order) == 1000
        assert 0.45 < labels[list(order)].mean() < 0.55
    assert orders[0] != orders[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ema", "schedule_and_accumulation", *KILLED])
def test_a_killed_recipe_ends_with_the_same_bytes(name, folder, arguments, tmp_path):
    words, script = f"{arguments(name)} --keep_checkpoints 9", f"train_{name}.py"
    whole, killed, alone = (tmp_path / kind for kind in ("whole", "killed", "alone"))
    run("2cpu", script, words, root=folder, output_dir=whole)
    check_results(name, whole)
    as_if_killed(whole, killed, 4)
    run("2cpu", script, words, root=folder, output_dir=killed)
    assert results(killed)["resumed_from"] == 4
    assert final_weights(killed) == final_weights(whole)
    if name in GALLERY:  # on one process: the same losses and metrics
        run(None, script, words, root=folder, output_dir=alone)
        lines = [metrics(made, "train") + metrics(made, "val") for made in (alone, whole)]
        for one, two in zip(*lines, strict=True):
            assert one.pop("split") == two.pop("split")
            assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", GALLERY)
def test_a_recipe_of_the_gallery_learns(name, folder, arguments, tmp_path):
    arguments(name)  # skips it without its packages
    steps, metric, least = GALLERY[name]
    words = f"--max_train_steps {steps} --eval_every {steps}"
    run("2cpu", f"train_{name}.py", words, root=folder, output_dir=tmp_path)
    reached = results(tmp_path)[metric]
    assert reached < least if metric in LOWER_IS_BETTER else reached > least


@pytest.mark.slow
def test_preferences_have_the_loss_of_trl(folder, tmp_path, monkeypatch):
    trl = pytest.importorskip("trl")
    import datasets

    monkeypatch.syspath_prepend(folder)
    recipe = importlib.import_module("train_preference")
    rows, tokenizer = list(recipe.make_rows(0, 16)), recipe.ByT5Tokenizer()
    torch.manual_seed(0)
    before, model = recipe.build_model(tokenizer), recipe.build_model(tokenizer)
    options = dict(output_dir=str(tmp_path), per_device_train_batch_size=16, report_to="none")
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=before,
        args=trl.DPOConfig(**options, beta=0.1, max_length=None, use_cpu=True, bf16=False),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    (batch,) = trainer.get_train_dataloader()
    columns = "chosen", "rejected"
    pairs = [
        [recipe.encode(tokenizer, row["prompt"], row[name]) for name in columns] for row in rows
    ]
    _, x, y = recipe.collate(list(enumerate(pairs)))
    values, reference = (recipe.log_probabilities(each, x, y) for each in (model, before))
    loss, _ = recipe.compute_loss(values, reference)
    assert abs(loss - math.log(2)) > 1e-3  # of models that are equal
    assert loss.item() == pytest.approx(trainer.compute_loss(model, batch).item(), abs=1e-5)


@pytest.mark.parametrize("script", some_slow(EXPORTED, "cifar", "images", "lm"))
def test_the_model_of_a_run_is_exported(script, folder, tmp_path):
    """The recipe itself compares the outputs, too: here those of the two files, for another batch."""
    onnxruntime = pytest.importorskip("onnxruntime")
    words = EXPORTED[script].format(folder=folder)
    run(None, f"scripts/train_{script}.py", words, output_dir=tmp_path)
    run(None, "train_onnx.py", str(tmp_path), root=folder)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (wanted,) = session.get_inputs()
    sizes = [5, *(size if isinstance(size, int) else 7 for size in wanted.shape[1:])]
    kind = {"tensor(uint8)": torch.uint8, "tensor(int64)": torch.int64}[wanted.type]
    inputs = torch.randint(200, sizes, generator=torch.Generator().manual_seed(1)).to(kind)
    (found,) = session.run(None, {"inputs": inputs.numpy()})
    with torch.no_grad():
        expected = torch.export.load(tmp_path / "model.pt2").module()(inputs)
    assert len(found) == 5 and expected.std() > 0
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-3, atol=1e-4)
