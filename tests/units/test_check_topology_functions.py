"""Functions of check_topology.py."""

import pytest
from harness.launches import load_script

from utils.run.failures import UserError


def test_each_problem_is_a_line(monkeypatch, capsys):
    script = load_script("check_topology")
    script.refuse([])
    for rank, printed in ((0, "error: one\nerror: two\n"), (1, "")):
        monkeypatch.setattr(script, "RANK", rank)
        with pytest.raises(UserError, match=r"^three$"):
            script.refuse(["one", "two", "three"])
        assert capsys.readouterr().err == printed
