"""The files of a directory that can be reported: result files, and what the commands themselves write.

From ``bench --json``, ``tree search``, ``evaluate`` (its summary.json), ``roofline --device here --json`` and training
(metrics.jsonl), each as the `hydrajax.report.results.Result` it amounts to.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.files import check_file
from hydrajax.questions.summary import OVERALL
from hydrajax.report.results import KINDS, Result, check, in_lines, result_from
from hydrajax.train.metrics import FILE, read_metrics

TOPS = ("top1", "top2", "top3", "top4", "top5")


def find_results(directory: str | Path) -> tuple[list[tuple[Path, Result]], list[Path]]:
    """``(file, result)`` for all below the directory, and the JSON files that are none, both by path.

    Metrics of several training runs in one folder become one result. Raises `HydrajaxError` for no such directory, for
    a file that cannot be read and for a damaged result.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise HydrajaxError(f"report: {directory} is not a directory")
    found, others = [], []
    for path in sorted((*folder.rglob("*.json"), *folder.rglob("*.jsonl"))):
        check_file(path, "report")
        results = list(_results(path))
        found += [(path, Result(**in_lines(vars(result)))) for result in results]
        if not results:
            others.append(path)
    return _merged(found), others


def _results(path: Path) -> Iterator[Result]:
    try:
        content = _metrics(path) if path.suffix == ".jsonl" else json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HydrajaxError(f"report: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):  # not ours, then
        return
    if not isinstance(content, dict):
        return
    if "hydrajax_result" in content:
        yield result_from(content, str(path))
        return
    for reader in READERS:
        try:
            results = list(reader(path, content))
            for result in results:
                check(vars(result), str(path))
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, HydrajaxError):
            continue  # another program's file with fields of the same names
        yield from results


def _metrics(path: Path) -> dict[str, Any] | None:
    """The last evaluation in a training run's metrics.jsonl."""
    try:
        lines = read_metrics(path)
    except HydrajaxError:
        if path.name == FILE:
            raise
        return None  # JSON lines of something else
    evals = [line for line in lines if line["kind"] == "eval" and TOPS[0] in line]
    return {"metrics": evals[-1]} if evals else None


# --- what the commands write ------------------------------------------------------------------------------------------


def _of_bench(path: Path, content: dict) -> Iterator[Result]:
    rows = [{name: row[name] for name in KINDS["steps"]} for row in content["rows"]]
    what = content["arguments"]["random"] or content["arguments"]["base"]
    yield _result("steps", f"a decode step of {what}", rows, content, "bench")
    timed = [row for row in content["rows"] if row["tokens_per_second"] is not None]
    rows = [
        {"name": row["tree"], "equal": row["outputs_equal"], "low": None, "high": None}
        | {name: row[name] for name in ("batch", "nodes", "tokens_per_step", "tokens_per_second", "speedup")}
        for row in timed
    ]
    # The baseline was timed beside each tree: its median over them.
    for batch in sorted({row["batch"] for row in timed}):
        rate = statistics.median(row["autoregressive_tokens_per_second"] for row in timed if row["batch"] == batch)
        plain = {"name": "autoregressive", "batch": batch, "nodes": 1, "tokens_per_second": rate}
        rows.append(plain | {"tokens_per_step": 1.0, "low": None, "high": None, "speedup": 1.0, "equal": None})
    if timed:
        yield _result("speed", f"tokens per second of {what}", rows, content, "bench")


def tree_search_result(content: dict) -> Result:
    """What ``hydrajax tree search`` wrote: the trees it measured."""
    found = content["provenance"]
    drafter, batch = Path(found["arguments"]["draft"]).name, found["arguments"]["batch_size"]
    rows = [
        {"drafter": drafter, "batch": batch, "expected": row["expected_tokens_per_step"]}
        | ({"family": "dynamic", "name": row["name"]} if row["name"].startswith("dynamic-") else _static(row["nodes"]))
        | {name: row[name] for name in ("nodes", "tokens_per_step", "tokens_per_second", "low", "high", "speedup")}
        for row in found["measured"]
    ]
    return _result("trees", f"trees searched for {drafter}, batch {batch}", rows, found, "tree search")


