"""Workers are started again one by one, so that they serve a model that was made after their start."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.core.rollout import AGAIN_S, AWAY_S, CLEAR_S, QUIET_S, WAIT_S, Adoption, Restart, Rollout, Seat, Told

BASE, NEW = "m", "m:new"


class Scene:
    """Devices that serve the base, and a model that they shall serve."""

    def __init__(self, *devices: str) -> None:
        self.rollout, self.now, self.told = Rollout(), 0.0, list[str]()
        self.adoption = Adoption(NEW, BASE)
        self.seats = {name: Seat(frozenset({BASE}), f"{name}-1") for name in devices}

    def tick(self, dt: float = 0.5) -> list[Restart]:
        self.now += dt
        commands, told = self.rollout.tick([self.adoption], self.seats, self.now)
        self.told += [each.message for each in told]
        return commands

    def asked(self, dt: float = 0.5) -> list[str]:
        return [command.device for command in self.tick(dt)]

    def set(self, device: str, **more: object) -> None:
        self.seats[device] = replace(self.seats[device], **more)  # type: ignore[arg-type]

    def goes(self, device: str) -> None:
        self.set(device, serving=False)

    def comes(self, device: str, *models: str, **more: object) -> None:
        self.set(device, serving=True, instance=f"{device}-2", models=frozenset(models or (BASE, NEW)), **more)


def test_the_next_device_is_started_again_when_the_last_one_serves_the_model() -> None:
    s = Scene("a", "b")
    assert s.tick() == [Restart("a", "a-1")]
    s.goes("a")
    assert s.tick(50.0) == []
    s.comes("a")
    assert s.asked() == ["b"]
    s.goes("b")
    assert s.tick() == []
    s.comes("b")
    assert s.tick() == [] == s.tick(1000.0)
    assert s.told == [
        "a is started again to serve m:new",
        "served as m:new on a",
        "b is started again to serve m:new",
        "served as m:new on b",
    ]
    assert s.rollout.clearing == ""


def test_a_device_that_comes_back_without_the_model_is_left_alone_and_the_events_say_why() -> None:
    s = Scene("a", "b")
    assert s.asked() == ["a"]
    s.comes("a", BASE, left_out={NEW: "no room"})
    assert s.asked() == ["b"]
    s.comes("b", BASE)
    assert s.tick() == [] == s.tick(1000.0)
    assert s.told[1] == "a does not serve m:new: no room" and "b does not serve m:new: its worker" in s.told[3]


def test_a_device_that_could_not_start_with_the_model_by_itself_is_not_started_again() -> None:
    s = Scene("a", "b")
    s.set("a", left_out={NEW: "no room"})
    assert s.asked() == ["b"] and s.told[0] == "a does not serve m:new: no room"


def test_a_device_without_the_base_is_left_alone() -> None:
    s = Scene("a", "b")
    s.set("a", models=frozenset({"other"}))
    s.set("b", models=frozenset({"other", BASE}))
    s.set("b", requests=0)
    s.tick()
    assert s.asked(QUIET_S) == ["b"]
    s.comes("b", "other", BASE, NEW)
    assert s.tick(1000.0) == []


def test_nothing_is_started_again_while_another_device_with_the_base_is_away_unless_for_long() -> None:
    s = Scene("a", "b", "c")
    s.set("b", serving=False, away_s=1.0)
    assert s.tick() == [] == s.tick(WAIT_S + 1)
    s.set("b", away_s=AWAY_S)
    assert s.asked() == ["a"]


def test_a_device_whose_models_are_not_known_may_serve_the_base_when_it_comes() -> None:
    s = Scene("a", "b")
    s.seats["b"] = Seat(frozenset(), "", serving=False, away_s=1.0)
    assert s.tick() == [] == s.tick(WAIT_S + 1)
    s.comes("b", "other")
    assert s.asked() == ["a"], "it has waited for long"


def test_a_device_that_waits_for_its_job_to_leave_may_train_again_when_another_one_fails() -> None:
    s = Scene("a", "b")
    for name in "ab":
        s.set(name, trains=True)
    assert s.tick() == [] and s.rollout.clearing == "a"
    s.goes("b")
    s.set("a", trains=False)
    assert s.tick() == [] and s.rollout.clearing == ""


def test_the_only_device_waits_for_a_quiet_moment() -> None:
    s = Scene("a")
    s.set("a", requests=1)
    assert s.tick() == [] == s.tick(10.0)
    s.set("a", requests=0)
    assert s.tick() == [] == s.tick(QUIET_S / 2)
    s.set("a", requests=1)
    assert s.tick(QUIET_S) == []
    s.set("a", requests=0)
    assert s.tick() == []
    assert s.asked(QUIET_S) == ["a"]


def test_the_only_device_of_some_model_does_not_wait_for_ever() -> None:
    s = Scene("a", "b")
    for name in "ab":
        s.set(name, requests=3)
    s.set("a", models=frozenset({BASE, "alone"}))
    assert s.asked() == ["b"]
    s.comes("b")
    assert s.tick() == [] == s.tick(10.0)
    assert s.asked(WAIT_S) == ["a"]


def test_a_device_without_requests_and_without_a_job_comes_first() -> None:
    s = Scene("a", "b", "c")
    s.set("a", trains=True)
    s.set("b", requests=2)
    assert s.asked() == ["c"]


def test_a_device_that_trains_gives_its_job_away_first() -> None:
    s = Scene("a", "b")
    for name in "ab":
        s.set(name, trains=True)
    assert s.tick() == [] and s.rollout.clearing == "a"
    assert s.tick(CLEAR_S / 2) == []
    s.set("a", trains=False)
    assert s.asked() == ["a"]
    s.comes("a")
    assert s.tick() == [] and s.rollout.clearing == "b"
    assert s.asked(CLEAR_S) == ["b"], "at some time it is started again all the same"


def test_a_command_that_is_lost_is_said_again_to_the_same_worker_only() -> None:
    s = Scene("a", "b")
    assert s.asked() == ["a"] and s.asked() == []
    assert s.tick(AGAIN_S) == [Restart("a", "a-1")]
    s.goes("a")
    assert s.tick(AGAIN_S) == []
    s.comes("a")
    assert s.asked() == ["b"]


def test_a_device_that_stays_away_stops_the_rollout() -> None:
    s = Scene("a", "b", "c")
    assert s.asked() == ["a"]
    s.set("a", serving=False, away_s=2 * AWAY_S)
    assert s.tick(2 * AWAY_S) == []
    s.comes("a")
    assert s.asked() == ["b"]


def test_one_restart_serves_all_models_that_wait() -> None:
    s, other = Scene("a"), Adoption("m:other", BASE)
    s.rollout.tick([s.adoption, other], s.seats, 0.0)
    s.rollout.tick([s.adoption, other], s.seats, QUIET_S)
    assert s.adoption.asked == other.asked == ["a"]
    s.comes("a", BASE, NEW, left_out={"m:other": "damaged"})
    _, told = s.rollout.tick([s.adoption, other], s.seats, QUIET_S + 1)
    assert Told("m:other", "a does not serve m:other: damaged", "warn") in told
    assert s.rollout.tick([s.adoption, other], s.seats, 1000.0) == ([], [])


def test_a_removed_model_leaves_one_device_after_the_other() -> None:
    s = Scene("a", "b")
    for name in "ab":
        s.set(name, models=frozenset({BASE, NEW}))
    assert s.tick() == []
    s.adoption.remove()
    assert s.asked() == ["a"], "that it alone serves the model then does not matter"
    s.goes("a")
    assert s.tick() == []
    s.comes("a", BASE)
    assert s.asked() == ["b"]
    s.comes("b", BASE, NEW)
    assert s.tick() == [] == s.tick(1000.0)
    assert s.told[-3:] == ["a does not serve m:new", "b is started again without m:new", "b still serves m:new"]


class RolloutMachine(RuleBasedStateMachine):
    """Devices fail, come back, train and are asked by others, adoptions come, the scheduler restarts: by the rollout's
    hand two devices are never down, and none goes twice for one model."""

    devices = st.sampled_from("abc")

    def __init__(self) -> None:
        super().__init__()
        self.rollout, self.now, self.number = Rollout(), 0.0, 0
        self.adoptions: list[Adoption] = []
        self.seats = {name: Seat(frozenset({BASE}), name) for name in "abc"}
        self.downs: set[str] = set()  #: by our hand
        self.commands: list[Restart] = []
        self.sent: set[Restart] = set()
        self.went: dict[str, list[frozenset[str]]] = {name: [] for name in "abc"}

    @precondition(lambda self: len(self.adoptions) < 3)
    @rule()
    def adopt(self) -> None:
        self.adoptions.append(Adoption(f"m:{len(self.adoptions)}", BASE))

    @rule(name=devices, requests=st.integers(0, 1), trains=st.booleans())
    def load(self, name: str, requests: int, trains: bool) -> None:
        self.seats[name] = replace(self.seats[name], requests=requests, trains=trains)

    @rule(dt=st.sampled_from([0.5, 5.0, 40.0, 130.0, 700.0]))
    def tick(self, dt: float) -> None:
        self.now += dt
        for name, seat in self.seats.items():
            if not seat.serving:
                self.seats[name] = replace(seat, away_s=seat.away_s + dt)
        before = {name: {a.name for a in self.adoptions if name in a.asked} for name in self.seats}
        commands, _ = self.rollout.tick(self.adoptions, self.seats, self.now)
        for command in commands:
            assert self.seats[command.device].serving and command.instance == self.seats[command.device].instance
            fresh = {a.name for a in self.adoptions if command.device in a.asked} - before[command.device]
            assert fresh or command in self.sent, "a device goes for something new"
            self.sent.add(command)
        assert len(commands) <= 1
        self.commands += commands

    @precondition(lambda self: self.commands)
    @rule(lost=st.booleans())
    def obey(self, lost: bool) -> None:
        command = self.commands.pop(0)
        if not lost and self.seats[command.device].instance == command.instance and command.device not in self.downs:
            self.downs.add(command.device)
            self.went[command.device].append(frozenset(a.name for a in self.adoptions if command.device in a.asked))
            self.seats[command.device] = replace(self.seats[command.device], serving=False, away_s=0.1)

    @rule(name=devices)
    def fail(self, name: str) -> None:
        self.seats[name] = replace(self.seats[name], serving=False, away_s=0.1)

    @rule(name=devices, without=st.booleans())
    def come(self, name: str, without: bool) -> None:
        self.number += 1
        models = {BASE} | (set() if without else {adoption.name for adoption in self.adoptions})
        self.seats[name] = Seat(frozenset(models), f"{name}-{self.number}")
        self.downs.discard(name)

    @rule()
    def restart_of_the_scheduler(self) -> None:
        if not self.downs and not self.commands:
            self.rollout = Rollout()

    @invariant()
    def one_is_down_at_most(self) -> None:
        assert len(self.downs) <= 1

    @invariant()
    def none_goes_twice_for_the_same(self) -> None:
        for went in self.went.values():
            assert len(set(went)) == len(went), "each time it went for one more model"

    def teardown(self) -> None:
        """When all is well, every device has had its chance."""
        for name in self.seats:
            self.come(name, False)
        for _ in range(60):
            while self.commands:
                self.obey(False)
            for name in list(self.downs):
                self.come(name, False)
            self.load("a", 0, False)
            self.tick(40.0)
        assert all(a.name in seat.models for a in self.adoptions for seat in self.seats.values())


TestRolloutMachine = RolloutMachine.TestCase
TestRolloutMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
