"""Which public data sets a recipe learns, and how often each is read at the weights of an experiment."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from laneformer.config_json import nearest

# Repeating beyond this is worth little (arXiv 2305.16264).
MOST_EPOCHS = 4.0


@dataclass(frozen=True)
class DataSet:
    """A public data set: where it is, what may be done with it, and how much of it there is."""

    name: str
    id: str
    config: str
    split: str
    text: str
    licence: str
    what: str
    tokens: float
    source: str


@dataclass(frozen=True)
class Share:
    """What a run reads of a data set: its mean weight, tokens, and how often the set is gone through."""

    data: DataSet
    weight: float
    tokens: float

    @property
    def epochs(self) -> float:
        """Times that the whole set is read."""
        return self.tokens / self.data.tokens

    @property
    def repeats_too_often(self) -> bool:
        """Whether more repeating than `MOST_EPOCHS` is planned."""
        # Half a per cent is what a source's token count is not known to.
        return self.epochs > 1.005 * MOST_EPOCHS


def read_recipe(name: str = "2b") -> dict[str, DataSet]:
    """The data sets of conf/recipe/`name`.yaml by name; raises ValueError for a set that is not fully described."""
    # Only planning reads yaml outside of a training run, and needs the train extra as that does.
    from omegaconf import OmegaConf

    text = files("laneformer.conf").joinpath("recipe", f"{name}.yaml").read_text(encoding="utf-8")
    document: Any = OmegaConf.to_container(OmegaConf.create(text))
    expected = {field.name for field in dataclasses.fields(DataSet)} - {"name"}
    found = {}
    for key, facts in document["sets"].items():
        if set(facts) != expected:
            wrong = ", ".join(sorted(expected ^ set(facts)))
            raise ValueError(f"conf/recipe/{name}.yaml: {key} lacks or has too much: {wrong}")
        found[key] = DataSet(name=key, **{**facts, "tokens": float(facts["tokens"])})
    return found


def shares(
    recipe: Mapping[str, DataSet], phases: Iterable[tuple[float, Mapping[str, float]]], tokens: float
) -> list[Share]:
    """What a run of `tokens` reads of each set, largest first; `phases` are (end as a share of the run, weights).

    Raises ValueError for a source that the recipe does not describe, naming the nearest.
    """
    weights: dict[str, float] = {}
    begin = 0.0
    for until, mixture in phases:
        total = sum(mixture.values())
        for name, weight in mixture.items():
            if name not in recipe:
                raise ValueError(f"the recipe has no data set {name!r}{nearest(name, list(recipe))}")
            weights[name] = weights.get(name, 0.0) + (until - begin) * weight / total
        begin = until
    found = [Share(recipe[name], weight, weight * tokens) for name, weight in weights.items()]
    return sorted(found, key=lambda share: -share.weight)


def too_often(found: Sequence[Share]) -> list[str]:
    """One line for each set that is repeated too often."""
    return [
        f"{share.data.name} is read {share.epochs:.1f} times, more than {MOST_EPOCHS:g} is worth little; lower its "
        f"weight of {share.weight:.1%}"
        for share in found
        if share.repeats_too_often
    ]
