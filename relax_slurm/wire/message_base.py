"""What every message of the control protocol shares."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

OpId = Annotated[str, Field(min_length=1, max_length=64)]
Name = Annotated[str, Field(min_length=1, max_length=255)]
Epoch = Annotated[str, Field(pattern=r"^\d{6}-[0-9a-f]{6}$")]
AnyEpoch = Annotated[str, Field(pattern=r"^(\d{6}-[0-9a-f]{6})?$")]


class Message(BaseModel):
    """Strict about types, tolerant of fields of a newer peer."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
