"""LangGraph: a callback that hints the nodes that may follow the running one.

When a node begins, its successors are advised (all targets of conditional edges); when a tool or a retriever begins,
the node that gets its result is. Behind a node that has not been seen to call a model, the next nodes are advised too;
a node that ran without calling one (a tool node, a router) is no longer advised. A subgraph is one agent: its node. The
run is that of `upbeat.in_run`, else the `thread_id`, else the graph run's id.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any
from uuid import UUID

from upbeat.client import HintClient
from upbeat.speaking import Speakers, current_hop, current_run
from upbeat.workflow import Workflow

try:
    from langchain_core.callbacks import BaseCallbackHandler
except ImportError as e:
    raise ImportError("upbeat.langgraph needs LangGraph: pip install langgraph") from e

_ENDS = ("__start__", "__end__")
MAX_OPEN = 10_000


def followers_of(graph: Any) -> dict[str, tuple[str, ...]]:
    """Successors of each node of a compiled graph, by plain and conditional edges; without nodes of subgraphs."""
    drawn = graph.get_graph()
    found: dict[str, list[str]] = {name: [] for name in drawn.nodes}
    for edge in drawn.edges:
        found.setdefault(edge.source, []).append(edge.target)
    return {name: tuple(dict.fromkeys(targets)) for name, targets in found.items()}


class UpbeatCallbackHandler(BaseCallbackHandler):
    """`graph.invoke(input, config={"callbacks": [UpbeatCallbackHandler(client, graph, "team")]})`. Serves any number of
    runs at once.

    graph: the compiled graph. Every node is an agent of that name, until it has run once without calling a model.
    silent: nodes that never call one. asking: nodes that call one neither through LangChain nor through a client with
    `upbeat.event_hooks`.
    """

    #: Run in the caller's context, so that its requests get headers; takes microseconds.
    run_inline = True
    raise_error = False

    def __init__(
        self,
        client: HintClient,
        graph: Any,
        workflow: str,
        *,
        silent: Iterable[str] = (),
        asking: Iterable[str] = (),
        priority: int = 0,
        model_id: str | None = None,
    ) -> None:
        super().__init__()
        self.workflow = Workflow(client, workflow, priority=priority, model_id=model_id)
        self._followers = followers_of(graph)
        self._silent = set(silent)
        #: Nodes that have called a model.
        self._asked = set(asking)
        #: Chains in progress: callback run id to run name, and to node name for chains that are nodes.
        self._runs: dict[UUID, str] = {}
        self._nodes: dict[UUID, str] = {}
        #: By callback run id of a node or a model call.
        self._speakers = Speakers()

    def may_follow(self, node: str) -> tuple[str, ...]:
        """The nodes that may call a model next after this one."""
        return self._next_to_ask(self._followers.get(node, ()))

    def on_chain_start(
        self,
        serialized: Any,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        run = self._run_of(metadata, parent_run_id) or str(run_id)
        self._remember(self._runs, run_id, run)
        node = self._node_of(metadata)
        if node is None or kwargs.get("name") != node:
            return
        self._remember(self._nodes, run_id, node)
        hop = self.workflow.hop(node, run)
        self._speakers.begin(run_id, hop, functools.partial(self._seen_asking, node))
        self.workflow.asks(hop, self.may_follow(node))

    def on_chain_end(self, outputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any) -> None:
        self._ended(run_id, parent_run_id, failed=False)

    def on_chain_error(
        self, error: BaseException, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        self._ended(run_id, parent_run_id, failed=True)

    def on_chat_model_start(
        self,
        serialized: Any,
        messages: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        node, run = self._node_of(metadata), self._run_of(metadata, parent_run_id)
        if node is not None and run is not None:
            self._seen_asking(node)
            hop = self.workflow.hop(node, run)
            if current_hop() != hop:
                self._speakers.begin(run_id, hop)
            self.workflow.asks(hop)

    #: Completion models have the same arguments.
    on_llm_start = on_chat_model_start

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._speakers.over(run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._speakers.over(run_id)

    def on_tool_start(
        self,
        serialized: Any,
        input_str: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        node, run = self._node_of(metadata), self._run_of(metadata, parent_run_id)
        if node is not None and run is not None:
            step = str((serialized or {}).get("name") or kwargs.get("name") or "step")
            for name in self._next_to_ask((node,)):
                self.workflow.asks_after(self.workflow.hop(name, run), step)

    #: Generation follows a retrieval.
    on_retriever_start = on_tool_start

    def _seen_asking(self, node: str) -> None:
        self._asked.add(node)
        self._silent.discard(node)

    def _next_to_ask(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Breadth-first from `nodes`: nodes that may call a model, continuing past those not seen to do so."""
        found: dict[str, None] = {}
        seen, waiting = set(_ENDS), list(nodes)
        while waiting:
            name = waiting.pop(0)
            if name in seen:
                continue
            seen.add(name)
            if name not in self._silent:
                found[name] = None
            if name not in self._asked:
                waiting += self._followers.get(name, ())
        return tuple(found)

    def _node_of(self, metadata: dict[str, Any] | None) -> str | None:
        """The node of the outermost graph that a callback belongs to, if it is in our graph."""
        said = metadata or {}
        outermost = str(said.get("langgraph_checkpoint_ns") or "").partition("|")[0].partition(":")[0]
        node = outermost or said.get("langgraph_node")
        return node if node in self._followers else None

    def _run_of(self, metadata: dict[str, Any] | None, parent_run_id: UUID | None) -> str | None:
        said = current_run() or (metadata or {}).get("thread_id")
        if said:
            return str(said)
        return self._runs.get(parent_run_id) if parent_run_id is not None else None

    def _ended(self, run_id: UUID, parent_run_id: UUID | None, failed: bool) -> None:
        with self.workflow.lock:
            node = self._nodes.pop(run_id, None)
            run = self._runs.pop(run_id, None)
        self._speakers.over(run_id)
        if node is not None and node not in self._asked and not failed:
            self._silent.add(node)
        if run is not None and parent_run_id is None:
            self.workflow.ends(run)

    def _remember(self, table: dict[UUID, str], key: UUID, value: str) -> None:
        with self.workflow.lock:
            table[key] = value
            if len(table) > MAX_OPEN:
                del table[next(iter(table))]
