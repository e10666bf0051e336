"""A comparison as one self-contained HTML page: no script or style from elsewhere, readable without JavaScript."""

import html as escape
import math

from npglm.trace.compare import OpResult, Report
from npglm.trace.probes import MODEL, PROBES
from npglm.trace.report import cause_line, evidence, next_steps, worst

LOW, HIGH = -7.0, 0.0  # log10 of the errors between which the colours run

STYLE = """
:root{color-scheme:light dark;--ink:#1c2128;--soft:#667;--page:#fff;--card:#f5f6f8;--line:#d9dce1;--good:#2f7d4f;--bad:#b3261e;--mid:#8a5a00}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--soft:#9aa3ad;--page:#14171b;--card:#1d2126;--line:#343a42;--good:#6cc490;
--bad:#ff8a80;--mid:#e0b15a}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:0 auto;max-width:1180px;padding:24px}
h1{font-size:22px;margin:0 0 4px}h2{font-size:16px;margin:28px 0 8px}p{margin:4px 0}.soft{color:var(--soft)}
.equal,.rounding{color:var(--good)}.wrong{color:var(--bad)}.precision,.not_comparable{color:var(--mid)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 16px;background:var(--card);padding:12px 16px;border-radius:8px;margin:12px 0}
dt{color:var(--soft)}dd{margin:0}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.heat td{width:20px;height:17px;min-width:14px;padding:0;border:1px solid var(--page)}.heat td.guilty{outline:2px solid var(--bad);outline-offset:-1px}
.heat th{font-weight:400;font-size:12px;text-align:right;padding:0 6px;white-space:nowrap}.heat thead th{padding:0;text-align:center}
.ops{font-size:13px;width:100%}.ops th{text-align:left;cursor:pointer;border-bottom:1px solid var(--line);padding:4px 8px}
.ops td{padding:3px 8px;border-bottom:1px solid var(--line)}
.none{background:var(--card)}svg{background:var(--card);border-radius:8px}svg text{fill:var(--soft);font-size:11px}
.key{display:inline-block;width:160px;height:10px;vertical-align:middle;border-radius:3px}
"""
SORT = """
document.querySelectorAll('.ops th').forEach((th,i)=>{let up=false;th.onclick=()=>{up=!up;const b=th.closest('table').tBodies[0];
const v=r=>r.cells[i].dataset.v??r.cells[i].textContent;const rows=[...b.rows].sort((x,y)=>{const p=v(x),q=v(y),
d=isNaN(p)||isNaN(q)?p.localeCompare(q):p-q;return up?d:-d});b.append(...rows)}});
"""


def html(reports: list[Report]) -> str:
    """The page of the run with the worst verdict; the others are listed."""
    report = worst(reports)
    i = report.identity
    title = f"{i.get('recording', '?')} against {i.get('model', '?')}"
    parts = [
        f'<h1><span class="{report.verdict}">{report.verdict.replace("_", " ").upper()}</span> {_text(title)}</h1>',
        f'<p class="soft">{len(i.get("tokens", []))} tokens, {i.get("ranks", 1)} rank(s), engine {_text(i.get("engine", "unknown"))}</p>',
        _facts(report),
        _heat_maps(report),
        _growth(report),
        _structure(report),
        _table(report),
    ]
    others = [r for r in reports if r is not report]
    if others:
        lines = "".join(
            f'<li><span class="{r.verdict}">{r.verdict}</span> {_text(r.identity.get("recording", ""))}</li>' for r in others
        )
        parts.append(f"<h2>Other runs</h2><ul>{lines}</ul>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>{''.join(parts)}<script>{SORT}</script></body></html>\n"
    )


def _text(value) -> str:
    return escape.escape(str(value))


def _facts(report: Report) -> str:
    guilty, facts = report.guilty_op, []
    if report.numerics:
        facts.append(("numerics", "; ".join(report.numerics)))
    if guilty:
        facts.append(("guilty op", f"{guilty.name}, rank {guilty.rank}: {guilty.verdict}"))
        facts.append(("evidence", evidence(guilty) or guilty.reason))
        facts.append(("cause", cause_line(report.cause) if report.cause else "no hypothesis fits"))
        facts.append(("structure", guilty.structure))
    facts += [("note", n) for n in report.notes]
    facts += [("measure next", n) for n in next_steps(report)]
    return "<dl>" + "".join(f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in facts if v) + "</dl>"


def _heat_maps(report: Report) -> str:
    layers = sorted({o.layer for o in report.ops if o.layer is not None})
    probes = [p for p in PROBES.values() if p.where != MODEL and any(o.op == p.name for o in report.ops)]
    if not layers or not probes:
        return ""
    cells: dict[tuple, OpResult] = {}
    for o in report.ops:
        known = cells.get((o.op, o.layer))
        if o.layer is not None and (known is None or _worse(o, known)):
            cells[o.op, o.layer] = o
    head = "".join(f"<th>{layer if layer % 5 == 0 or len(layers) < 20 else ''}</th>" for layer in layers)
    parts = []
    for title, field in (
        ("Op-local: each op from the engine's own inputs", "err_local"),
        ("Chained: beside the reference's own run", "err_chained"),
    ):
        rows = "".join(
            f"<tr><th>{p.name}</th>{''.join(_cell(cells.get((p.name, layer)), field, report) for layer in layers)}</tr>"
            for p in probes
        )
        parts.append(
            f'<div><h2>{_text(title)}</h2><div class="scroll"><table class="heat"><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div></div>'
        )
    stops = ", ".join(_colour(10 ** (LOW + (HIGH - LOW) * i / 6)) for i in range(7))
    key = f'<p class="soft">1e-7 <span class="key" style="background:linear-gradient(to right,{stops})"></span> 1 and more; layers from left to right; red frame: wrong or lower precision</p>'
    return f'<div style="display:flex;gap:40px;flex-wrap:wrap">{"".join(parts)}</div>{key}'


