"""Microsoft Agent Framework: middleware that hints, and that adds each agent's headers to its requests.

When an agent begins, its successors in the built workflow are advised; when a tool starts, its agent is. The run is
that of `upbeat.in_run` or `UpbeatMiddleware.run`, else the agent's session.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

from upbeat.client import HintClient
from upbeat.names import Hop, name_of
from upbeat.speaking import Speakers, current_hop, current_run
from upbeat.workflow import Workflow

try:
    from agent_framework import AgentMiddleware, FunctionMiddleware
except ImportError as e:
    raise ImportError("upbeat.agent_framework needs Microsoft's Agent Framework: pip install agent-framework") from e

CallNext = Callable[[], Awaitable[None]]


def followers_of(workflow: Any) -> dict[str, tuple[str, ...]]:
    """Successors of each executor of a built workflow, by id; an agent's executor has its agent's name as id."""
    found: dict[str, list[str]] = {}
    for group in workflow.edge_groups:
        for edge in group.edges:
            found.setdefault(edge.source_id, []).append(edge.target_id)
    return {name: tuple(dict.fromkeys(targets)) for name, targets in found.items()}


class UpbeatMiddleware:
    """`Agent(client=..., name="writer", middleware=UpbeatMiddleware(client, "team").all)`: one object for all agents of
    a workflow.

    follows: successors by agent, for use without a built workflow (`knows`).
    """

    def __init__(
        self,
        client: HintClient,
        workflow: str,
        *,
        follows: dict[str, list[str]] | None = None,
        priority: int = 0,
        model_id: str | None = None,
    ) -> None:
        self.workflow = Workflow(client, workflow, priority=priority, model_id=model_id)
        self._followers: dict[str, tuple[str, ...]] = {name: tuple(names) for name, names in (follows or {}).items()}
        self._agents: set[str] = set()
        #: For an agent's `middleware`.
        self.all: list[Any] = [_AroundAgent(self), _AroundTool(self)]

    def knows(self, workflow: Any) -> Any:
        """Read the successors from a built workflow. Returns the workflow."""
        self._followers.update(followers_of(workflow))
        self._agents |= {
            name for name, executor in workflow.executors.items() if getattr(executor, "agent", None) is not None
        }
        return workflow

    def run(self, run: str) -> AbstractContextManager[str]:
        """Code in the block belongs to this run; at its end, open hints are withdrawn."""
        return self.workflow.run(run)

    def may_follow(self, agent: str) -> tuple[str, ...]:
        """The agents that may follow this one, skipping executors that are not agents."""
        found: dict[str, None] = {}
        seen, waiting = set[str](), list(self._followers.get(agent, ()))
        while waiting:
            name = waiting.pop(0)
            if name in seen:
                continue
            seen.add(name)
            if name in self._agents or name not in self._followers:
                found[name] = None
            else:
                waiting += self._followers[name]
        return tuple(found if not self._agents else [name for name in found if name in self._agents])

    def hop_of(self, context: Any) -> Hop | None:
        """The hop of an agent's call; None (and counted) if no run is known."""
        run = current_run() or getattr(context.session, "session_id", None)
        if run is None:
            self.workflow.client.invalid("run", "without a session nothing names the run: use upbeat.in_run(...)")
            return None
        return self.workflow.hop(_name(context.agent), run)


class _AroundAgent(AgentMiddleware):
    """Adds headers to an agent's requests, and advises its successors."""

    def __init__(self, of: UpbeatMiddleware) -> None:
        self._of, self._speakers = of, Speakers()

    async def process(self, context: Any, call_next: CallNext) -> None:
        hop = self._of.hop_of(context)
        if hop is None:
            await call_next()
            return
        # Without a named run the other agents' sessions are unknown.
        self._of.workflow.asks(hop, self._of.may_follow(_name(context.agent)) if current_run() is not None else ())
        call = object()
        over = functools.partial(self._speakers.over, call)
        self._speakers.begin(call, hop)
        if context.stream:  # the request is sent later, when the stream is read
            context.stream_cleanup_hooks.append(over)
            await call_next()
            return
        try:
            await call_next()
        finally:
            over()


class _AroundTool(FunctionMiddleware):
    """Advises an agent's session when its tool starts: the model gets the result."""

    def __init__(self, of: UpbeatMiddleware) -> None:
        self._of = of

    async def process(self, context: Any, call_next: CallNext) -> None:
        hop = current_hop()
        # A handoff looks like a tool, but its result goes to another agent, advised when this one began.
        if hop is not None and not str(context.function.name).startswith("handoff_to_"):
            self._of.workflow.asks_after(hop, name_of(str(context.function.name)))
        await call_next()


def _name(agent: Any) -> str:
    """An agent's name in workflows."""
    return str(getattr(agent, "name", None) or agent.id)
