"""OpenAI Agents SDK: `RunHooks` that hint, a filter that adds headers to requests, and a tracing processor for code
that can pass neither.

When an agent's model is called, every agent it may hand off to is advised; when a tool starts, its agent is. The run is
that of `upbeat.in_run`, else the trace's group (a conversation), else the trace.
"""

from __future__ import annotations

from typing import Any

from upbeat.client import HintClient
from upbeat.names import Hop
from upbeat.speaking import Speakers, current_run
from upbeat.workflow import Workflow

try:
    from agents import Agent, Handoff, RunHooks
    from agents.tracing import TracingProcessor, get_current_trace
except ImportError as e:
    raise ImportError("upbeat.openai_agents needs the OpenAI Agents SDK: pip install openai-agents") from e

#: The id of every trace while tracing is off.
_NO_TRACE = "no-op"


class UpbeatRunHooks(RunHooks[Any]):
    """`Runner.run(agent, input, hooks=UpbeatRunHooks(client, "team"))`. Serves any number of runs at once.

    workflow: the name under which the server learns the call graph. run: for hooks that are made for one run.
    """

    def __init__(
        self,
        client: HintClient,
        workflow: str,
        *,
        run: str | None = None,
        priority: int = 0,
        model_id: str | None = None,
    ) -> None:
        super().__init__()
        self.workflow = Workflow(client, workflow, priority=priority, model_id=model_id)
        self._run = run
        #: By hop.
        self._speakers = Speakers()

    def hop(self, agent_name: str) -> Hop | None:
        """This agent in the current run; None (and counted) if no run is known."""
        run = self._run or current_run() or _trace_run(get_current_trace())
        if run is None:
            self.workflow.client.invalid(
                "run", "with tracing off nothing names the run: give `run`, or use upbeat.in_run(...)"
            )
            return None
        return self.workflow.hop(agent_name, run)

    def name_request(self, data: Any) -> Any:
        """`RunConfig(call_model_input_filter=hooks.name_request)`: `upbeat.async_event_hooks` adds the agent's headers
        to the request. Returns the model data unchanged."""
        hop = self.hop(data.agent.name)
        if hop is not None:
            self._speakers.begin(hop, hop)
        return data.model_data

    async def on_llm_start(self, context: Any, agent: Any, system_prompt: str | None, input_items: list[Any]) -> None:
        if (hop := self.hop(agent.name)) is not None:
            self.workflow.asks(hop, _may_follow(agent))

    async def on_llm_end(self, context: Any, agent: Any, response: Any) -> None:
        # Later requests of this task may belong to another agent, such as one that runs as a tool.
        if (hop := self.hop(agent.name)) is not None:
            self._speakers.over(hop)

    async def on_tool_start(self, context: Any, agent: Any, tool: Any) -> None:
        if (hop := self.hop(agent.name)) is not None:
            self.workflow.asks_after(hop, str(tool.name))

    async def on_handoff(self, context: Any, from_agent: Any, to_agent: Any) -> None:
        if (hop := self.hop(to_agent.name)) is not None:
            self.workflow.follows(hop, from_agent.name)

    async def on_agent_end(self, context: Any, agent: Any, output: Any) -> None:
        if (hop := self.hop(agent.name)) is not None:
            self.workflow.ends(hop.run)


class UpbeatTracingProcessor(TracingProcessor):
    """`add_trace_processor(UpbeatTracingProcessor(client, "team"))`: hints from spans alone, for code that
    cannot be changed.

    Reads handoffs and tools from spans. Use this or the hooks, not both.
    """

    def __init__(self, client: HintClient, workflow: str, *, priority: int = 0, model_id: str | None = None) -> None:
        self.workflow = Workflow(client, workflow, priority=priority, model_id=model_id)
        #: Agent span id to its data, span id to parent id, and trace id to run; open ones only.
        self._agents: dict[str, Any] = {}
        self._parents: dict[str, str | None] = {}
        self._runs: dict[str, str] = {}
        #: By span id of a model call.
        self._speakers = Speakers()

    def on_trace_start(self, trace: Any) -> None:
        run = current_run() or _trace_run(trace)
        if run is not None:
            with self.workflow.lock:
                self._runs[trace.trace_id] = run

    def on_trace_end(self, trace: Any) -> None:
        with self.workflow.lock:
            run = self._runs.pop(trace.trace_id, None)
        if run is not None:
            self.workflow.ends(run)

    def on_span_start(self, span: Any) -> None:
        with self.workflow.lock:
            self._parents[span.span_id] = span.parent_id
            if span.span_data.type == "agent":
                self._agents[span.span_id] = span.span_data
            agent = self._agent_over(span)
            run = self._runs.get(span.trace_id)
        if agent is None or run is None:
            return
        hop = self.workflow.hop(agent.name, run)
        kind = span.span_data.type
        if kind in ("generation", "response"):
            self._speakers.begin(span.span_id, hop)
            self.workflow.asks(hop, agent.handoffs or ())
        elif kind == "function":
            self.workflow.asks_after(hop, str(span.span_data.name))

    def on_span_end(self, span: Any) -> None:
        with self.workflow.lock:
            self._parents.pop(span.span_id, None)
            self._agents.pop(span.span_id, None)
            run = self._runs.get(span.trace_id)
        self._speakers.over(span.span_id)
        to_agent = getattr(span.span_data, "to_agent", None) if span.span_data.type == "handoff" else None
        if to_agent and run is not None:
            self.workflow.follows(self.workflow.hop(to_agent, run), str(span.span_data.from_agent))

    def shutdown(self) -> None:
        self.force_flush()

    def force_flush(self) -> None:
        """Nothing to flush: the client has its own queue."""

    def _agent_over(self, span: Any) -> Any:
        """Data of the innermost agent span that contains this span, or None."""
        at: str | None = span.span_id
        while at is not None and at not in self._agents:
            at = self._parents.get(at)
        return self._agents.get(at) if at is not None else None


def _trace_run(trace: Any) -> str | None:
    """The run of a trace: its group id, else its id; None without a trace."""
    trace_id = getattr(trace, "trace_id", None)
    return str(getattr(trace, "group_id", None) or trace_id) if trace_id and trace_id != _NO_TRACE else None


def _may_follow(agent: Any) -> list[str]:
    """Names of the agents to which this one may hand off."""
    names = []
    for target in getattr(agent, "handoffs", ()):
        if isinstance(target, Handoff):
            names.append(target.agent_name)
        elif isinstance(target, Agent):
            names.append(target.name)
    return names