def _of_tree_search(path: Path, content: dict) -> Iterator[Result]:
    yield tree_search_result(content)


def _static(nodes: int) -> dict[str, str]:
    return {"family": family_of(nodes), "name": f"T_{nodes}"}


def family_of(nodes: int) -> str:
    """Of a tree grown from calibration text: the first, the root alone, is no tree yet."""
    return "searched" if nodes > 1 else "root"


def _of_evaluate(path: Path, content: dict) -> Iterator[Result]:
    fields = [name for name in KINDS["categories"] if name not in ("name", "category")]
    rows = [
        {"name": name, "category": category} | {field: figures[field] for field in fields}
        for name, categories in content["results"].items()
        for category, figures in categories.items()
    ]
    yield _result("categories", f"answers to {content['arguments']['set']}", rows, content, "evaluate")
    if scored := _quality_rows(content):
        title = f"scores of answers to {content['arguments']['set']}"
        yield _result("quality", title, scored, content, "evaluate")


def _quality_rows(content: dict) -> list[dict[str, Any]]:
    """Of all questions together; none where nothing was scored."""
    arguments, scores = content["arguments"], content.get("scores", {"results": {}})
    rows = []
    for name, categories in scores["results"].items():
        speed = {field: content["results"][name][OVERALL][field] for field in ("tokens_per_step", "speedup", "equal")}
        for metric, figures in categories.get(OVERALL, {}).items():
            shown = {"score" if field == "mean" else field: value for field, value in figures.items()}
            shown |= {
                field: value * scores["metrics"][metric]
                for field, value in shown.items()
                if field != "questions" and value is not None
            }
            what = {"set": Path(arguments["set"]).name, "metric": metric, "rule": _rule(arguments), "name": name}
            rows.append(what | shown | speed)
    return rows


def _rule(arguments: dict) -> str:
    """The rule with its numbers: ``typical, epsilon 0.1``."""
    numbers = {name: arguments.get(name) for name in ("epsilon", "alpha", "temperature", "top_k", "top_p", "min_p")}
    given = [f"{name} {value:g}" for name, value in numbers.items() if value is not None]
    return ", ".join([arguments["rule"], *given])


def _of_roofline(path: Path, content: dict) -> Iterator[Result]:
    cells = [(cell["predicted"], cell["measured"]) for cell in content["rows"]]
    rows = [
        {name: ours[name] for name in ("batch", "context", "nodes")}
        | {f"predicted_{name}": ours[name] for name in ("step", "autoregressive_step")}
        | {name: theirs[name] for name in ("step", "autoregressive_step")}
        for ours, theirs in cells
    ]
    yield _result("prediction", "steps predicted from the device's rates, and measured", rows, content, "roofline")


def _of_training(path: Path, content: dict) -> Iterator[Result]:
    found = content["metrics"]
    drafter = path.parent.name if path.stem == "metrics" else path.stem
    rows = [
        {"drafter": drafter, "head": head, "top": top, "accuracy": accuracy}
        for top, name in enumerate(TOPS, start=1)
        for head, accuracy in enumerate(found[name])
    ]
    title, after = "held-out text: guesses with the true token", {"after step": found["step"]}
    yield Result("accuracy", "amphista figure 1", title, rows, settings=after)


READERS: tuple[Callable[[Path, dict], Iterator[Result]], ...] = (
    _of_bench, _of_tree_search, _of_evaluate, _of_roofline, _of_training,
)  # fmt: skip


def _result(kind: str, title: str, rows: list[dict], content: dict, command: str) -> Result:
    arguments = {name: value for name, value in content["arguments"].items() if value not in (None, False, [])}
    return Result(kind, "", title, rows, f"hydrajax {command}", content["machine"], arguments)


def _merged(found: list[tuple[Path, Result]]) -> list[tuple[Path, Result]]:
    """Training runs side by side as one result: ``RUN/metrics.jsonl``, or copies of it in one folder."""
    merged: dict[Any, tuple[Path, Result]] = {}
    for path, result in found:
        place = path
        if path.suffix == ".jsonl":
            place = path.parent.parent if path.stem == "metrics" else path.parent
        first = merged.setdefault((place, result.kind), (path, result))[1]
        if first is not result:
            first.rows.extend(result.rows)
    return list(merged.values())
