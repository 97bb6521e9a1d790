"""What a chain did, to look at: `report.html`, one file with its images inside."""

import base64
import html
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from opensora.datasets.video.read_video import open_clip
from opensora.utils.errors import UserError
from tools.datasets.plots import Figures, svg_histogram
from tools.footage.rows import Row, read_rows
from tools.footage.stages import Work

SHOWN = 8  # images of each kind
THUMBNAIL = 160  # pixels of the longer side
HEAD = """<!doctype html><meta charset="utf-8"><title>Footage</title>
<style>body{font:14px sans-serif;margin:2em;max-width:1100px}table{border-collapse:collapse}td,th{padding:2px 10px;
text-align:left;border-bottom:1px solid #ddd}figure{display:inline-block;margin:4px;width:165px;vertical-align:top;
font-size:11px;overflow-wrap:anywhere}svg{margin:6px}</style>"""


def write_report(folder: Path, done: Sequence[Work]) -> list[str]:
    """Write `report.html`; returns a line on each stage."""
    lines, parts, overview = [], [], ["<table><tr><th>stage<th>kept<th>dropped<th>why"]
    for work in done:
        reasons: Counter[str] = Counter()
        dropped = _sample(_counted(read_rows(work.dropped), reasons)) if work.dropped.is_file() else []
        count: Counter[str] = Counter()
        kept = _sample(_counted(read_rows(work.kept), count))
        line = f"{work.stage.name}: {count.total()} kept, {reasons.total()} dropped"
        lines.append(line + "".join(f"; {number} x {reason}" for reason, number in reasons.most_common(5)))
        parts.append(_section(work, count.total(), reasons, kept, dropped))
        why = html.escape("; ".join(f"{number} x {reason}" for reason, number in reasons.most_common(3)))
        overview.append(f"<tr><td>{len(lines)}. {work.stage.type}<td>{count.total()}<td>{reasons.total()}<td>{why}")
    last = done[-1].kept
    parts.append("<h2>Distributions of what is left</h2>" + "".join(_distributions(last)))
    page = f"{HEAD}<h1>From footage to a table</h1>{''.join(overview)}</table>{''.join(parts)}"
    (folder / "report.html").write_text(page, encoding="utf-8")
    return lines


def _counted(rows: Iterable[Row], counts: Counter[str]) -> Iterable[Row]:
    for row in rows:
        counts[_short(str(row.get("reason", "")), row)] += 1
        yield row


def _short(reason: str, row: Row) -> str:
    """A reason without the name of the file, so that equal ones are counted together."""
    path = str(row.get("path", ""))
    return reason.replace(path, "the file") if path else reason


def _sample(rows: Iterable[Row], size: int = SHOWN) -> list[Row]:
    """Some rows, at random but the same each time: each row is as likely (Vitter's algorithm R)."""
    rng = np.random.default_rng(0)
    chosen: list[Row] = []
    for i, row in enumerate(rows):
        if len(chosen) < size:
            chosen.append(row)
        elif (index := int(rng.integers(i + 1))) < size:
            chosen[index] = row
    return chosen


def _section(work: Work, kept: int, reasons: Counter[str], good: list[Row], bad: list[Row]) -> str:
    settings = html.escape(", ".join(f"{name}={value!r}" for name, value in work.stage.settings.items()))
    text = (
        f"<h2>{work.stage.number}. {work.stage.type}</h2><p>{settings}</p><p>{kept} kept, {reasons.total()} dropped</p>"
    )
    if reasons:
        rows = "".join(f"<tr><td>{n}<td>{html.escape(why)}" for why, n in reasons.most_common())
        text += f"<table><tr><th>rows<th>why dropped{rows}</table>"
    text += _images("kept", good, kept)
    return text + _images("dropped", bad, reasons.total())


def _images(heading: str, rows: list[Row], count: int) -> str:
    if not rows:
        return ""
    shown = f", {len(rows)} of {count} at random" if len(rows) < count else ""
    return f"<h3>{heading}{shown}</h3>" + "".join(map(_figure, rows))


def _figure(row: Row) -> str:
    words = [_reason_with_value(row) or str(row.get("text") or ""), Path(str(row.get("path", ""))).name]
    if row.get("start") not in (None, ""):
        words.append(f"{float(row['start']):.2f} to {float(row['end']):.2f} s")
    return f"<figure>{_image(row)}<br>{html.escape(' | '.join(filter(None, words)))}</figure>"


def _reason_with_value(row: Row) -> str:
    """ "flow < 0.5: 0.073", "duplicate_of is not empty: a.mp4"."""
    reason = str(row.get("reason") or "")
    value = row.get(reason.split(" ")[0])
    if value in (None, ""):
        return reason
    return f"{reason}: {value:.4g}" if isinstance(value, int | float) else f"{reason}: {Path(str(value)).name}"


def _image(row: Row) -> str:
    image = _thumbnail(row)
    if image is None:
        return "<i>no image</i>"
    data = io.BytesIO()
    image.save(data, "JPEG", quality=80)
    return f'<img src="data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}">'


def _thumbnail(row: Row) -> Image.Image | None:
    """The middle frame of a clip or of a part of a video; None where none can be read, which is why some rows are dropped."""
    path = str(row.get("path", ""))
    try:
        with open_clip(Path(path)) as clip:
            middle = (clip.num_frames - 1) // 2
            if row.get("source") == path and row.get("start") not in (None, ""):  # a part that became no clip
                middle = int(np.abs(clip.seconds() - (float(row["start"]) + float(row["end"])) / 2).argmin())
            frame = clip.read([middle])[0]
    except (UserError, OSError):
        return None
    image = Image.fromarray(frame)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    return image


def _distributions(table: Path) -> list[str]:
    figures = Figures()
    for row in read_rows(table):
        figures.add(row)
    return [svg_histogram(name, values) for name, values in figures.numbers().items() if len(values)]
