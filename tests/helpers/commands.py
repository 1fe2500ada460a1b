"""Run command lines in this process."""

from types import SimpleNamespace


def run(main, capture, *argv, code: int = 0) -> SimpleNamespace:
    """Run ``main`` with these arguments, check its exit code, and return ``code``, ``out`` and ``err``.

    capture: the fixture ``capsys`` or ``capfd``.
    """
    capture.readouterr()
    found = SimpleNamespace(code=main([str(arg) for arg in argv]), **capture.readouterr()._asdict())
    assert found.code == code, found.out + found.err
    return found
