"""Writes the findings as Markdown for people and as plain data for programs; neither identifies the machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from mlx_tandem.cli.doctor.redact import Redactor
from mlx_tandem.cli.doctor.result import Finding

_WORDS = {"ok": "ok", "note": "note", "failed": "**FAILED**", "skipped": "skipped"}


def data(
    title: str, machine: dict[str, Any], findings: Sequence[Finding], hidden: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the whole report as plain data.

    `machine` is the result of `bench.machine.describe()`. Only the last part of the paths in `hidden` is shown.
    """
    kept = {key: machine[key] for key in ("time", "commit", "machine", "environment", "versions")}
    counts = {status: sum(f.status == status for f in findings) for status in _WORDS}
    tree = {"title": title, "well": counts["failed"] == 0, "counts": counts} | kept
    redacted: dict[str, Any] = Redactor(hidden).tree(tree | {"checks": msgspec.to_builtins(findings)})
    return redacted


def markdown(report: dict[str, Any]) -> str:
    """Return the report that `data` made as Markdown, to be pasted into an issue as it is."""
    checks, versions, machine = report["checks"], report["versions"], report["machine"]
    lines = [
        f"### {report['title']}: {_sum(report['counts'])}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, {machine['system']}, "
        f"{report['time'][:10]}" + (f", commit {report['commit']}" if report["commit"] else ""),
        "",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        *(
            [""] + [f"`{name}={value}`" for name, value in report["environment"].items()]
            if report["environment"]
            else []
        ),
        "",
        "| check | | what was found | s |",
        "|---|---|---|---:|",
        *(f"| {c['check']} | {_WORDS[c['status']]} | {_cell(c['says'])} | {c['seconds']:.1f} |" for c in checks),
    ]
    for check in checks:
        if check["status"] == "failed" or check["advice"]:
            lines += ["", f"**{check['check']}** ({check['meaning']}): {_cell(check['says'])}"]
            lines += ["", check["advice"] or "This failure is not a known one: please report it with all of this."]
        if check["table"]:
            lines += ["", f"| {check['check']} | s |", "|---|---:|"]
            lines += [f"| {_cell(name)} | {_number(value)} |" for name, value in check["table"].items()]
        if check["detail"]:
            lines += ["", "```", *check["detail"].replace("```", "'''").splitlines(), "```"]
    figures = [
        f"{c['check']}: " + ", ".join(f"{k} {_number(v)}" for k, v in c["figures"].items())
        for c in checks
        if c["figures"]
    ]
    if figures:
        lines += ["", "<details><summary>figures</summary>", "", *(f"- {line}" for line in figures), "", "</details>"]
    return "\n".join([*lines, "", verdict(report)])


def folded(markdown: str) -> str:
    """Return a Markdown report as a block that an issue shows folded under the report's own title, with its last line,
    the verdict, below.
    """
    title, _, rest = markdown.partition("\n")
    body, _, last = rest.rpartition("\n\n")
    return f"<details><summary>{title.lstrip('# ')}</summary>\n{body}\n\n</details>\n\n{last}"


def verdict(report: dict[str, Any]) -> str:
    """Return the outcome in one line, with the names of the checks that failed or have a note."""
    named = [
        f"{what}: {', '.join(names)}."
        for status, what in (("failed", "Failed"), ("note", "With something to do"))
        if (names := [check["check"] for check in report["checks"] if check["status"] == status])
    ]
    return " ".join([f"**{report['title']}: {_sum(report['counts'])}.**", *named])


def _sum(counts: dict[str, int]) -> str:
    well = sum(counts.values()) - counts["failed"] - counts["skipped"]
    said = f"{well} of {sum(counts.values())} checks pass"
    said += f", {counts['failed']} failed" if counts["failed"] else ""
    said += f", {counts['skipped']} could not be run" if counts["skipped"] else ""
    return said + (f", {counts['note']} with something to do" if counts["note"] else "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _number(value: float | int | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
