"""The schema of `POST /v1/fine_tuning/jobs`, in OpenAI's format. Strict: no value is coerced; unknown fields, and those
that this server does not have, are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from contracts.errors import InvalidRequest
from contracts.finetune import Settings
from gateway.openai.parameters import validate
from gateway.openai.tools import STRICT

#: What `auto` stands for, and the learning rate of a multiplier of 1.
EPOCHS, BATCH_SIZE, LEARNING_RATE = 3, 8, 1e-4
#: Characters of a suffix at most: the model's name has part of the job's id behind it.
MOST_SUFFIX = 40
_AUTO = Literal["auto"]
_Text = Annotated[str, Field(min_length=1, max_length=512)]
_FileId = Annotated[str, Field(min_length=1, max_length=128)]


class Hyperparameters(BaseModel):
    """Of supervised training."""

    model_config = STRICT
    n_epochs: Annotated[int, Field(ge=1, le=50)] | _AUTO | None = None
    batch_size: Annotated[int, Field(ge=1, le=256)] | _AUTO | None = None
    #: Of a learning rate of `LEARNING_RATE`.
    learning_rate_multiplier: Annotated[float, Field(gt=0, le=100)] | _AUTO | None = None


class Supervised(BaseModel):
    """`method.supervised`."""

    model_config = STRICT
    hyperparameters: Hyperparameters | None = None


class Method(BaseModel):
    """How to train."""

    model_config = STRICT
    type: Literal["supervised"]
    supervised: Supervised | None = None


class JobRequest(BaseModel):
    """The body."""

    model_config = STRICT
    model: _Text
    training_file: _FileId
    validation_file: _FileId | None = None
    method: Method | None = None
    #: The former place of those in `method.supervised`.
    hyperparameters: Hyperparameters | None = None
    seed: Annotated[int, Field(ge=0, le=(1 << 31) - 1)] | None = None
    suffix: Annotated[str, Field(pattern=rf"^[A-Za-z0-9][A-Za-z0-9._-]{{0,{MOST_SUFFIX - 1}}}$")] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None


def job_request(data: Any) -> JobRequest:
    """The request in a decoded body. Raises InvalidRequest naming the first field that is wrong."""
    found = validate(JobRequest, data, {"integrations": ([],)}, ())
    if found.method is not None and found.method.supervised is not None and found.hyperparameters is not None:
        raise InvalidRequest(
            "hyperparameters stand in method.supervised.hyperparameters already; give them there only",
            param="hyperparameters",
        )
    return found


def settings_of(asked: JobRequest, seed: int) -> Settings:
    """The job's settings. seed: if none was asked for."""
    supervised = asked.method.supervised if asked.method is not None else None
    told = (supervised.hyperparameters if supervised is not None else asked.hyperparameters) or Hyperparameters()
    return Settings(
        epochs=EPOCHS if told.n_epochs in (None, "auto") else told.n_epochs,  # type: ignore[arg-type]
        batch_size=BATCH_SIZE if told.batch_size in (None, "auto") else told.batch_size,  # type: ignore[arg-type]
        learning_rate=LEARNING_RATE * _number(told.learning_rate_multiplier),
        seed=seed if asked.seed is None else asked.seed,
    )


def _number(multiplier: float | str | None) -> float:
    return multiplier if isinstance(multiplier, float) else float(multiplier) if isinstance(multiplier, int) else 1.0
