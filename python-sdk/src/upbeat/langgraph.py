"""LangGraph: the graph says what may follow a node, a callback says which node runs now.

As soon as a node begins, the nodes after it are advised (through conditional edges: all that are possible); as soon as a tool or a
retriever begins, the node that will be told its result is. Nodes that ask no model (a tool node, a router) are looked through, and
once that is known of them they are not advised. A subgraph is one agent: its node. The run is what `upbeat.in_run` says, else the
`thread_id`, else the run's own id.
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
    """What may follow each node of a compiled graph, subgraphs' nodes aside: its edges, conditional ones too."""
    drawn = graph.get_graph()
    found: dict[str, list[str]] = {name: [] for name in drawn.nodes}
    for edge in drawn.edges:
        found.setdefault(edge.source, []).append(edge.target)
    return {name: tuple(dict.fromkeys(targets)) for name, targets in found.items()}


class UpbeatCallbackHandler(BaseCallbackHandler):
    """`graph.invoke(input, config={"callbacks": [UpbeatCallbackHandler(client, graph, "team")]})`. It serves any number of runs at once.

    graph: the compiled graph. Every node is an agent of the workflow, named as the node, until it has run once without asking a
    model. silent: nodes that are known never to ask one. asking: nodes that ask one unseen: neither through LangChain nor through a
    client with `upbeat.event_hooks`.
    """

    #: In the caller's own context, so that its requests can be named; the work is a few microseconds.
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
        #: Nodes that were seen to ask a model.
        self._asked = set(asking)
        #: Chains that run: the run of each, and the node that it is, where it is one.
        self._runs: dict[UUID, str] = {}
        self._nodes: dict[UUID, str] = {}
        #: Whose request is being made or answered, by the node or call.
        self._speakers = Speakers()

    def may_follow(self, node: str) -> tuple[str, ...]:
        """The nodes that may be the next to ask a model after this one."""
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

    def on_chain_error(self, error: BaseException, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any) -> None:
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

    #: A completion model's call says the same.
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

    #: A query that enters retrieval will soon reach generation.
    on_retriever_start = on_tool_start

    def _seen_asking(self, node: str) -> None:
        self._asked.add(node)
        self._silent.discard(node)

    def _next_to_ask(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Of these nodes, and those behind them where they may ask no model: the first that may."""
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
        """The node of the outermost graph in which a callback happens, if it is one of ours."""
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
