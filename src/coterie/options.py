"""The base of everything a user can set: frozen, validated, unknown keys refused, every field described."""

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """Subclasses are one table of the configuration file each; a field's description is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
