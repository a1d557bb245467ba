"""Which images, classes and counts the plots of a classifier show."""

from types import SimpleNamespace

import pytest
import torch

from utils.images import classifier_plots
from utils.report import plots

CLASSES = ["cat", "dog", "a long name of a class"]
WRONG, RIGHT = "#cf222e", "#1a7f37"


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved, by the name of their file."""
    saved, save = {}, plots.save

    def follow(figure, path):
        saved[path.name] = figure
        save(figure, path)

    monkeypatch.setattr(plots, "save", follow)
    return saved


def texts(figure):
    return [(text.get_text(), text.get_color()) for text in figure.axes[0].texts]


@pytest.mark.parametrize(("count", "columns"), [(1, 4), (5, 5), (20, 8)])
def test_an_image_stands_below_its_class_and_few_leave_little_white(
    count, columns, tmp_path, figures
):
    images = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 10, 20)
    labels = torch.zeros(count).long()
    predictions = labels.clone()
    predictions[-1] = 2
    shown = (images, labels, predictions, CLASSES, "A title")
    assert classifier_plots.image_grid(tmp_path / "a.png", *shown) is True
    figure, rows = figures["a.png"], -(-count // columns)
    (shown,) = figure.axes[0].images
    assert shown.get_size() == (rows * 14, columns * 23)
    for index, text in enumerate(figure.axes[0].texts):
        row, column = divmod(index, columns)
        place = (slice(row * 14 + 4, row * 14 + 14), slice(column * 23, column * 23 + 20))
        assert (shown.get_array()[place] == index).all()
        x, y = text.get_position()
        assert x == column * 23 + 10 and row * 14 <= y < row * 14 + 1
        assert text.get_ha() == "center" and text.get_va() == "top"
        assert text.get_in_layout() == (column in (0, columns - 1))
    mistake = ("a long name o…\n(true: cat)", WRONG)
    assert texts(figure) == [("cat", RIGHT)] * (count - 1) + [mistake]
    assert figure.get_suptitle() == "A title"
    assert (shown.get_array()[4:14, 20:23] == 255).all()  # the margin beside the first image


def test_a_confusion_matrix_has_the_share_of_each_true_class(tmp_path, figures):
    counts = torch.tensor([[999, 1, 0], [3, 1, 0], [0, 0, 0]])
    names = ["cat", "$dog", "none"]
    assert classifier_plots.confusion_matrix(tmp_path / "b.png", counts, names) is True
    (axis,) = figures["b.png"].axes
    (shown,) = axis.images
    expected = [[99.9, 0.1, 0], [75, 25, 0], [0, 0, 0]]
    torch.testing.assert_close(torch.tensor(shown.get_array()), torch.tensor(expected))
    assert shown.get_clim() == (0, 100)
    assert [text.get_position() for text in axis.texts] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    percentages = [("99.9", "white"), ("0.1", "black"), ("75.0", "white"), ("25.0", "black")]
    assert texts(figures["b.png"]) == percentages
    for ticks in (axis.get_xticklabels(), axis.get_yticklabels()):
        assert [tick.get_text() for tick in ticks] == ["cat", r"\$dog", "none"]
    assert axis.get_xticklabels()[0].get_rotation() == 45
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("predicted class", "true class")
    assert axis.get_title() == "Percentage of each true class (1,004 images, 99.60 % correct)"
    width, height = figures["b.png"].get_size_inches()
    assert (width, height) == (6.2, pytest.approx(0.58 * 3 + 1.6))
    large = torch.eye(21).long()
    classifier_plots.confusion_matrix(tmp_path / "b.png", large, [str(i) for i in range(21)])
    assert not figures["b.png"].axes[0].texts  # no room
    assert figures["b.png"].get_size_inches()[0] == pytest.approx(0.62 * 21 + 2)


def draw(folder, labels, predictions, losses, class_names):
    """What `of_images` returns, and which images it reads."""
    read = []

    def getitems(ids):
        read.append(ids)
        return {"images": torch.zeros(len(ids), 3, 4, 4, dtype=torch.uint8)}

    samples = {"labels": labels, "predictions": predictions, "losses": losses}
    dataset = SimpleNamespace(__getitems__=getitems)
    return classifier_plots.of_images(folder, dataset, samples, class_names), read


def test_images_of_all_classes_and_the_worst_mistakes_are_shown(tmp_path, figures):
    labels = torch.arange(100) // 50
    labels[::10] = -1  # ten cannot be read
    predictions, losses = labels.clamp(min=0), torch.arange(100.0)
    predictions[[1, 5, 7]], losses[7] = 1, 1.0  # of equal losses, the first one
    drawn, (shown, worst) = draw(tmp_path, labels, predictions, losses, ["a", "b"])
    assert list(drawn) == ["predictions", "mistakes", "confusion_matrix"]
    readable = [index for index in range(100) if index % 10]
    assert len(shown) == 40 and shown == sorted(shown) and set(shown) <= set(readable)
    assert (shown[0], shown[-1]) == (1, 99) and worst == [5, 1, 7]
    correct = 40 - len({1, 5, 7} & set(shown))
    assert figures["predictions.png"].get_suptitle() == f"40 of 90 images, {correct} correct"
    title = "3 mistakes with the highest loss, of 3 among 90 images"
    assert figures["mistakes.png"].get_suptitle() == title
    assert texts(figures["mistakes.png"]) == [("b\n(true: a)", WRONG)] * 3
    assert "(90 images, 96.67 %" in figures["confusion_matrix.png"].axes[0].get_title()


def test_few_images_are_all_shown_and_only_what_there_is_is_drawn(tmp_path, figures):
    """No matrix without a mistake, nor of so many classes that nobody could read it."""
    labels = torch.arange(51)
    drawn, read = draw(tmp_path, labels[:3], labels[:3], torch.zeros(3), ["x"] * 51)
    assert list(drawn) == ["predictions"] and read == [[0, 1, 2]]
    assert figures["predictions.png"].get_suptitle() == "3 images, 3 correct"
    drawn, _ = draw(tmp_path, labels[:50], labels[:50].roll(1), torch.zeros(50), ["x"] * 50)
    assert list(drawn) == ["predictions", "mistakes", "confusion_matrix"]
    for name, pixels in drawn.items():
        assert pixels.shape[0] == 1 and pixels.shape[3] == 3 and (tmp_path / f"{name}.png").exists()
    title = figures["mistakes.png"].get_suptitle()
    assert title.startswith("40 mistakes with the highest loss, of")
    drawn, _ = draw(tmp_path, labels, labels.roll(1), torch.zeros(51), ["x"] * 51)
    assert list(drawn) == ["predictions", "mistakes"]
    assert draw(tmp_path, labels[:2] * 0 - 1, labels[:2], torch.zeros(2), ["x"])[0] == {}


def test_long_names_are_shortened():
    shortened = [classifier_plots.shorten("a" * length) for length in (14, 15)]
    assert shortened == ["a" * 14, "a" * 13 + "…"]
