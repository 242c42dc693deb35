"""Progress: quiet at first, a line per stage without a terminal, a bar with one."""

import io

import pytest
from rich.console import Console

from measureflow import progress
from measureflow.progress import progress_over


def run(stages: list[str], **settings) -> None:
    with progress_over("flow", len(stages), **settings) as advance:
        for stage in stages:
            advance(stage)


def test_quick_work_says_nothing(capsys):
    run(["gather", "match"])
    assert capsys.readouterr() == ("", "")


def test_lines_name_each_stage_once_on_stderr(capsys, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    run(["gather", "match", "match", ""])
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.rsplit(",", 1)[0] for line in err.splitlines()] == [
        "flow: gather, 1 of 4",
        "flow: match, 2 of 4",
        "flow: layers, 4 of 4",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_p46_square_brackets_of_a_stage_are_kept(terminal, monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    screen = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=screen, force_terminal=terminal, width=100))
    run(["pair[/b]", "[red]move"])
    assert "[red]move" in screen.getvalue()


def test_a_bar_shows_how_far_at_a_terminal(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    screen = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=screen, force_terminal=True, width=100))
    run(["gather", "match"])
    assert "2/2" in screen.getvalue()


def test_not_shown_means_not_shown(capsys, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    run(["gather"], shown=False)
    assert capsys.readouterr() == ("", "")


def test_errors_of_the_work_pass_through(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=io.StringIO(), force_terminal=True))
    with pytest.raises(KeyError, match="lost"), progress_over("flow", 3):
        raise KeyError("lost")
