"""A server's certificate as lines and as JSON."""

from typing import Any

from hydrajax.certify.servers.checks import ServerCheck
from hydrajax.certify.servers.comparison import FAULT, Finding, shown

MOST_SHOWN = 4  # findings of a check; the file has all of them
WORDS = {True: "holds", False: "FAILS", None: "skipped"}


def lines_of(check: ServerCheck) -> list[str]:
    """Return the outcome of a check and its first findings, faults before ties."""
    lines = [f"{WORDS[check.holds]}: {check.name}", f"  {check.summary}"]
    findings = sorted(check.findings, key=lambda finding: finding.verdict != FAULT)
    for finding in findings[:MOST_SHOWN]:
        lines += _lines(finding)
    if len(findings) > MOST_SHOWN:
        lines.append(f"  and {len(findings) - MOST_SHOWN} more")
    return lines


def _lines(finding: Finding) -> list[str]:
    question = finding.question
    kind = "chat" if question.chat else "completion"
    numbers = f"max_tokens {question.max_tokens}, temperature {question.temperature:g}"
    prompt = shown(question.content, 50) if isinstance(question.content, str) else f"{len(question.content)} ids"
    lines = [
        f"  {finding.verdict}: {finding.kind}: {finding.message}",
        f"    {kind}, {finding.setting}, {numbers}, prompt {prompt}",
    ]
    if context := finding.details.get("context"):
        lines.append(f"    after {shown(context, 80)}")
    return lines


def record_of(check: ServerCheck) -> dict[str, Any]:
    """Return a check for JSON. Each finding has its whole request, so that it can be sent again."""
    findings = [
        {
            "kind": each.kind,
            "verdict": each.verdict,
            "setting": each.setting,
            "message": each.message,
            "path": f"/v1{each.question.path}",
            "request": each.question.body(),
        }
        | each.details
        for each in check.findings
    ]
    return {"name": check.name, "outcome": WORDS[check.holds], "summary": check.summary, "findings": findings}
