"""Recipes by name: settings for a named data set that reach a goal. What the user gave is never changed.

A recipe lists settings of the run, options of the method and parts of views (strong.blur), as `pretrain` takes them.
benchmarks/recipes.py tries others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from mixnn import methods
from mixnn.config import Config, UserError, fields_of, setting
from mixnn.training.folder_settings import RECIPE, Choice

Recipe = Mapping[str, Any]
AUTO = "auto"

# Direction 1>2 alone costs half a step and has the better targets, of weak views. Crops of 3/4 of the side cost 56% and
# show objects at about the size that whole images show them. Blur destroys much of an image of 32 pixels. Targets that
# show at least half of the image, a teacher that follows faster, and Muon each learned more in the same time. Compared
# on held-out training images (notes/log.md).
_SHORT: Recipe = {
    "symmetric": False,
    "resolution": "75%:0.9",
    "batch_size": 512,
    "bn_groups": 16,
    "strong.blur": 0.0,
    "weak.area": (0.5, 1.0),
    "weak_flip": 0.5,
    "momentum": 0.95,
    "momentum_end": 1.0,
    "optimizer": "muon",
    "lr": 0.009,
    "warmup_epochs": 10,
}
RECIPES: dict[str, Recipe] = {
    "paper": {},
    "fast": {"epochs": 200, **_SHORT},
    "best": {"epochs": 480, **_SHORT},
}


def recipe_choices(name: str, method: str, options: Mapping[str, Any], given: Collection[str]) -> list[Choice]:
    """The settings of a recipe that this method has, except those that are given or that the method decides.

    `options` are those of the method that the user gave; `given` has the names of all that the user gave.
    """
    cls, recipe = methods.find(method), RECIPES["paper" if name == AUTO else name]
    if "optimizer" in given:  # another one needs other rates
        given = {*given, "lr", "weight_decay"}
    known = (fields_of(Config).keys() - cls.recipe.keys()) | {field.name for field in fields(cls.Options)}
    views = methods.views_of(method, methods.resolve_options(method, recipe, options)) if recipe else ()
    return [
        Choice(key, value, f"{RECIPE} {name}")
        for key, value in recipe.items()
        if key not in given and (key in known or key.partition(".")[0] in views)
    ]


def refuse_recipe(name: str, data: str) -> None:
    """UserError if a recipe was asked for where settings are chosen from the images."""
    if name != AUTO:
        raise UserError(
            f"{setting('recipe', name)} is for named data sets, and the settings for {data} are chosen from its "
            "images: leave it out"
        )
