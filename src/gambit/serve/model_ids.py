"""The model ids of a server: its model by itself, and one id more for each search method."""

from __future__ import annotations

from dataclasses import dataclass

from gambit.config import registry
from gambit.search.choice import GROUP
from gambit.serve.errors import ApiError


@dataclass(frozen=True, slots=True)
class ModelIds:
    """`M` searches as the server was told to, `M:sc` by self-consistency, `M:single` takes one plain sample."""

    names: tuple[str, ...]
    policies: tuple[str, ...]
    created: int

    @classmethod
    def of(cls, names: tuple[str, ...], created: int) -> ModelIds:
        return cls(names, tuple(registry.names(GROUP)), created)

    @property
    def ids(self) -> list[str]:
        return [*self.names, *(f"{name}:{policy}" for name in self.names for policy in self.policies)]

    def policy_of(self, model: str) -> str | None:
        """The search method that an id names; None: the server's own."""
        if model in self.names:
            return None
        name, _, policy = model.rpartition(":")
        if name in self.names and policy in self.policies:
            return policy
        raise ApiError(
            404,
            f"the model {model[:200]!r} does not exist: this server has {', '.join(self.ids)}",
            param="model",
            code="model_not_found",
        )

    def to_json(self) -> dict[str, object]:
        return {"object": "list", "data": [self.card(model) for model in self.ids]}

    def card(self, model: str) -> dict[str, object]:
        policy = self.policy_of(model)
        return {"id": model, "object": "model", "created": self.created, "owned_by": "gambit", "policy": policy}
