"""A comparison for people and programs: one screen of text, JSON, and a self-contained HTML page."""

import json
import math
import textwrap

from npglm.trace.compare import OpResult, Report
from npglm.trace.judge import PRECISION, SEVERITY, WRONG

WIDTH = 120
INDENT = 16
NEXT_STEPS = {  # what to measure next, by what is missing
    "ranks": "record every rank (one file each): a sharding fault shows on one rank only",
    "inputs": "record the probes passed over ({}), so that one op alone can be convicted",
    "length": "run more than {} tokens: the indexer chooses nothing below that",
    "full": "record full values instead of a text dump: printed corners cannot prove an op right",
}


def summary(report: Report) -> dict:
    """The JSON form. err_* are relative to the largest value of the worst row; null where nothing was compared."""
    return {
        "identity": report.identity,
        "verdict": report.verdict,
        "numerics": report.numerics,
        "first_divergence": report.first_divergence,
        "guilty": report.guilty,
        "cause": report.cause,
        "ops": [
            {
                "op": o.op, "layer": o.layer, "rank": o.rank, "verdict": o.verdict, "err_chained": _number(o.err_chained),
                "err_local": _number(o.err_local), "bound": _number(o.bound), "reason": o.reason, "span": list(o.span),
                "structure": o.structure, "cause": o.cause,
            }
            for o in report.ops
        ],
        "notes": report.notes,
    }  # fmt: skip


def worst(reports: list[Report]) -> Report:
    return max(reports, key=lambda r: SEVERITY.index(r.verdict))


def to_json(reports: list[Report]) -> str:
    """The worst run's summary; with several runs, all of them under `runs`."""
    data = summary(worst(reports))
    if len(reports) > 1:
        data["runs"] = [summary(r) for r in reports]
    return json.dumps(_finite(data), indent=1, ensure_ascii=False)


def _number(x: float | None) -> float | None:
    return None if x is None or not math.isfinite(x) else float(x)


def _finite(data):
    """JSON has no NaN and no infinity."""
    if isinstance(data, dict):
        return {k: _finite(v) for k, v in data.items()}
    if isinstance(data, list):
        return [_finite(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def page(reports: list[Report]) -> str:
    """At most about 24 lines for one run; further runs take a line each."""
    report = worst(reports)
    lines = [f"{_title(report)}", ""]
    for label, text in _facts(report):
        lines += _wrap(label, text) if text else []
    others = [r for r in reports if r is not report]
    if others:
        lines.append("")
        lines += [_clip(f"also {r.identity.get('recording', '')}: {r.verdict.upper()}, {_counts(r)}") for r in others]
    return "\n".join(lines)


def _title(report: Report) -> str:
    i = report.identity
    return _clip(
        f"{report.verdict.upper()}   {i.get('recording', '?')} against {i.get('model', '?')}, {len(i.get('tokens', []))} tokens"
    )


def _facts(report: Report) -> list[tuple[str, str]]:
    guilty, facts = report.guilty_op, []
    facts.append(("ops", _counts(report)))
    facts.append(("numerics", "; ".join(report.numerics)))
    first = report.first_divergence
    if first:
        facts.append(
            (
                "first visible",
                f"{_name(first)}: {_error(first['err_chained'])} from {'the other' if report.identity.get('pair') else 'the reference'}'s own run",
            )
        )
    facts.append(("growth", growth(report)))
    if guilty:
        rank = f" on rank {guilty.rank}" if report.identity.get("ranks", 1) > 1 else ""
        facts.append(("guilty op", f"{guilty.name}{rank}: {guilty.verdict.upper()}"))
        facts.append(("evidence", evidence(guilty)))
        if not guilty.reason.startswith("differs by"):  # the evidence says so already
            facts.append(("", guilty.reason))
        facts.append(("cause", cause_line(report.cause) if report.cause else "no hypothesis fits"))
        if report.cause and report.cause["runner_up"]:
            other = report.cause["runner_up"]
            facts.append(("", f"runner-up: {other['name']} (leaves {_error(other['residual'])})"))
        facts.append(("structure", guilty.structure))
        more = [o for o in report.ops if o.verdict in (WRONG, PRECISION) and o is not guilty]
        if more:
            facts.append(
                (
                    "also",
                    f"{len(more)} more: " + ", ".join(f"{o.name} {o.verdict}" for o in more[:4]) + " ..." * (len(more) > 4),
                )
            )
    facts += [("note" if i == 0 else "", n) for i, n in enumerate(report.notes[:5])]
    facts += [("measure next" if i == 0 else "", n) for i, n in enumerate(next_steps(report)[:2])]
    return facts


def evidence(op: OpResult) -> str:
    if op.err_local is None or not math.isfinite(op.err_local):
        return ""
    source = f"through {len(op.span)} unrecorded probes" if op.span else "from the engine's own inputs"
    return f"recomputed {source}, it differs by {_error(op.err_local)}; rounding allows {_error(op.bound)}"


def cause_line(cause: dict) -> str:
    return f"{cause['name']} (leaves {_error(cause['residual'])} of {_error(cause['baseline'])})"


def growth(report: Report) -> str:
    """The chained error at the end of some layers."""
    ends = [o for o in report.ops if o.op == "l_out" and o.err_chained is not None and math.isfinite(o.err_chained)]
    some = ends if len(ends) <= 5 else [ends[round(i * (len(ends) - 1) / 4)] for i in range(5)]
    return "  ".join(f"l_out-{o.layer} {_error(o.err_chained)}" for o in some)


def next_steps(report: Report) -> list[str]:
    steps, guilty = [], report.guilty_op
    if guilty and guilty.span:
        steps.append(NEXT_STEPS["inputs"].format(", ".join(guilty.span[-4:])))
    if guilty and report.identity.get("ranks", 1) == 1 and guilty.cause is None and not guilty.span:
        steps.append(NEXT_STEPS["ranks"])
    short = next((n for n in report.notes if n.startswith("indexer faults not exercised")), None)
    if short:
        steps.append(NEXT_STEPS["length"].format(short.split("top_k = ")[1].split(" ")[0]))
    if report.identity.get("text"):
        steps.append(NEXT_STEPS["full"])
    return steps


def _counts(report: Report) -> str:
    count = {v: sum(o.verdict == v for o in report.ops) for v in reversed(SEVERITY)}
    return ", ".join(f"{n} {v}" for v, n in count.items() if n)


def _name(op: dict) -> str:
    return op["op"] if op["layer"] is None else f"{op['op']}-{op['layer']}"


def _error(x: float | None) -> str:
    if x is None or not math.isfinite(x):
        return "NaN or inf"
    return f"{100 * x:.3g} %" if x >= 1e-3 else f"{x:.1e}"


def _wrap(label: str, text: str) -> list[str]:
    """At most three lines."""
    lines = textwrap.wrap(text, WIDTH - INDENT) or [""]
    if len(lines) > 3:
        lines = [*lines[:2], lines[2][: WIDTH - INDENT - 4] + " ..."]
    return [f"{label if i == 0 else '':<{INDENT}}{line}" for i, line in enumerate(lines)]


def _clip(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3].rstrip() + "..."
