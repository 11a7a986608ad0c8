"""Hooks for code without a framework: generation follows a retrieval or a tool (SYMPHONY, section 3.1).

`retriever` and `tool` are decorators, for plain and `async` functions, and blocks (`with`, `async with`). They hint on
entry, with the step's usual duration. An exception in a retriever ends the turn, so it withdraws the hint; one in a
tool does not, because the model gets the error.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar

from upbeat.client import HintClient
from upbeat.pace import Pace
from upbeat.speaking import current_session

F = TypeVar("F", bound=Callable[..., Any])
SessionOf = str | Callable[..., str | None] | None


class Step:
    """One kind of step before a request. Any number of its calls may run at once."""

    def __init__(
        self,
        client: HintClient,
        session: SessionOf,
        withdraw_on_error: bool,
        hint: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._session, self._withdraw, self._hint_arguments, self._clock = (
            client,
            session,
            withdraw_on_error,
            hint,
            clock,
        )
        self._pace = Pace()
        self._entered: ContextVar[tuple[_Call, ...]] = ContextVar("upbeat_step", default=())

    def __call__(self, function: F) -> F:
        """Wrap `function` to hint on each call (a generator: when its first item is requested)."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with _Call(self, args, kwargs):
                    return await function(*args, **kwargs)

            return awaited  # type: ignore[return-value]

        if inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def streamed(*args: Any, **kwargs: Any) -> Any:
                with _Call(self, args, kwargs):
                    async for item in function(*args, **kwargs):
                        yield item

            return streamed  # type: ignore[return-value]

        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def generated(*args: Any, **kwargs: Any) -> Any:
                with _Call(self, args, kwargs):
                    return (yield from function(*args, **kwargs))

            return generated  # type: ignore[return-value]

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with _Call(self, args, kwargs):
                return function(*args, **kwargs)

        return called  # type: ignore[return-value]

    def __enter__(self) -> None:
        call = _Call(self, (), {})
        self._entered.set((*self._entered.get(), call))
        call.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        *outer, call = self._entered.get()
        self._entered.set(tuple(outer))
        call.__exit__(kind, error, trace)

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def session_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """The session whose request follows this call; None if unknown, or if `session` raises (then counted)."""
        try:
            return self._session(*args, **kwargs) if callable(self._session) else self._session or current_session()
        except Exception as e:
            self._client.invalid("session", f"session could not be told from the arguments: {type(e).__name__}: {e}")
            return None


class _Call:
    """One call of a step."""

    def __init__(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._step, self._session_id, self._since_s = step, step.session_of(args, kwargs), 0.0

    def __enter__(self) -> None:
        step = self._step
        self._since_s = step._clock()
        if self._session_id is not None:
            step._client.advise(
                self._session_id, **{"expected_arrival": step._pace.expected_s(()), **step._hint_arguments}
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        step = self._step
        if kind is None:
            step._pace.note((), step._clock() - self._since_s)
        elif step._withdraw and self._session_id is not None and not issubclass(kind, GeneratorExit):
            step._client.invalidate(self._session_id)


def retriever(client: HintClient, session: SessionOf = None, *, model_id: str | None = None, priority: int = 0) -> Step:
    """A step whose result the request uses. An exception in it withdraws the hint.

    session: the id, a function of the step's arguments that returns it, or None for the enclosing session
    (`client.session`, `speaking_as`, a LangGraph node).
    """
    return Step(client, session, True, {"model_id": model_id, "priority": priority})


def tool(client: HintClient, session: SessionOf = None, *, model_id: str | None = None, priority: int = 0) -> Step:
    """A step whose result, or error, goes to the model. Arguments as for `retriever`."""
    return Step(client, session, False, {"model_id": model_id, "priority": priority})
