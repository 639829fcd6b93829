"""Benchmarks end as other programs do where a user gave something wrong: one line, code 2."""

import pytest

from benchmarks.harness.command import errors_in_one_line, parser_of


@pytest.mark.parametrize("error", [ValueError("dp is 0: take 1 or more\nand more"), OSError("no such file")])
def test_error_in_one_line(monkeypatch, capsys, error):
    monkeypatch.setattr("sys.argv", ["benchmarks/simulate.py", "--dp=0"])
    with pytest.raises(SystemExit) as end, errors_in_one_line():
        raise error
    assert end.value.code == 2
    assert capsys.readouterr().err == f"simulate.py: error: {str(error).splitlines()[0]}\n"


def test_help_names_the_flags_that_go_along(capsys):
    with pytest.raises(SystemExit):
        parser_of("100% of it.\nMore.", "train_mp.py").parse_args(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "100% of it." in told and "python train_mp.py --help" in told and "More." not in told
