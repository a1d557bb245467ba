"""Scores are those of plain formulas, however samples are divided over processes and batches."""

import contextlib
import itertools
import math

import numpy as np
import pytest
import torch
from harness.data import Loader
from harness.fakes import accelerator
from harness.launches import load_script
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from utils.data import evaluation
from utils.images import scores as image_scores
from utils.run.failures import UserError

LABELS = st.lists(st.integers(-1, 6), min_size=1, max_size=30)  # of seven classes, or unreadable
SEEDS = st.integers(0, 2**32 - 1)
COLORS = (torch.zeros(3), torch.full((3,), 255.0))


def drawn(labels, seed, classes=7):
    """Logits float64 [samples, classes] and the labels, for a formula and for the scripts alike."""
    logits = np.random.default_rng(seed).normal(size=(len(labels), classes)) * 3
    return logits.astype(np.float32), np.array(labels)


def plain_losses(logits, labels):
    """The cross-entropy of each sample."""
    rows = zip(logits.astype(float), labels, strict=True)
    return np.array([np.log(np.exp(row).sum()) - row[label] for row, label in rows])


def ranked(logits):
    return np.argsort(-logits, axis=1)


def plain_metrics(logits, labels):
    """What `summarize` promises, class by class and image by image."""
    logits, labels = logits[labels >= 0], labels[labels >= 0]
    losses, top = plain_losses(logits, labels), ranked(logits)
    right, many = (top[:, 0] == labels).astype(float), len(labels)
    recalls, f1_scores = [], []
    for label in range(logits.shape[1]):
        hits = np.sum((labels == label) & (top[:, 0] == label))
        true, predicted = np.sum(labels == label), np.sum(top[:, 0] == label)
        if true:
            recalls.append(hits / true)
        if true + predicted:
            f1_scores.append(2 * hits / (true + predicted))
    expected = {
        "loss": losses.mean(),
        "accuracy": right.mean(),
        "top5": np.mean([label in row[:5] for label, row in zip(labels, top, strict=True)]),
        "balanced_accuracy": np.mean(recalls),
        "macro_f1": np.mean(f1_scores),
        "images": many,
    }
    if many > 1:
        expected["loss_standard_error"] = losses.std(ddof=1) / math.sqrt(many)
        expected["accuracy_standard_error"] = right.std(ddof=1) / math.sqrt(many)
    return expected


def near(expected):
    return pytest.approx(expected, rel=1e-4, abs=1e-5)


@given(LABELS, SEEDS, st.sampled_from([2, 4, 5, 7]))
def test_a_summary_is_that_of_plain_formulas(labels, seed, classes):
    labels = [min(label, classes - 1) for label in labels]
    assume(max(labels) >= 0)
    logits, labels = drawn(labels, seed, classes)
    top, right = ranked(logits), ranked(logits)[:, 0] == labels
    tensors = [torch.from_numpy(x) for x in (labels, plain_losses(logits, labels), top[:, :5])]
    found, expected = image_scores.summarize(*tensors), plain_metrics(logits, labels)
    if classes < 5:
        del expected["top5"]
    assert found == near(expected)
    for name, value in found.items():
        assert image_scores.score(found, name) == (-value if name == "loss" else value)
    counted = np.where(labels >= 0, top[:, 0], -1)
    shares = [
        {f"class {i}": right[some == i].mean() for i in range(classes) if i in some}
        for some in (labels, counted)
    ]
    names = [f"class {i}" for i in range(classes)]
    found = image_scores.per_class(tensors[0], tensors[2][:, 0], names)
    assert found == {"per_class": near(shares[0]), "per_class_precision": near(shares[1])}
    for part in found.values():
        assert list(part.values()) == sorted(part.values(), reverse=True)


def test_the_score_of_no_image_is_refused():
    with pytest.raises(UserError, match="none of the 2 images can be read"):
        image_scores.summarize(torch.tensor([-1, -1]), torch.zeros(2), torch.zeros(2, 2))


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(0, 9)), max_size=20), st.integers(0, 20))
def test_moments_of_parts_add_up_to_a_mean_over_tokens_and_its_error(samples, place):
    sums = torch.tensor([loss * count for loss, count in samples], dtype=torch.float64)
    counts = torch.tensor([count for _, count in samples], dtype=torch.int64)
    assume(counts.sum() > 0)
    parts = evaluation.moments(sums[:place], counts[:place])
    parts = parts + evaluation.moments(sums[place:], counts[place:])
    mean, error, total = evaluation.mean_and_error(parts)
    used, n = (counts > 0).numpy(), counts.numpy()
    assert (mean, total) == (near(sums.numpy().sum() / n.sum()), n.sum())
    if used.sum() < 2:
        assert error is None
    else:
        residuals = (sums.numpy() - mean * n)[used]
        factor = used.sum() / (used.sum() - 1)
        plain = math.sqrt(np.square(residuals).sum() * factor) / n.sum()
        assert error == pytest.approx(plain, rel=1e-4, abs=1e-3)
    assert evaluation.with_error("loss", mean, None) == {"loss": mean}
    assert evaluation.with_error("loss", mean, 2.0) == {"loss": mean, "loss_standard_error": 2.0}


