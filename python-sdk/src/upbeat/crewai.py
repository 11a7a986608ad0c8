"""CrewAI: an event listener that hints, and an interceptor that adds each agent's headers to its requests.

When an agent begins a task, the possible next agents are advised: the next task's agent, those it may delegate to, and
in a hierarchical crew its manager or, for the manager, all agents. When a tool starts, its agent is advised. The run is
that of `upbeat.in_run`, else the crew's id.
"""

from __future__ import annotations

from typing import Any

from upbeat.client import HintClient
from upbeat.names import Hop
from upbeat.speaking import Speakers, current_run, name_request
from upbeat.workflow import Workflow

try:
    from crewai.events import (
        AgentExecutionStartedEvent,
        BaseEventListener,
        CrewKickoffCompletedEvent,
        CrewKickoffFailedEvent,
        ToolUsageStartedEvent,
    )
    from crewai.hooks import (
        register_after_llm_call_hook,
        register_before_llm_call_hook,
        unregister_after_llm_call_hook,
        unregister_before_llm_call_hook,
    )
    from crewai.llms.hooks.base import BaseInterceptor
except ImportError as e:
    raise ImportError("upbeat.crewai needs CrewAI 1: pip install crewai") from e

MAX_AGENTS = 10_000


class UpbeatListener(BaseEventListener):
    """`UpbeatListener(client, "team")`, once, before a crew starts. Listens to every crew of the process until
    `remove`.

    Agents are named by role.
    """

    def __init__(self, client: HintClient, workflow: str, *, priority: int = 0, model_id: str | None = None) -> None:
        self.workflow = Workflow(client, workflow, priority=priority, model_id=model_id)
        #: Agent id to its latest hop.
        self._hops: dict[str, Hop] = {}
        #: By agent id.
        self._speakers = Speakers()
        self._handlers: list[tuple[Any, Any]] = []
        super().__init__()
        register_before_llm_call_hook(self._model_is_asked)
        register_after_llm_call_hook(self._model_has_answered)

    def setup_listeners(self, crewai_event_bus: Any) -> None:
        for event, handler in (
            (AgentExecutionStartedEvent, self._agent_begins),
            (ToolUsageStartedEvent, self._tool_starts),
            (CrewKickoffCompletedEvent, self._crew_ends),
            (CrewKickoffFailedEvent, self._crew_ends),
        ):
            crewai_event_bus.on(event)(handler)
            self._handlers.append((event, handler))
        self._bus = crewai_event_bus

    def remove(self) -> None:
        """Stop listening."""
        for event, handler in self._handlers:
            self._bus.off(event, handler)
        self._handlers.clear()
        unregister_before_llm_call_hook(self._model_is_asked)
        unregister_after_llm_call_hook(self._model_has_answered)

    def _agent_begins(self, source: Any, event: Any) -> None:
        crew = getattr(event.agent, "crew", None)
        if (hop := self._hop(event.agent, crew)) is not None:
            self.workflow.asks(hop, may_follow(event.agent, event.task, crew))

    def _tool_starts(self, source: Any, event: Any) -> None:
        agent_id = event.agent_id or getattr(event.agent, "id", None)
        with self.workflow.lock:
            hop = self._hops.get(str(agent_id))
        if hop is not None:
            self.workflow.asks_after(hop, str(event.tool_name))

    def _crew_ends(self, source: Any, event: Any) -> None:
        if (run := _run_of(source)) is not None:
            self.workflow.ends(run)

    def _model_is_asked(self, context: Any) -> None:
        """Called in the request's thread, just before it: the request gets this agent's headers."""
        if context.agent is None:
            return
        self._model_has_answered(context)
        hop = self._hop(context.agent, context.crew or getattr(context.agent, "crew", None))
        if hop is not None:
            self._speakers.begin(str(context.agent.id), hop)

    def _model_has_answered(self, context: Any) -> None:
        self._speakers.over(str(getattr(context.agent, "id", None)))

    def _hop(self, agent: Any, crew: Any) -> Hop | None:
        run = _run_of(crew)
        if run is None:
            self.workflow.client.invalid("run", "without a crew nothing names the run: use upbeat.in_run(...)")
            return None
        hop = self.workflow.hop(_role(agent), run)
        with self.workflow.lock:
            self._hops[str(agent.id)] = hop
            if len(self._hops) > MAX_AGENTS:
                del self._hops[next(iter(self._hops))]
        return hop


class UpbeatInterceptor(BaseInterceptor[Any, Any]):
    """`LLM(..., interceptor=UpbeatInterceptor())`: requests carry their agent's headers."""

    def on_outbound(self, message: Any) -> Any:
        name_request(message)
        return message

    def on_inbound(self, message: Any) -> Any:
        return message


def may_follow(agent: Any, task: Any, crew: Any) -> list[str]:
    """Roles of the agents that may call a model next, after `agent` does `task` in `crew`."""
    if crew is None:
        return []
    role, found = _role(agent), list[str]()
    all_roles = [_role(other) for other in crew.agents]
    manager = getattr(crew, "manager_agent", None)
    if manager is not None:
        found += all_roles if _role(manager) == role else [_role(manager)]
    elif getattr(agent, "allow_delegation", False):
        found += all_roles
    tasks = list(crew.tasks)
    at = next(
        (
            i
            for i, known in enumerate(tasks)
            if known is task or getattr(known, "id", None) == getattr(task, "id", None)
        ),
        None,
    )
    if at is not None and at + 1 < len(tasks) and tasks[at + 1].agent is not None:
        found.insert(0, _role(tasks[at + 1].agent))
    return [name for name in dict.fromkeys(found) if name != role]


def _run_of(crew: Any) -> str | None:
    """The run: that of `in_run`, else the crew's id; None without both."""
    return current_run() or (str(crew.id) if crew is not None else None)


def _role(agent: Any) -> str:
    return str(agent.role).strip()
