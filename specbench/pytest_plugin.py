"""The pytest plugin: the fixture `lossless`, its options, and a line per audit at the end of the report.

Loaded with every run of pytest where specbench is installed, so it imports nothing before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from specbench.audit.lossless_result import LosslessResult

PROPERTY = "specbench"
"""The name under which a test's report carries its lines, also from the processes of pytest-xdist."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("specbench", "audits of decoders")
    group.addoption(
        "--specbench-budget",
        metavar="NAME|TOKENS",
        default="quick",
        help="of audits that name none: quick, standard, deep, or a number of tokens (default: quick)",
    )
    group.addoption(
        "--specbench-seed",
        metavar="N",
        type=int,
        default=0,
        help="of audits that name none (default: 0)",
    )


@pytest.fixture
def lossless(request: pytest.FixtureRequest) -> Callable[..., LosslessResult]:
    """Return `specbench.testing.assert_lossless` with budget and seed from the command line."""

    def check(*args: Any, **options: Any) -> LosslessResult:
        __tracebackhide__ = True
        from specbench.testing import assert_lossless

        options.setdefault("budget", request.config.getoption("--specbench-budget"))
        options.setdefault("seed", request.config.getoption("--specbench-seed"))
        try:
            result = assert_lossless(*args, **options)
        except AssertionError as error:
            if (found := getattr(error, "result", None)) is not None:
                request.node.user_properties.append((PROPERTY, found.line))
            raise
        request.node.user_properties.append((PROPERTY, result.line))
        return result

    return check


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write a line per audit: verdict, log e-value, and what would have been found."""
    audits = list(_lines(terminalreporter))
    if not audits:
        return
    terminalreporter.section("specbench")
    for test, line in audits:
        terminalreporter.write_line(f"{test}: {line}")


def _lines(terminalreporter: Any) -> Iterator[tuple[str, str]]:
    """Yield (test, line) for every audit in the reports of tests that ran."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                for name, line in report.user_properties:
                    if name == PROPERTY:
                        yield report.nodeid, line
