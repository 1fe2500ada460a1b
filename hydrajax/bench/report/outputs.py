"""Find results in a directory: result files, the records of commands (`hydrajax.bench.report.records`), and metrics."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydrajax.bench.report.records import of_training
from hydrajax.bench.report.results import RECORDS, Result, check, in_lines, result_from
from hydrajax.errors import HydrajaxError
from hydrajax.files import check_file
from hydrajax.text.jsonl import json_lines


def find_results(directory: str | Path) -> tuple[list[tuple[Path, Result]], list[Path]]:
    """Find all results in a directory and below, sorted by path.

    Metrics of training runs in sibling folders, or in files of one folder, are joined into one result.

    Returns:
        ``(file, result)`` pairs, and the JSON files that contain no result.

    Raises:
        HydrajaxError: the directory does not exist, a file cannot be read, or a result file is damaged.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise HydrajaxError(f"report: {directory} is not a directory")
    found, others = [], []
    for path in sorted((*folder.rglob("*.json"), *folder.rglob("*.jsonl"))):
        check_file(path, "report")
        try:
            read = _of_metrics if path.suffix == ".jsonl" else _of_json
            results = list(read(path))
        except OSError as error:
            raise HydrajaxError(f"report: cannot read {path}: {error.strerror}") from None
        found += [(path, Result(**in_lines(vars(result)))) for result in results]
        if not results:
            others.append(path)
    return _joined(found), others


def _of_json(path: Path) -> Iterator[Result]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):  # not a file of ours
        return
    if not isinstance(content, dict):
        return
    several = content.get(RECORDS)
    for record in [content] if "hydrajax_result" in content else several if isinstance(several, list) else []:
        yield result_from(record, str(path))


def _of_metrics(path: Path) -> Iterator[Result]:
    """The last evaluation in a training run's metrics.jsonl; other lines, also damaged ones, are left alone."""
    lines = [line for _, line in json_lines(path.read_bytes(), path) if isinstance(line, dict)]
    evaluations = [line for line in lines if line.get("kind") == "eval" and "top1" in line and "step" in line]
    try:
        for result in of_training(evaluations[-1], path.parent.name if path.stem == "metrics" else path.stem):
            check(vars(result), str(path))
            yield result
    except (LookupError, TypeError, HydrajaxError):  # another program's file with fields of the same names
        return


def _joined(found: list[tuple[Path, Result]]) -> list[tuple[Path, Result]]:
    """Join training runs: ``RUN/metrics.jsonl`` of sibling folders, or JSON lines of one folder."""
    joined: dict[Any, tuple[Path, Result]] = {}
    for number, (path, result) in enumerate(found):
        group: Any = number
        if path.suffix == ".jsonl":
            group = path.parent.parent if path.stem == "metrics" else path.parent
        first = joined.setdefault(group, (path, result))[1]
        if first is not result:
            first.rows.extend(result.rows)
    return list(joined.values())
