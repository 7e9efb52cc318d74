"""Writes a tree of `tests/rules/sql_oracle.py` as one of its many texts in the grammar."""

from __future__ import annotations

import random

from postbus.message.codec import Value
from tests.rules.sql_oracle import Tree

RANK = {"or": 0, "and": 1, "not": 2, "+": 4, "-": 4, "*": 5, "/": 5, "%": 5}
"""Precedence of words and operators: operands of lower precedence need parentheses."""
SIGN_RANK = 6


class Writer:
    """Writes a tree with spaces, parentheses, letters and quotes as its numbers fall."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def gap(self) -> str:
        return self.random.choice(["", "", "", " ", "  ", "\n", "\t ", "\r\n"])

    def space(self) -> str:
        return self.gap() or " "

    def word(self, text: str) -> str:
        style = self.random.choice([str.upper, str.lower, str.title, self.mixed])
        return style(text) if text.isascii() else self.mixed(text)

    def mixed(self, text: str) -> str:
        """Change letters, but none that has no single capital."""
        changed = (self.random.choice([c, c.upper(), c.lower()]) for c in text)
        return "".join(c if len(c) == 1 else "ß" for c in changed)

    def enclosed(self, text: str, is_needed: bool) -> str:
        if is_needed or self.random.random() < 0.15:
            return f"({self.gap()}{text}{self.gap()})"
        return text

    def joined(self, *parts: str) -> str:
        """Put parts side by side, apart where letters or signs would run together."""
        text = parts[0]
        for part in parts[1:]:
            must = is_letter(text[-1]) and is_letter(part[0])
            text += (self.space() if must else self.gap()) + part
        return text

    def name(self, scope: str, name: str) -> str:
        word = self.word(name)
        is_plain = name.isidentifier() and name not in ("and", "null")
        if scope == "sys":
            return f"{self.word('sys')}.{word}"
        form = self.random.randrange(4)
        if form > 1 or not is_plain:
            bracketed = "[" + word.replace("]", "]]") + "]"
            word = bracketed if form % 2 else '"' + word.replace('"', '""') + '"'
        return f"{self.word('user')}.{word}" if self.random.random() < 0.2 else word

    def constant(self, value: Value) -> str:
        if value is None or isinstance(value, bool):
            return self.word({None: "null", True: "true", False: "false"}[value])
        if isinstance(value, str):
            return "'" + value.replace("'", "''") + "'"
        return self.word(repr(value))

    def operand(self, tree: Tree, rank: int = 0) -> str:
        """Write an operand; one of a lower rank than required is put into parentheses."""
        match tree:
            case ("constant", value):
                return self.enclosed(self.constant(value), False)
            case ("name", scope, name):
                return self.enclosed(self.name(scope, name), False)
            case ("property", inner):
                called = self.word(self.random.choice(["property", "p"]))
                return self.joined(called, "(", self.operand(inner), ")")
            case ("newid",):
                return self.joined(self.word("newid"), "(", ")")
            case ("sign", sign, inner):
                return self.enclosed(self.joined(sign, self.operand(inner, SIGN_RANK)), False)
            case ("math", sign, left, right):
                own = RANK[sign]
                text = self.joined(self.operand(left, own), sign, self.operand(right, own + 1))
                return self.enclosed(text, own < rank)
        raise AssertionError(tree)

    def condition(self, tree: Tree, rank: int = 0) -> str:
        match tree:
            case ("and" | "or" as kind, left, right):
                own = RANK[kind]
                parts = self.condition(left, own), self.word(kind), self.condition(right, own)
                return self.enclosed(self.joined(*parts), own < rank)
            case ("not", inner):
                return self.enclosed(
                    self.joined(self.word("not"), self.condition(inner, RANK["not"])), False
                )
            case ("compare", sign, left, right):
                parts = self.operand(left), sign, self.operand(right)
                return self.enclosed(self.joined(*parts), False)
            case ("in", negation, left, items):
                listed = [part for item in items for part in (",", self.operand(item))][1:]
                words = self.words("not in" if negation else "in")
                return self.joined(self.operand(left), *words, "(", *listed, ")")
            case ("like", negation, left, pattern, escape):
                words = self.words("not like" if negation else "like")
                end = [] if escape is None else [self.word("escape"), self.constant(escape)]
                return self.joined(self.operand(left), *words, self.operand(pattern), *end)
            case ("null", negation, (_, scope, name)):
                words = self.words("is not null" if negation else "is null")
                return self.enclosed(self.joined(self.name(scope, name), *words), False)
            case ("exists", (_, scope, name)):
                return self.joined(self.word("exists"), "(", self.name(scope, name), ")")
        raise AssertionError(tree)

    def words(self, text: str) -> list[str]:
        return [self.word(word) for word in text.split()]


def is_letter(character: str) -> bool:
    """Return whether it may continue a name or a number."""
    return character.isalnum() or character in "_."


def written(tree: Tree, seed: int) -> str:
    return Writer(seed).condition(tree)
