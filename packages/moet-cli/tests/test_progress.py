from moet_cli.progress import describe, shown
from moet_cli.supervise import Progress


def test_silence_is_told_apart_from_slowness():
    assert describe(Progress("loading", 34.2, 3)) == "loading: 34 s"
    assert describe(Progress("loading", 34.2, 20)) == "loading: 34 s (nothing logged for 20 s)"


def test_without_a_terminal_a_line_for_each_phase_and_now_and_then(capsys):
    with shown() as show:
        for elapsed in range(0, 40, 5):
            show(Progress("loading" if elapsed < 10 else "compiling", elapsed, 0))
    assert capsys.readouterr().err.splitlines() == [
        "loading: 0 s",
        "compiling: 10 s",
        "compiling: 25 s",
    ]
