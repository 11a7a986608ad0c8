"""Recommends how many nodes the fleet should have, for autoscalers: looks at the signals every few seconds
(`core.scale_signals`), and lets the policy decide (`core.scale_policy`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from contracts.v1 import scheduler_pb2
from runtime.clock import Clock
from runtime.config import Config
from scheduler.core.control import Control
from scheduler.core.fleet import ARRIVED_S
from scheduler.core.scale_policy import Recommendation, Recommender, policy_of
from scheduler.core.scale_signals import Attained, Signals, signals

#: Time between two looks, in seconds.
LOOK_S = 5.0
#: After its start a scheduler recommends nothing for this long, in seconds: nodes come back one by one, and the rate of
#: arriving work is that of a minute.
SETTLE_S = ARRIVED_S
#: Entries of one report of a gateway that are read.
_MOST_DECIDED = 2_000


class Scaling:
    """See the module. last: the latest signals, and the recommendation if there is one; replaced, never changed, as
    scrapes read it on another thread. None: not looked yet. began_s: when the scheduler started."""

    def __init__(self, config: Config, control: Control, clock: Clock, gathering: Callable[[], bool]) -> None:
        self._control, self._clock, self._gathering = control, clock, gathering
        self._attained = Attained()
        self._recommender = Recommender(policy_of(config.autoscale.model_dump(), config.nodes.count))
        self.last: tuple[Signals, Recommendation | None] | None = None
        self.began_s = clock.now()

    def decided(self, told: Iterable[scheduler_pb2.SloDecided]) -> None:
        """A gateway's answers that were decided since its last word. Entries that make no sense are left out."""
        now = self._clock.now()
        for one, _ in zip(told, range(_MOST_DECIDED), strict=False):
            self._attained.add(one.model, one.target, one.turns, one.kept, now)

    def look(self) -> tuple[Signals, Recommendation | None]:
        """Look at the fleet, and decide."""
        control, clock, now = self._control, self._clock, self._clock.now()
        new = self._gathering() or now - self.began_s < SETTLE_S
        seen = signals(control.fleet, control.directory, self._attained, now, clock.wall(), gathering=new)
        self.last = seen, self._recommender.look(seen, now)
        return self.last

    async def run(self) -> None:
        """Look every few seconds, for ever."""
        while True:
            self.look()
            await self._clock.sleep(LOOK_S)

    def reply(self) -> scheduler_pb2.ScaleReply | None:
        """The last look, for gateways; None: there is no recommendation yet."""
        seen, said = self.last or self.look()
        if said is None:
            return None
        policy = self._recommender.policy
        return scheduler_pb2.ScaleReply(
            desired_nodes=said.nodes,
            wanted_nodes=said.wanted,
            why=said.why,
            demand_devices=said.demand,
            utilisation=said.utilisation,
            nodes=seen.nodes,
            starting_nodes=seen.starting_nodes,
            devices=seen.devices,
            arriving=seen.arriving,
            work_s=seen.work_s,
            hbm_needed=seen.hbm_needed,
            dram_needed=seen.dram_needed,
            attainment=seen.attainment,
            turns=seen.turns,
            unmeasured_devices=seen.unmeasured,
            incomplete=seen.incomplete,
            models={
                name: scheduler_pb2.ModelScale(
                    work_s=of.work_s,
                    arriving=of.arriving,
                    nodes=of.nodes,
                    attainment=dict(of.attainment),
                    turns=dict(of.turns),
                )
                for name, of in seen.models.items()
            },
            work_by_device=seen.work_by_device,
            min_nodes=policy.min_nodes,
            max_nodes=policy.max_nodes,
            target_utilisation=policy.target_utilisation,
        )