def _worse(a: OpResult, b: OpResult) -> bool:
    return (a.verdict == "wrong", a.err_local or 0) > (b.verdict == "wrong", b.err_local or 0)


def _cell(op: OpResult | None, field: str, report: Report) -> str:
    error = getattr(op, field) if op else None
    if op is None or error is None:
        return '<td class="none"></td>'
    guilty = ' class="guilty"' if op.verdict in ("wrong", "precision") else ""
    return f'<td{guilty} style="background:{_colour(error)}" title="{_text(op.name)}: {error:.2g}, {op.verdict}"></td>'


def _colour(error: float) -> str:
    """From pale to dark over seven decades; NaN and inf count as the worst."""
    level = (math.log10(max(error, 1e-12)) - LOW) / (HIGH - LOW) if math.isfinite(error) else 1.0
    level = min(max(level, 0.0), 1.0)
    return f"hsl({210 - 200 * level:.0f} {45 + 40 * level:.0f}% {84 - 42 * level:.0f}%)"


def _growth(report: Report) -> str:
    points = [
        (o.layer, o.err_chained) for o in report.ops if o.op == "l_out" and o.err_chained and math.isfinite(o.err_chained)
    ]
    if len(points) < 2:
        return ""
    width, height, left, bottom = 640, 220, 52, 26
    low = math.floor(min(math.log10(e) for _, e in points))
    high = max(low + 1, math.ceil(max(math.log10(e) for _, e in points)))
    last = max(layer for layer, _ in points) or 1
    x = lambda layer: left + (width - left - 14) * layer / last
    y = lambda error: 10 + (height - bottom - 10) * (high - math.log10(error)) / (high - low)
    grid = "".join(
        f'<line x1="{left}" x2="{width - 14}" y1="{y(10**d):.1f}" y2="{y(10**d):.1f}" stroke="currentColor" opacity=".15"/>'
        f'<text x="{left - 8}" y="{y(10**d) + 4:.1f}" text-anchor="end">1e{d}</text>'
        for d in range(low, high + 1)
    )
    line = " ".join(f"{x(layer):.1f},{y(error):.1f}" for layer, error in points)
    dots = "".join(
        f'<circle cx="{x(n):.1f}" cy="{y(e):.1f}" r="3" fill="#3b6fb6"><title>l_out-{n}: {e:.2g}</title></circle>'
        for n, e in points
    )
    labels = f'<text x="{left}" y="{height - 8}">layer 0</text><text x="{width - 14}" y="{height - 8}" text-anchor="end">layer {last}</text>'
    return (
        f'<h2>Growth of the error over the layers (l_out, chained)</h2><svg viewBox="0 0 {width} {height}" width="{width}" style="max-width:100%" role="img">'
        f'{grid}<polyline points="{line}" fill="none" stroke="#3b6fb6" stroke-width="2"/>{dots}{labels}</svg>'
    )


def _structure(report: Report) -> str:
    guilty = report.guilty_op
    if guilty is None or not guilty.error_map:
        return ""
    size = 8
    rows = guilty.error_map
    cells = "".join(
        f'<rect x="{j * size}" y="{i * size}" width="{size}" height="{size}" fill="{_colour(e)}"/>'
        for i, row in enumerate(rows)
        for j, e in enumerate(row)
    )
    width, height = len(rows[0]) * size, len(rows) * size
    return (
        f'<h2>Where {_text(guilty.name)} is wrong</h2><p class="soft">tokens from top to bottom, columns from left to right, largest error per cell; {_text(guilty.structure)}</p>'
        f'<div class="scroll"><svg width="{width}" height="{height}" role="img">{cells}</svg></div>'
    )


def _table(report: Report) -> str:
    def number(x):
        if x is None:
            return '<td data-v="-1"></td>'
        return (
            f'<td data-v="{x if math.isfinite(x) else 1e99}">{x:.2e}</td>' if math.isfinite(x) else '<td data-v="1e99">NaN</td>'
        )

    rows = "".join(
        f'<tr><td data-v="{at}">{_text(o.name)}</td><td>{o.rank}</td><td class="{o.verdict}">{o.verdict}</td>{number(o.err_local)}{number(o.bound)}'
        f"{number(o.err_chained)}<td>{_text((o.cause or {}).get('name') or o.reason)}</td></tr>"
        for at, o in enumerate(report.ops)
    )
    head = "".join(f"<th>{h}</th>" for h in ("op", "rank", "verdict", "local", "bound", "chained", "reason"))
    return f'<h2>All ops</h2><div class="scroll"><table class="ops"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
