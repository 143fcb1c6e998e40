"""The base of everything a user can set: frozen, validated, unknown keys refused, every field described."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Options(BaseModel):
    """Subclasses are one table of the configuration file each; a field's description is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _tuples_as_lists(cls, values: Any) -> Any:
        """What Python writes as a tuple is a list in a file."""
        if not isinstance(values, dict):
            return values
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
