"""Fuzzes shared access signatures: `python -m tests.broker.access.fuzz_tokens SECONDS [SEED]`.

A token made with a key is valid with its fields in any order; a token with a changed relevant
field is refused. For any text, the check may only raise `TokenRefused`.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass
from urllib.parse import quote

from postbus.broker.access.authz import (
    Authorizer,
    Grant,
    KeyRule,
    TokenRefused,
    covers,
    resource_path,
)
from postbus.contract.entities import Right
from postbus.contract.shared_access import SAS_PREFIX, sign
from tests.fuzz_bounds import Bounds, program_arguments

NOW_S = 1_700_000_000.0


@dataclass(frozen=True)
class Keys:
    primary: str
    secondary: str | None = None


RULES = (
    KeyRule("root", frozenset(Right), Keys("key+/=", "second")),
    KeyRule("Röle", frozenset({Right.LISTEN}), Keys("k€y")),
    KeyRule("near", frozenset({Right.SEND}), Keys("near"), "Orders"),
    KeyRule("near", frozenset({Right.SEND}), Keys("other"), "orders/eu"),
)
AUTHORIZER = Authorizer(RULES)
PATHS = ["", "orders", "orders/eu", "orders/eu/$deadletterqueue", "a b/ü", "t/subscriptions/s"]
ODD = ["&", "=", "%", "%00", "%zz", "sr=", "se=", "skn=", "sig=", "\0", "é", " ", "+", "/", "-1",
       "1e9", "99999999999999999999", "٣", "\U0001f600", "//", "?", "#", "://", ".."]  # fmt: skip


def made(source: random.Random, rule: KeyRule, path: str, expiry: str) -> dict[str, str]:
    """Return the fields of a token signed as any client does."""
    scheme = source.choice(["sb", "https", "amqps", "SB"])
    uri = f"{scheme}://Host:{source.randint(1, 9)}/{path}" + "/" * source.randrange(2)
    resource = quote(uri, safe="")
    if source.random() < 0.5:
        resource = resource.lower()
    key = source.choice([each for each in (rule.keys.primary, rule.keys.secondary) if each])
    signature = quote(sign(resource, expiry, key), safe="")
    return {"sr": resource, "sig": signature, "se": expiry, "skn": quote(rule.name)}


def joined(source: random.Random, fields: dict[str, str]) -> str:
    names = list(fields)
    source.shuffle(names)
    return SAS_PREFIX + "&".join(f"{name}={fields[name]}" for name in names)


def checked(text: str, audience: str) -> Grant | None:
    try:
        return AUTHORIZER.check_token(text, audience, NOW_S)
    except TokenRefused:
        return None


def check_good(source: random.Random) -> None:
    """Make a token; it must grant the rights of its rule there, and none elsewhere."""
    rule = source.choice(RULES)
    signed, requested = source.choice(PATHS), source.choice(PATHS)
    life_s = source.choice([-10_000, -1, 0, 1, 3_600])
    fields = made(source, rule, signed, str(int(NOW_S) + life_s))
    grant = checked(joined(source, fields), f"sb://h/{quote(requested)}")
    scope = None if rule.scope is None else rule.scope.lower()
    is_in_scope = scope is None or requested == scope or requested.startswith(scope + "/$")
    if life_s > 0 and covers(resource_path("/" + signed), requested) and is_in_scope:
        assert grant is not None, fields
        assert (grant.rights, grant.rule_name, grant.path) == (rule.rights, rule.name, requested)
    else:
        assert grant is None, (fields, requested)


def check_changed(source: random.Random) -> None:
    """Change one field of a good token to something else: it must be refused."""
    rule = source.choice(RULES)
    path = (rule.scope or source.choice(PATHS)).lower()
    fields = made(source, rule, path, str(int(NOW_S) + 3_600))
    name = source.choice(list(fields))
    value = fields[name]
    at = source.randrange(len(value) + 1)
    changed = value[:at] + source.choice([*ODD, "x", "1"]) + value[at + source.randrange(3) :]
    grant = checked(joined(source, fields | {name: changed}), f"sb://h/{quote(path)}")
    if name in ("sr", "se"):
        assert changed.partition("&")[0] == value or grant is None, (fields, name, changed)
    elif grant is not None:  # spelt in another way, such as + for a space
        assert (grant.rule_name, grant.rights) == (rule.name, rule.rights)


def check_noise(source: random.Random) -> None:
    """Concatenate random pieces; the check may only raise a refusal."""
    parts = [source.choice([*ODD, "sr=x&", "sig=y&", "se=1&", "skn=root&", "orders"])
             for _ in range(source.randint(0, 30))]  # fmt: skip
    prefix = source.choice([SAS_PREFIX, "", "sharedaccesssignature ", "Bearer "])
    assert checked(prefix + "".join(parts), "".join(source.sample(ODD, 3))) is None


def fuzz(
    seconds: float, seed: int, max_inputs: int | None = None, bounds: Bounds | None = None
) -> int:
    """Return the number of tried tokens."""
    bounds = bounds or Bounds()
    source = random.Random(seed)
    checks = (check_good, check_changed, check_noise)
    ends_at = time.monotonic() + seconds
    tried = 0
    while time.monotonic() < ends_at and (max_inputs is None or tried < max_inputs):
        try:
            with bounds.step():
                checks[tried % len(checks)](source)
        except BaseException:
            sys.stderr.write(f"seed {seed}, input {tried}\n")
            raise
        tried += 1
    return tried


def main() -> None:
    seconds, seed = program_arguments()
    bounds = Bounds()
    sys.stdout.write(f"{fuzz(seconds, seed, bounds=bounds)} tokens, seed {seed}, {bounds}\n")


if __name__ == "__main__":
    main()
