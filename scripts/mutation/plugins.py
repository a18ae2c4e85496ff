"""Plugins of pytest: one measures how long each test takes, another chooses the tests for a mutant."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable

import pytest

OUTSIDE = 0  # the context of imports and of whatever runs between tests


class Watch:
    """Seconds and outcome of every test, and the fixtures that tests share, which are contexts of their own."""

    def __init__(self, switch: Callable[[int], None] = lambda context: None) -> None:
        self.contexts: dict[str, int] = {}  # of tests by their ids, and of shared fixtures
        self.seconds: dict[str, float] = {}  # of both
        self.fixtures: dict[str, list[str]] = {}  # of each test
        self.failed: set[str] = set()
        self._switch = switch
        self._stack: list[int] = [OUTSIDE]
        self._in_fixtures = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        began, self._in_fixtures = time.perf_counter(), 0.0
        self._enter(item.nodeid)
        try:
            return (yield)
        finally:
            self._leave()
            self.seconds[item.nodeid] = time.perf_counter() - began - self._in_fixtures

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        began, name = time.perf_counter(), _name(fixturedef)
        self._enter(name)
        try:
            return (yield)
        finally:
            self._leave()
            took = time.perf_counter() - began
            self.seconds[name] = max(took, self.seconds.get(name, 0.0))
            if len(self._stack) == 2:  # else it is inside another one
                self._in_fixtures += took

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Function) -> None:
        used = item._request._fixture_defs.values()
        self.fixtures[item.nodeid] = [_name(each) for each in used if each.scope != "function"]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def _enter(self, name: str) -> None:
        self._stack.append(self.contexts.setdefault(name, len(self.contexts) + 1))
        self._switch(self._stack[-1])

    def _leave(self) -> None:
        self._stack.pop()
        self._switch(self._stack[-1])


def _name(fixture: pytest.FixtureDef[object]) -> str:
    return f"fixture {fixture.baseid}::{fixture.argname}"


class Choice:
    """Runs some tests of a file, in a given order, and says which was the first to fail."""

    def __init__(self, tests: Iterable[str]) -> None:
        self._rank = {test: rank for rank, test in enumerate(tests)}
        self.failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self._rank), key=lambda i: self._rank[i.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or f"import of {report.nodeid}"
