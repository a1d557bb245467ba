"""How processes share a data set; batches of evaluations are in tests/properties."""

from types import SimpleNamespace

import pytest
from harness.fakes import accelerator

from utils.data import sharing
from utils.run.failures import UserError


def test_a_data_set_must_be_the_same_on_every_process(monkeypatch, capsys):
    data = SimpleNamespace(description="8 images", details=["cat 4", "dog 4"])
    monkeypatch.setattr(sharing, "gather", lambda _, own: [own, "8 images"])
    for rank in (0, 1):
        assert sharing.agree(accelerator(2, rank), "photos", data) == "8 images"
    assert capsys.readouterr().out == "data: 8 images\n  cat 4\n  dog 4\n"
    monkeypatch.setattr(sharing, "gather", lambda _, own: [own, "7 images"])
    says = "--dataset photos differs between machines: 7 images against 8 images"
    with pytest.raises(UserError, match=says):
        sharing.agree(accelerator(2, 0), "photos", data)
