"""The runner is SIGKILLed once in every step of its ledger, and production comes back. ``make kill`` does it often."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import kill
import pytest

BY_THE_SWITCH = ("idle", "off.start", "cause.requests", "restore.start", "look")


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, Any]]:
    """What came of each kill that was asked for, played two at a time in the order of the tests."""
    asked = [item.callspec.params for item in request.session.items if Path(item.path) == Path(__file__)]
    todo = [(kill.alone, one["alone"]) if "alone" in one else (kill.killed, one["step"]) for one in asked]
    ends: dict[Any, Future[kill.Case]] = {key: Future() for key in todo}

    def case(way: Any, step: str, lane: kill.Lane) -> kill.Case:
        found: kill.Case = way(lane, step)
        ends[way, step].set_result(found)
        return found

    def travel() -> None:
        cases = [functools.partial(case, way, step) for way, step in todo]
        try:
            kill.play(cases, tmp_path_factory.mktemp("kill"), 2, lambda found: None)
        except Exception as error:
            for end in ends.values():
                with suppress(Exception):
                    end.set_exception(error)

    thread = threading.Thread(target=travel)
    thread.start()
    yield ends
    thread.join()


def test_production_comes_back_after_a_kill_in(step: str, played: dict[Any, Future[kill.Case]]) -> None:
    case = played[kill.killed, step].result()
    assert not case.wrong, case.told()


def test_the_switch_alone_brings_production_back_after_a_kill_in(
    alone: str, played: dict[Any, Future[kill.Case]]
) -> None:
    case = played[kill.alone, alone].result()
    assert not case.wrong, case.told()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "step" in metafunc.fixturenames:
        metafunc.parametrize("step", kill.KILLS)
    if "alone" in metafunc.fixturenames:
        metafunc.parametrize("alone", BY_THE_SWITCH)
