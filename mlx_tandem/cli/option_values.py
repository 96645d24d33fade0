"""Reads the values of options that hold names with paths, several words, aliases or A/B tests."""

from __future__ import annotations

import json

import typer


def split_pairs(values: list[str] | None) -> list[tuple[str, str]]:
    """Return the (name, path) pairs of `--adapter`."""
    pairs = []
    for value in values or []:
        name, equals, path = value.partition("=")
        if not equals or not name or not path:
            raise typer.BadParameter(f"'{value}' is not a name and a path", param_hint="--adapter")
        pairs.append((name, path))
    return pairs


def split_words(values: list[str] | None) -> list[str]:
    """Return the words of all `values`. One value may hold several, separated by commas or as a JSON list."""
    return [word for value in values or [] for word in _parted(value) if word]


def _parted(value: str) -> list[str]:
    try:
        found = json.loads(value) if value.startswith("[") else None
    except ValueError:
        found = None
    if isinstance(found, list) and all(isinstance(word, str) for word in found):
        return found
    return value.split(",")


def split_arms(values: list[str] | None) -> list[tuple[str, dict[str, float]]]:
    """Return the aliases of `--alias` with the weight of each adapter; an arm without a weight has 1."""
    aliases = []
    for value in values or []:
        name, equals, arms = value.partition("=")
        shares: dict[str, float] = {}
        for arm in arms.split(","):
            adapter, colon, weight = arm.partition(":")
            try:
                share = float(weight) if colon else 1.0
            except ValueError:
                share = -1.0
            if not (equals and name and adapter) or share < 0 or adapter in shares:
                raise typer.BadParameter(f"'{value}' is not NAME=ADAPTER:WEIGHT,ADAPTER:WEIGHT", param_hint="--alias")
            shares[adapter] = share
        aliases.append((name, shares))
    return aliases


def split_controls(values: list[str] | None) -> list[tuple[str, dict[str, str]]]:
    """Return the A/B tests of `--ab-test` by their aliases."""
    tests = []
    for value in values or []:
        name, _, control = value.partition("=")
        if not (name and control):
            raise typer.BadParameter(f"'{value}' is not NAME=CONTROL", param_hint="--ab-test")
        tests.append((name, {"control": control}))
    return tests
