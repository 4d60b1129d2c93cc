"""A production of two parts: one host serves, the other carries a rank. Real windows here, and a rehearsal."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty.rig import Rig, free_port, wait_for

from fairtrial import demo
from fairtrial.errors import ExperimentError
from fairtrial.evidence import verify
from fairtrial.experiment import Experiment, parse
from fairtrial.rehearsal import rehearse
from fairtrial.switch import procs


class Ranks(Rig):
    """The rig, with a second host: another state folder on this machine, on which a rank of production listens."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.rank_port = free_port()
        self.rank_state = folder / "rank"
        self.rank_argv: list[str] = []

    def serve_both(self) -> None:
        self.serve("", port=self.rank_port)
        self.rank_argv = procs.argv(procs.listeners(self.rank_port)[0].pid)
        self.serve()

    def both(self, **changes: Any) -> dict[str, Any]:
        hosts = {
            "here": {"state": str(self.state)},
            "rank": {"state": str(self.rank_state), "port": self.rank_port},
        }
        return self.experiment(hosts=hosts, **changes)

    def assert_both_back(self) -> None:
        self.assert_back()
        [rank] = procs.listeners(self.rank_port)
        assert procs.argv(rank.pid) == self.rank_argv
        assert procs.MARK not in (procs.environ(rank.pid) or {})
        assert sorted(path.name for path in self.rank_state.iterdir()) == ["last.json", "lock"]
        assert json.loads((self.rank_state / "last.json").read_bytes())["state"] == "released"
        assert procs.steps(str(self.rank_state)) == []

    def close(self) -> None:
        for step in procs.steps(str(self.rank_state)):
            procs.send(step["pid"], step["start"], signal.SIGKILL)
        super().close()
        for one in procs.listeners(self.rank_port):
            procs.send(one.pid, one.start, signal.SIGKILL)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.close()


def test_both_parts_are_stopped_replaced_and_brought_back(ranks: Ranks) -> None:
    ranks.serve_both()
    before = [procs.listeners(port)[0].pid for port in (ranks.port, ranks.rank_port)]
    ended = ranks.run(ranks.both(arms=[ranks.arm(environment={"FENCE": "1"})]))
    assert ended.code == 0, ended.stderr
    ranks.assert_both_back()
    assert verify(ended.out).problems == ()
    after = [procs.listeners(port)[0].pid for port in (ranks.port, ranks.rank_port)]
    assert not set(before) & set(after)
    seen = json.loads((ended.out / "arms" / "off" / "identity.json").read_bytes())["ranks"]
    assert {host: rank["environ"]["FENCE"] for host, rank in seen.items()} == {"here": "1", "rank": "1"}
    assert sorted(path.name for path in (ended.out / "snapshot").glob("*.json")) == ["here.json", "rank.json"]
    assert (ended.out / "arms" / "off" / "server-rank.log").exists()
    memory = json.loads((ended.out / "arm-memory.json").read_bytes())
    assert set(memory["off"]) == {"here", "rank"}


def test_a_rank_that_is_down_is_a_refusal(ranks: Ranks) -> None:
    ranks.serve()
    ended = ranks.run(ranks.both())
    assert ended.code == 2
    assert f"rank: production is down: nothing listens on port {ranks.rank_port}" in ended.stderr
    assert "hosts.rank.port" in ended.stderr
    ranks.assert_untouched()


def test_a_rank_of_an_arm_that_dies_stops_the_window(ranks: Ranks) -> None:
    ranks.serve_both()
    with ranks.running(ranks.both(arms=[ranks.arm("off", "slow-content", reps=40)])) as window:
        window.seen("cell")
        [rank] = procs.listeners(ranks.rank_port)
        procs.send(rank.pid, rank.start, signal.SIGKILL)
        ended = window.ended()
    assert ended.code == 3, ended.stderr
    assert "on rank is gone" in ended.stderr
    ranks.assert_both_back()


