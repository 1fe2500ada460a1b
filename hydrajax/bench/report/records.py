"""Records that commands add to their JSON for `hydrajax report`: the field ``hydrajax_results``, a list of results."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydrajax.bench.report.results import FORMAT, KINDS, RECORDS, Result

Rows = list[dict[str, Any]]


def records(command: str, report: Mapping[str, Any], *tables: tuple[str, str, Rows]) -> dict[str, Any]:
    """Return the field of ``(kind, title, rows)`` tables; tables without rows are left out.

    Args:
        report: what the command writes, of which ``machine`` and ``arguments`` are recorded.
        tables: see `hydrajax.bench.report.results.KINDS`.
    """
    settings = {name: value for name, value in report["arguments"].items() if value not in (None, False, [])}
    found = [
        Result(kind, "", title, rows, f"hydrajax {command}", report["machine"], settings)
        for kind, title, rows in tables
        if rows
    ]
    return {RECORDS: [{"hydrajax_result": FORMAT} | asdict(result) for result in found]}


def of_bench(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the records of ``hydrajax bench``."""
    model = report["arguments"]["random"] or report["arguments"]["base"]
    steps = [{name: row[name] for name in KINDS["steps"]} for row in report["rows"]]
    timed = [row for row in report["rows"] if row["tokens_per_second"] is not None]
    speeds = [
        {"name": row["tree"], "equal": row["outputs_equal"], "low": None, "high": None}
        | {name: row[name] for name in ("batch", "nodes", "tokens_per_step", "tokens_per_second", "speedup")}
        for row in timed
    ]
    # The baseline was timed with each tree: take the median.
    for batch in sorted({row["batch"] for row in timed}):
        rate = statistics.median(row["autoregressive_tokens_per_second"] for row in timed if row["batch"] == batch)
        plain = {"name": "autoregressive", "batch": batch, "nodes": 1, "tokens_per_second": rate}
        speeds.append(plain | {"tokens_per_step": 1.0, "low": None, "high": None, "speedup": 1.0, "equal": None})
    tables = ("steps", f"a decode step of {model}", steps), ("speed", f"tokens per second of {model}", speeds)
    return records("bench", report, *tables)


def of_tree_search(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return the records of ``hydrajax tree search``."""
    drafter, batch = Path(provenance["arguments"]["draft"]).name, provenance["arguments"]["batch_size"]
    rows = []
    for row in provenance["measured"]:
        static = row["expected_tokens_per_step"] is not None
        rows.append(
            {"drafter": drafter, "batch": batch, "expected": row["expected_tokens_per_step"]}
            | {"family": "dynamic" if not static else "searched" if row["nodes"] > 1 else "root"}
            | {"name": f"T_{row['nodes']}" if static else row["name"]}
            | {name: row[name] for name in ("nodes", "tokens_per_step", "tokens_per_second", "low", "high", "speedup")}
        )
    return records("tree search", provenance, ("trees", f"trees searched for {drafter}, batch {batch}", rows))


def of_evaluate(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the records of ``hydrajax evaluate``."""
    fields = [*KINDS["categories"]][2:]
    rows = [
        {"name": contender, "category": category} | {field: figures[field] for field in fields}
        for contender, categories in report["results"].items()
        for category, figures in categories.items()
    ]
    return records("evaluate", report, ("categories", f"answers to {report['arguments']['set']}", rows))


def of_training(evaluation: Mapping[str, Any], name: str) -> Sequence[Result]:
    """Return the result of a line of a training run's metrics; none without accuracies. ``name`` is the run's."""
    rows = [
        {"drafter": name, "head": head, "top": top, "accuracy": accuracy}
        for top in range(1, 6)
        for head, accuracy in enumerate(evaluation.get(f"top{top}") or ())
    ]
    title = "held-out text: guesses with the true token"
    settings = {"after step": evaluation["step"]}
    return [Result("accuracy", "amphista figure 1", title, rows, settings=settings)] if rows else []
