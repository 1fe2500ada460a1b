"""Results of every kind, shared by the tests of results and of reports."""

from dataclasses import asdict

from hydrajax.bench.report.results import FORMAT, Result
from hydrajax.files import WholeFile

RATE = {"tokens_per_step": 2.5, "tokens_per_second": 200.4, "low": 190.0, "high": 210.0, "speedup": 1.27}
ROWS = {
    "speed": [
        {"name": "autoregressive", "batch": 1, "nodes": 1, **RATE, "equal": True},
        {"name": "hydra | tree", "batch": 1, "nodes": 64, **RATE | {"tokens_per_second": 311.0}, "equal": False},
    ],
    "trees": [
        {"drafter": "hydra", "batch": 1, "family": family, "name": name, "nodes": nodes, "expected": expected, **RATE}
        | {"tokens_per_second": rate}
        for family, name, nodes, expected, rate in [
            ("root", "T_1", 1, 1.0, 500.0),
            ("searched", "T_2", 2, 1.6, 300.0),
            ("searched", "T_8", 8, 2.6, 400.0),
            ("chain", "chain-1", 2, 1.6, 290.0),
            ("released", "mc_sim_7b_63", 64, None, 100.0),
        ]
    ],
    "acceptance": [
        {"drafter": "medusa", "rule": "greedy", "parameter": None, "value": None, "tokens_per_step": 2.0, "nats": 1.5},
        *(
            {"drafter": "medusa", "rule": "typical", "parameter": "epsilon", "value": value}
            | {"tokens_per_step": tokens_per_step, "nats": nats}
            for value, tokens_per_step, nats in ((0.2, 3.0, 2), (0.1, 3.5, 3))
        ),
    ],
    "overhead": [
        {"drafter": "medusa", "prefix_attention": None, "heads": [0.3, 0.25], "verify": 20, "autoregressive_step": 18},
        {"drafter": "hydra_pp", "prefix_attention": 1.2, "heads": [0.6, 1.4], "verify": 20, "autoregressive_step": 18},
    ],
    "categories": [
        {"name": name, "category": category, "questions": 10, **RATE | {"speedup": speedup}, "equal": True}
        for name, speedup in (("plain", 1.0), ("hydra", 1.9))
        for category in ("qa", "overall")
    ],
    "quality": [
        {"set": name, "metric": metric, "rule": rule, "name": drafter, "questions": 20, "score": 31.5, "low": 20.0}
        | {"high": 40.0, "difference": -1.5, "difference_low": -3.0, "difference_high": 0.5}
        | {"tokens_per_step": 2.5, "speedup": 1.27, "equal": True if rule == "greedy" else None}
        for name, metric in (("HumanEval", "pass@1"), ("gsm8k", "exact match"))
        for rule in ("greedy", "typical, epsilon 0.1")
        for drafter in ("plain", "hydra")
    ],
    "accuracy": [
        {"drafter": drafter, "head": head, "top": top, "accuracy": 0.1 * top + 0.1 * head}
        for drafter in ("medusa", "hydra")
        for head in (0, 1)
        for top in (1, 5)
    ],
    "curve": [
        {"name": name, "over": "training tokens", "at": at, "tokens_per_step": 1.5 + at / 1e6}
        for name in ("medusa", "hydra")
        for at in (1e6, 0)
    ],
    "pareto": [
        {"drafter": drafter, "lm_head": lm_head, "nodes": 64, "draft_megabytes": size, "draft_ms": 0.5}
        | {**RATE, "tokens_per_step": tau, "tokens_per_second": rate, "equal": True}
        | {"predicted_gigabytes": size / 10, "predicted_speedup": tau / 2}
        for drafter, lm_head, size, tau, rate in [
            ("medusa", "full", 24.0, 2.1, 300.0),
            ("medusa", "shared", 2.0, 1.5, 280.0),
            ("amphista", "full", 30.0, 2.5, 290.0),
            ("amphista", "shared", 8.0, 2.2, 310.0),
        ]
    ],
    "steps": [
        {"tree": "chain-2", "batch": 1, "nodes": 3, "autoregressive_step": 2.0, "step": 3.0, "propose": 0.25}
        | {"verify": 2.5, "accept_commit": 0.125, "observe": 0.0625, "break_even": 1.5}
    ],
    "prediction": [
        {"batch": 1, "context": 512, "nodes": 64, "predicted_step": 9.0, "step": 10.0}
        | {"predicted_autoregressive_step": 3.3, "autoregressive_step": 3.0}
    ],
    "program": [
        {"what": what, "batch": batch, "context": 512, "nodes": nodes, "kernels": 627, "kernels_per_layer": 19.5}
        | {"gigabytes": gigabytes, "floor_gigabytes": 12.0, "copies": copies, "copied_megabytes": 201.4 * copies}
        | {"temporary_megabytes": 34.4, "one_graph": copies == 0}
        for what, batch, nodes, gigabytes, copies in [
            ("ar", 1, 1, 15.0, 0),
            ("ar", 8, 1, 18.0, 0),
            ("hydra++", 8, 64, 24.0, 2),
        ]
    ],
    "tpu_program": [
        {"what": "ar", "chip": "v5e", "batch": 1, "context": 512, "nodes": 1, "weights": "bfloat16", "devices": 1}
        | {"fits": True, "cycles": 2.5e6, "own_cycles": 1e5, "floor_cycles": 2.1e6, "byte_cycles": 2.1e6, "copies": 0}
        | {"collectives": 0, "temporary_megabytes": 69.0},
        {"what": "verify", "chip": "v5e", "batch": 8, "context": 8192, "nodes": 64, "weights": "float32", "devices": 1}
        | {"fits": False}
        | dict.fromkeys(("cycles", "own_cycles", "floor_cycles", "byte_cycles", "copies", "collectives"))
        | {"temporary_megabytes": None},
    ],
}
FIXED = {"command": "python x.py", "machine": {"device": "abacus", "cores": 2}, "settings": {"repeats": 7}}


def result(kind: str, source: str = "", **changes) -> Result:
    return Result(**{"kind": kind, "source": source, "title": f"some {kind}", "rows": ROWS[kind], **FIXED} | changes)


def write_to(path, found: Result) -> None:
    with WholeFile(path, "--output") as file:
        file.write_json({"hydrajax_result": FORMAT} | asdict(found))