def test_a_runner_that_is_killed_leaves_both_switches_to_it(ranks: Ranks) -> None:
    ranks.serve_both()
    with ranks.running(ranks.both(arms=[ranks.arm("off", "slow-content", reps=40)])) as window:
        window.seen("cell")
        window.kill()

        def served() -> bool:
            states = [
                json.loads((state / "last.json").read_bytes())["state"] for state in (ranks.state, ranks.rank_state)
            ]
            return states == ["served", "served"]

        wait_for(served, "both switches have brought their part back")
    restored = ranks.command("restore", str(ranks.folder / "out"))
    assert restored.code == 0, restored.stderr
    ranks.assert_both_back()
    assert ranks.command("restore", str(ranks.folder / "out")).code == 0


def test_without_a_switch_restore_brings_both_back_after_a_kill(ranks: Ranks) -> None:
    ranks.serve_both()
    experiment = ranks.both(arms=[ranks.arm("off", "slow-content", reps=40)])
    for host in experiment["hosts"].values():
        host["switch"] = "none"
    with ranks.running(experiment) as window:
        window.seen("cell")
        window.kill()
    restored = ranks.command("restore", str(ranks.folder / "out"))
    assert restored.code == 0, restored.stderr
    ranks.assert_both_back()


def test_a_host_that_somebody_else_holds_gives_the_other_back(ranks: Ranks) -> None:
    """The HOLD is on all hosts or on none."""
    ranks.serve_both()
    other = Ranks(ranks.folder / "other")
    other.folder.mkdir()
    try:
        other.state, other.port = ranks.rank_state, ranks.rank_port
        with other.running(other.experiment(arms=[other.arm(reps=200)])) as window:
            window.seen("begin", step="hold")
            wait_for(lambda: (ranks.rank_state / "hold.json").exists(), "the other window holds the rank's host")
            ended = ranks.run(ranks.both())
        assert ended.code in (2, 3), ended.stderr
        assert "HOLD" in ended.stderr or "holds it" in ended.stderr
        ranks.assert_free()
    finally:
        other.close()


@pytest.fixture(scope="module")
def two() -> Experiment:
    raw = demo.experiment(quick=True).dump()
    raw["hosts"] = {"head": {"state": "/var/tmp/head"}, "worker": {"state": "/var/tmp/worker", "port": 8011}}
    raw["production"]["host"] = "head"
    return parse(raw, file="two.toml")


def test_no_stop_point_breaks_an_invariant_without_a_switch(two: Experiment) -> None:
    raw = two.dump()
    for host in raw["hosts"].values():
        host["switch"] = "none"
    found = rehearse(
        parse(raw, file="two.toml"),
        demo.PACKAGE,
        chosen=lambda point: point.effect.step in ("switch", "off.start", "restore.start"),
    )
    assert [(run.point, run.exits, run.broken) for run in found.runs if run.broken] == []


@pytest.mark.parametrize("step", ["hold", "off.start", "restore.start", "restore.prove", "switch.off"])
def test_no_stop_point_of_these_steps_breaks_an_invariant(two: Experiment, step: str) -> None:
    found = rehearse(two, demo.PACKAGE, chosen=lambda point: point.effect.step == step)
    assert found.runs
    assert [(run.point, run.exits, run.broken) for run in found.runs if run.broken] == []


@pytest.mark.parametrize(
    ("hosts", "key", "words"),
    [
        ({"head": {}, "worker": {"state": "/w"}}, "hosts.worker.port", "missing"),
        ({"head": {"port": 8001}, "worker": {"state": "/w", "port": 8011}}, "hosts.head.port", "production.port"),
        ({"head": {}, "worker": {"port": 8011}}, "hosts.worker.state", "a state folder each"),
    ],
)
def test_hosts_that_cannot_be_are_faults(two: Experiment, hosts: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        parse({**two.dump(), "hosts": hosts}, file="two.toml")
    [fault] = caught.value.faults
    assert fault.key == key
    assert words in fault.message
