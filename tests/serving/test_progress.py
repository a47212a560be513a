"""Progress where there is no terminal: lines with the time taken and left."""

from serving.telemetry.progress import ProgressLines, progress_bar


def test_lines_say_what_is_left_and_are_few():
    said, now = [], 0.0
    lines = ProgressLines(said.append, lambda: now)
    for done in range(101):
        lines("compiling", done, 100)
        now += 0.25
    assert said[0] == "compiling: 0 of 100 after 0 s"
    assert said[1] == "compiling: 4 of 100 after 1 s, 24 s left"
    assert said[-1] == "compiling: 100 of 100 after 25 s"
    assert len(said) == 26


def test_each_kind_of_work_has_its_own_clock_and_what_was_done_before_took_no_time():
    said, now = [], 10.0
    lines = ProgressLines(said.append, lambda: now)
    lines("loading", 3, 3)
    now = 20.0
    lines("layers", 50, 100, "loss 2.5")  # resumed
    now = 30.0
    lines("layers", 60, 100, "loss 2.4")
    assert said[1:] == [
        "layers: 50 of 100 after 0 s loss 2.5",
        "layers: 60 of 100 after 10 s, 40 s left loss 2.4",
    ]


def test_without_a_terminal_lines_go_to_standard_error(capsys):
    with progress_bar() as progress:
        progress("loading", 1, 2)
    assert "loading: 1 of 2" in capsys.readouterr().err
