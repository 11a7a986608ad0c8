"""`GET /v1/scale`, and what schedulers are told of answers that kept to their targets."""

from __future__ import annotations

from gateway_fakes import MODEL, stack, until

from contracts.v1 import scheduler_pb2 as pb
from tests.gateway.test_targets_kept import say, targets


async def test_an_autoscaler_reads_how_many_nodes_there_should_be_and_why() -> None:
    async with stack(1) as s:
        s.scheduler.scale = pb.ScaleReply(
            desired_nodes=3,
            wanted_nodes=5,
            why="work",
            nodes=2,
            starting_nodes=1,
            devices=2,
            demand_devices=1.8,
            utilisation=0.9,
            arriving=1.5,
            work_s=9.0,
            hbm_needed=0.4,
            dram_needed=0.25,
            attainment=0.75,
            turns=80,
            models={
                MODEL: pb.ModelScale(work_s=9.0, arriving=1.5, nodes=2, attainment={"ttft": 0.75}, turns={"ttft": 80})
            },
            work_by_device={"node-0": 9.0},
            min_nodes=1,
            max_nodes=8,
            target_utilisation=0.6,
        )
        status, page = await s.get("/v1/scale")
        assert (status, page["object"], page["desired_nodes"], page["wanted_nodes"]) == (200, "scale", 3, 5)
        assert (page["nodes"], page["starting_nodes"], page["utilisation"], page["why"]) == (2, 1, 0.9, "work")
        assert page["kv_needed"] == {"hbm": 0.4, "dram": 0.25} and page["slo"] == {"attainment": 0.75, "turns": 80}
        (model,) = page["models"]
        assert (model["model"], model["work_s_a_node"], model["attainment"]) == (MODEL, 4.5, {"ttft": 0.75})
        assert page["devices_work_s"] == {"node-0": 9.0}
        assert page["policy"] == {"min_nodes": 1, "max_nodes": 8, "target_utilisation": 0.6}
        s.scheduler.scale = pb.ScaleReply(desired_nodes=1, incomplete="the scheduler has just started")
        _, page = await s.get("/v1/scale")
        assert (page["utilisation"], page["slo"]["attainment"], page["models"]) == (None, None, [])


async def test_without_a_scheduler_nothing_is_recommended() -> None:
    async with stack(1) as s:
        await s.scheduler.kill()
        status, body = await s.get("/v1/scale")
        assert status == 503 and "desired_nodes" not in body


async def test_every_scheduler_hears_of_each_answer_once() -> None:
    async with stack(1, schedulers=2, models=targets(60.0, 1.0)) as s:
        for _ in range(3):
            await say(s, stream=True)

        def heard() -> list[dict[str, tuple[int, int]]]:
            found = []
            for scheduler in s.schedulers:
                sums: dict[str, tuple[int, int]] = {}
                for one in scheduler.decided:
                    assert one.model == MODEL
                    turns, kept = sums.get(one.target, (0, 0))
                    sums[one.target] = turns + one.turns, kept + one.kept
                found.append(sums)
            return found

        await until(lambda: heard() == [{"ttft": (3, 3), "tpot": (3, 3)}] * 2)