# ------------------------------------------------------------------ what the scripts report


class Pixels(torch.nn.Module):
    """Takes the logits from the image: exactly, as they are multiples of 1/255."""

    def __init__(self):
        super().__init__()
        self.norm, self.passes = torch.nn.BatchNorm2d(3), []

    def forward(self, x):
        self.passes.append(self.training or self.norm.training)
        return 8 * x.flatten(1)


class Batches:
    """A split whose samples are loaded as batches already."""

    def __init__(self, samples):
        self.samples = samples

    def batch(self, batch):
        return batch

    def __len__(self):
        return len(self.samples)


def alone(dropped=0):
    """One process, which may lose samples of each batch."""

    def gather_for_metrics(values):
        return tuple(value[dropped:] for value in values)

    return accelerator(autocast=contextlib.nullcontext, gather_for_metrics=gather_for_metrics)


def batches_of(labels, seed, cuts=()):
    """Images with these labels in batches that end at `cuts`, and their logits."""
    order = np.tile(np.arange(12), (len(labels), 1))
    images = torch.from_numpy(20 * np.random.default_rng(seed).permuted(order, axis=1))
    images = images.to(torch.uint8).view(-1, 3, 2, 2)
    ends, batches = [0, *sorted(cuts), len(labels)], []
    for ids in itertools.starmap(torch.arange, itertools.pairwise(ends)):
        batches.append({"images": images[ids], "labels": labels[ids], "ids": ids})
    return Loader(batches, labels), 8 * (images.flatten(1).numpy() / 255)


@pytest.mark.parametrize("name", ["train_images", "train_cifar", "train_model_parallel"])
@settings(max_examples=20)
@given(LABELS, SEEDS, st.sets(st.integers(1, 30), max_size=4))
def test_what_scripts_report_does_not_depend_on_batches(name, labels, seed, cuts):
    """Also with classes that no image has; and of train_images.py, images that cannot be read."""
    assume(max(labels) >= 0)
    labels, cuts = torch.tensor(labels), {cut for cut in cuts if cut < len(labels)}
    labels = labels if name == "train_images" else labels.clamp(min=0)
    loader, logits = batches_of(labels, seed, cuts)
    model, evaluate = Pixels(), load_script(name).evaluate
    split = [] if name == "train_images" else [Batches(labels)]
    inputs = (model, *split, loader, iter, *COLORS)
    more = {"size": 2} if name == "train_cifar" else {}
    found, expected = evaluate(alone(), *inputs, **more), plain_metrics(logits, labels.numpy())
    assert model.passes == [False] * len(loader) and model.training and model.norm.training
    if name != "train_model_parallel":
        found, samples = found
        losses = np.where(labels >= 0, plain_losses(logits, labels.numpy()), 0)
        assert samples["losses"].numpy() == near(losses) and samples["labels"].equal(labels)
        assert samples["predictions"].tolist() == logits.argmax(1).tolist()
    metrics = expected.keys() if name == "train_images" else {"loss", "accuracy"}
    assert found == near({metric: expected[metric] for metric in metrics})
    left = len(labels) - len(loader)
    with pytest.raises(RuntimeError, match=f"evaluated {left} of {len(labels)}"):
        evaluate(alone(dropped=1), *inputs, **more)


@settings(max_examples=20)
@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=12),
    st.integers(0, 12),
    st.sampled_from([0.0, 0.1]),
    SEEDS,
)
def test_a_weighted_loss_is_that_of_any_micro_batches(labels, place, smoothing, seed):
    """Every class that has images counts as much as the others, and a missing one changes none."""
    script, place = load_script("train_images"), place % (len(labels) - 1) + 1
    generator, labels = np.random.default_rng(seed), np.array(labels)
    images = torch.from_numpy(generator.integers(0, 256, (len(labels), 3, 1, 1), dtype=np.uint8))
    args = accelerator(class_weights="balanced", label_smoothing=smoothing)
    data = accelerator(splits={"train": accelerator(labels=labels)}, class_names=list("abc"))
    weights = script.class_weights(data, "cpu", args)
    counts = np.maximum(np.bincount(labels, minlength=3), 1)
    assert weights.tolist() == near(len(labels) / (3 * counts))

    def loss(part):
        batch = {"images": images[part], "labels": torch.from_numpy(labels)[part]}
        return script.compute_loss(Pixels(), batch, *COLORS, args, weights).item()

    logits = 8 * (images.flatten(1).numpy() / 255)
    targets = np.eye(3)[labels] * (1 - smoothing) + smoothing / 3
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    losses = -(targets * logs * weights.numpy()).sum(1)
    assert loss(slice(None)) == near(losses.mean())
    parts = [loss(slice(place)) * place, loss(slice(place, None)) * (len(labels) - place)]
    assert sum(parts) / len(labels) == near(losses.mean())
    args.class_weights = "none"
    assert script.class_weights(data, "cpu", args) is None
