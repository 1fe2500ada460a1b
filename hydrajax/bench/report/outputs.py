"""Find results in a directory: result files and what the commands write.

Files of ``bench --json``, ``tree search``, ``evaluate`` (summary.json), ``roofline --device here --json`` and training
(metrics.jsonl) are converted to `hydrajax.bench.report.results.Result`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hydrajax.bench.questions.summary import OVERALL
from hydrajax.bench.report.results import KINDS, Result, check, in_lines, result_from
from hydrajax.errors import HydrajaxError
from hydrajax.files import check_file
from hydrajax.train.metrics import FILE, read_metrics

TOPS = ("top1", "top2", "top3", "top4", "top5")


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
        results = list(_results(path))
        found += [(path, Result(**in_lines(vars(result)))) for result in results]
        if not results:
            others.append(path)
    return _joined(found), others


def _results(path: Path) -> Iterator[Result]:
    try:
        content = _last_evaluation(path) if path.suffix == ".jsonl" else json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HydrajaxError(f"report: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):  # not a file of ours
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


def _last_evaluation(path: Path) -> dict[str, Any] | None:
    """The last evaluation in a training run's metrics.jsonl."""
    try:
        lines = read_metrics(path)
    except HydrajaxError:
        if path.name == FILE:
            raise
        return None  # other JSON lines
    evals = [line for line in lines if line["kind"] == "eval" and TOPS[0] in line]
    return {"metrics": evals[-1]} if evals else None


# --- files of the commands --------------------------------------------------------------------------------------------


def _from_bench(path: Path, content: dict) -> Iterator[Result]:
    rows = [{name: row[name] for name in KINDS["steps"]} for row in content["rows"]]
    model = content["arguments"]["random"] or content["arguments"]["base"]
    yield _result("steps", f"a decode step of {model}", rows, content, "bench")
    timed = [row for row in content["rows"] if row["tokens_per_second"] is not None]
    rows = [
        {"name": row["tree"], "equal": row["outputs_equal"], "low": None, "high": None}
        | {name: row[name] for name in ("batch", "nodes", "tokens_per_step", "tokens_per_second", "speedup")}
        for row in timed
    ]
    # The baseline was timed with each tree: take the median.
    for batch in sorted({row["batch"] for row in timed}):
        rate = statistics.median(row["autoregressive_tokens_per_second"] for row in timed if row["batch"] == batch)
        plain = {"name": "autoregressive", "batch": batch, "nodes": 1, "tokens_per_second": rate}
        rows.append(plain | {"tokens_per_step": 1.0, "low": None, "high": None, "speedup": 1.0, "equal": None})
    if timed:
        yield _result("speed", f"tokens per second of {model}", rows, content, "bench")


def _from_tree_search(path: Path, content: dict) -> Iterator[Result]:
    found = content["provenance"]
    drafter, batch = Path(found["arguments"]["draft"]).name, found["arguments"]["batch_size"]
    rows = []
    for row in found["measured"]:
        is_dynamic = row["name"].startswith("dynamic-")
        rows.append(
            {"drafter": drafter, "batch": batch, "expected": row["expected_tokens_per_step"]}
            | {"family": "dynamic" if is_dynamic else family_of(row["nodes"])}
            | {"name": row["name"] if is_dynamic else f"T_{row['nodes']}"}
            | {name: row[name] for name in ("nodes", "tokens_per_step", "tokens_per_second", "low", "high", "speedup")}
        )
    yield _result("trees", f"trees searched for {drafter}, batch {batch}", rows, found, "tree search")


def family_of(nodes: int) -> str:
    """Return the family of a tree grown from calibration text: a single node is the root and no tree."""
    return "searched" if nodes > 1 else "root"


def _from_evaluate(path: Path, content: dict) -> Iterator[Result]:
    fields = [name for name in KINDS["categories"] if name not in ("name", "category")]
    rows = [
        {"name": name, "category": category} | {field: figures[field] for field in fields}
        for name, categories in content["results"].items()
        for category, figures in categories.items()
    ]
    yield _result("categories", f"answers to {content['arguments']['set']}", rows, content, "evaluate")
    if scored := _quality_rows(content):
        yield _result("quality", f"scores of answers to {content['arguments']['set']}", scored, content, "evaluate")


def _quality_rows(content: dict) -> list[dict[str, Any]]:
    """Scores over all questions; empty if nothing was scored."""
    arguments, scores = content["arguments"], content.get("scores", {"results": {}})
    rows = []
    for name, categories in scores["results"].items():
        speed = {field: content["results"][name][OVERALL][field] for field in ("tokens_per_step", "speedup", "equal")}
        for metric, figures in categories.get(OVERALL, {}).items():
            scale = scores["metrics"][metric]
            score = {
                "score" if field == "mean" else field: value if field == "questions" or value is None else value * scale
                for field, value in figures.items()
            }
            labels = {"set": Path(arguments["set"]).name, "metric": metric, "rule": _rule(arguments), "name": name}
            rows.append(labels | score | speed)
    return rows


def _rule(arguments: dict) -> str:
    """The acceptance rule with its numbers: ``typical, epsilon 0.1``."""
    numbers = {name: arguments.get(name) for name in ("epsilon", "alpha", "temperature", "top_k", "top_p", "min_p")}
    given = [f"{name} {value:g}" for name, value in numbers.items() if value is not None]
    return ", ".join([arguments["rule"], *given])


def _from_roofline(path: Path, content: dict) -> Iterator[Result]:
    rows = [
        {name: cell["predicted"][name] for name in ("batch", "context", "nodes")}
        | {f"predicted_{name}": cell["predicted"][name] for name in ("step", "autoregressive_step")}
        | {name: cell["measured"][name] for name in ("step", "autoregressive_step")}
        for cell in content["rows"]
    ]
    yield _result("prediction", "steps predicted from the device's rates, and measured", rows, content, "roofline")


def _from_training(path: Path, content: dict) -> Iterator[Result]:
    found = content["metrics"]
    drafter = path.parent.name if path.stem == "metrics" else path.stem
    rows = [
        {"drafter": drafter, "head": head, "top": top, "accuracy": accuracy}
        for top, name in enumerate(TOPS, start=1)
        for head, accuracy in enumerate(found[name])
    ]
    title = "held-out text: guesses with the true token"
    yield Result("accuracy", "amphista figure 1", title, rows, settings={"after step": found["step"]})


READERS: tuple[Callable[[Path, dict], Iterator[Result]], ...] = (
    _from_bench, _from_tree_search, _from_evaluate, _from_roofline, _from_training,
)  # fmt: skip


def _result(kind: str, title: str, rows: list[dict], content: dict, command: str) -> Result:
    arguments = {name: value for name, value in content["arguments"].items() if value not in (None, False, [])}
    return Result(kind, "", title, rows, f"hydrajax {command}", content["machine"], arguments)


def _joined(found: list[tuple[Path, Result]]) -> list[tuple[Path, Result]]:
    """Join training runs: ``RUN/metrics.jsonl`` of sibling folders, or JSON lines of one folder."""
    joined: dict[Any, tuple[Path, Result]] = {}
    for path, result in found:
        group = path
        if path.suffix == ".jsonl":
            group = path.parent.parent if path.stem == "metrics" else path.parent
        first = joined.setdefault((group, result.kind), (path, result))[1]
        if first is not result:
            first.rows.extend(result.rows)
    return list(joined.values())
