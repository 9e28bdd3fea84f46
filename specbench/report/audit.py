"""A full audit as a table and sentences: the verdicts, and with `explain` the evidence behind them."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence

from specbench.audit.verdicts import AuditRecord
from specbench.report.table import Cell, Column, Table, Tone
from specbench.report.wording import DASH, fixed, monte_carlo

TONES: dict[str, Tone] = {"PASS": "good", "FAIL": "bad"}


def audit_table(records: Sequence[AuditRecord]) -> Table:
    """Return one row per strategy."""
    columns = (
        Column("strategy", "strategy", "strategy", align="left"),
        Column("verdict", "verdict", "verdict", align="left"),
        Column("tokens", "tokens", "scored tokens", group="evidence"),
        Column("log_e", "log e", "log e-value", group="evidence"),
        Column("bar", "alarm\nat", "alarm at", group="evidence"),
        Column("alternative", "most like", "most like", group="evidence", align="left"),
        Column("effect", "TV in that\ndirection", "TV in that direction", group="evidence"),
        Column("least_visible", "smallest\ndetectable TV", "smallest detectable TV", group="power"),
        Column("direction", "in direction", "in direction", group="power", align="left"),
        Column("p_value", "chi²\np", "chi-squared p", group="continuations"),
        Column("df", "df", "df", group="continuations"),
        Column("acceptance", "acceptance\nown/self/good/bad", "acceptance own/self/good/bad", group="proof"),
        Column("contracts", "contracts", "contracts held", group="proof"),
    )
    return Table(
        title="audit: is it still the target's distribution?",
        columns=columns,
        rows=tuple(_row(record) for record in records),
        num_keys=2,
        notes=tuple(_notes(records)),
    )


def _row(record: AuditRecord) -> tuple[Cell, ...]:
    direction, hidden = record.least_visible
    checked = record.chi_squared
    found = record.tokens_at_alarm is not None
    return (
        Cell(record.strategy),
        Cell(record.verdict, tone=TONES.get(record.verdict, "doubtful")),
        Cell(str(record.tokens), record.tokens),
        Cell(fixed(record.log_e, 1), record.log_e),
        Cell(fixed(record.bar, 1), record.bar),
        Cell(record.alternative if found else _alarmed(record)),
        Cell(_effect(record) if found else DASH),
        Cell(DASH if hidden is None else f"{hidden:.3f}", hidden),
        Cell(direction),
        Cell(DASH if checked is None else monte_carlo(checked.p_value, checked.alpha)),
        Cell(DASH if checked is None or checked.df is None else str(checked.df)),
        Cell("/".join(fixed(rate) for rate in record.acceptance.values())),
        Cell(f"{record.contracts_held}/{record.contracts_tried}"),
    )


def _alarmed(record: AuditRecord) -> str:
    """Name what alarmed where the e-process did not: its best guess then rests on nothing."""
    return ", ".join(component.name for component in record.components if component.alarm) or DASH


def _effect(record: AuditRecord) -> str:
    effect = record.effect
    if effect is None:
        return DASH
    bounds = "" if effect.low is None or effect.high is None else f" [{effect.low:.2f}, {effect.high:.2f}]"
    return f"{effect.tv:.2f}{bounds}"


def _notes(records: Sequence[AuditRecord]) -> Iterator[str]:
    if records:
        first = records[0]
        yield (
            f"Budget {first.budget}: to find a systematic deviation of TV {first.promised_tv:g} per token "
            "with probability .99; a run of correct strategies alarms with probability at most .001. "
            + _scored_by(first)
        )
    for record in records:
        if record.verdict != "PASS":
            yield f"{record.strategy}: {record.verdict}: {'; '.join(record.reasons)}"
        if record.injected:
            yield f"{record.strategy}: fault '{record.injected}' was injected"


def _scored_by(record: AuditRecord) -> str:
    """Say what the output was compared with, and in lower precision what was not called a fault."""
    floor = record.floor
    if floor is None:
        return f"Scored in {record.dtype} by plain forwards of the target."
    from_reference = max((row for row in floor.rows if row.against == "reference"), key=lambda row: row.mean)
    between = max((row.mean for row in floor.rows if row.against != "reference"), default=0.0)
    return (
        f"In {record.dtype} ordinary decoding itself is TV {from_reference.mean:.4f} per token (99 %: "
        f"{from_reference.high:.3f}) from the reference, {floor.reference}, and up to {between:.4f} from "
        f"itself at other widths; no set of tokens shifts by more than {floor.largest_shift:.4f}. "
        f"So pairs with and without speculation are compared, beyond {floor.paired_margin:.4f}, and the "
        f"reference beyond {floor.margin:.4f}; exact verdicts are float32's."
    )


def render(records: Sequence[AuditRecord], *, width: int, color: bool, explain: bool = False) -> str:
    """Return the audit as text."""
    from specbench.report.terminal import console_for, print_table  # which knows runs, and so audits

    output = io.StringIO()
    console = console_for(output, width, color)
    print_table(console, audit_table(records), width)
    if explain:
        for record in records:
            console.print()
            console.print(f"{record.strategy}: {record.verdict}", style="bold")
            for line in explained(record):
                wrapped = textwrap.wrap(line, width, initial_indent="  ", subsequent_indent="    ")
                console.print("\n".join(wrapped))
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"


def explained(record: AuditRecord) -> Iterator[str]:
    """Say in words what every test found, and what it could have found."""
    yield from record.reasons
    yield (
        f"{record.tokens} tokens of {record.sequences} sequences from {record.prompts} prompts; drafted "
        f"{record.drafted}, accepted {record.accepted}, stopped at {record.rejected} rejections"
    )
    for component in record.components:
        mark = "ALARM, " if component.alarm else ("" if component.conclusive else "not conclusive, ")
        level = f" (level {component.alpha:.2g})" if component.alpha else ""
        yield f"{component.name}: {mark}{component.words}{level}"
    if record.effect is not None and record.tokens_at_alarm is not None:
        yield f"effect: TV at least {_effect(record)} per token in the direction {record.effect.direction}"
    found = ", ".join(
        f"{name} {DASH if tv is None else f'{tv:.3f}'}" for name, tv in record.detectable.items()
    )
    yield f"smallest detectable TV per token: {found}"
    if record.worst is not None:
        worst = record.worst
        yield (
            f"worst position: output token {worst.offset} of the prompt under seed {worst.seed} in regime "
            f"{worst.regime}: token {worst.token} adds {worst.log_factor:.1f} to the evidence for "
            f"{worst.alternative}"
        )
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in record.seconds.items())
    yield f"time: {seconds}"
