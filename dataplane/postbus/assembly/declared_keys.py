"""Keys of the authorization rules that manifests declare: those of Secrets, and generated ones.

The assembly takes the rules for the authorizer from here. A Secret among the manifests gives a rule
its keys; for a rule without one, keys are generated once and kept in the data directory.
"""

from __future__ import annotations

import asyncio

from postbus.broker.access.authorization_rules import Keys
from postbus.broker.access.authz import KeyRule
from postbus.contract.entities import PUBLIC_KEY
from postbus.manifests.reader import BusDefinition, RuleDefinition, RuleKeys
from postbus.process.data_directory import DataDirectory
from postbus.process.settings import SettingsError, is_loopback


def refuse_public_keys(host: str, definition: BusDefinition) -> None:
    """Raise `SettingsError` for the emulator's public key on an address that others reach."""
    if is_loopback(host):
        return
    of_queues = (rule for queue in definition.queues for rule in queue.rules)
    of_topics = (rule for topic in definition.topics for rule in topic.rules)
    for rule in (*definition.rules, *of_queues, *of_topics):
        if rule.keys is not None and PUBLIC_KEY in (rule.keys.primary, rule.keys.secondary):
            raise SettingsError(
                f"host is {host}, but the key of the rule {rule.name} is the public {PUBLIC_KEY}:"
                " put another into its Secret (`openssl rand -base64 32` generates one), or listen"
                " on loopback"
            )


class DeclaredKeys:
    """The declared rules of one bus with their keys."""

    def __init__(self, definition: BusDefinition, data: DataDirectory) -> None:
        self.definition = definition
        self._data = data

    def rules(self) -> list[KeyRule]:
        """Return every rule of the bus, its queues and topics; raises `DataDirectoryError`."""
        return [
            KeyRule(rule.name, rule.rights, self.keys_of(scope, rule), scope)
            for scope, rule in self._declared()
        ]

    def keys_of(self, scope: str | None, rule: RuleDefinition) -> RuleKeys:
        """Return the keys of a rule of a queue or topic, None for the namespace's."""
        return rule.keys or self._data.keys_of(self._path(scope, rule.name))

    async def keep(self, rule: KeyRule, keys: Keys) -> bool:
        """Replace generated keys; return False for a rule with keys of a Secret."""
        declared = next(
            one for scope, one in self._declared() if (scope, one.name) == (rule.scope, rule.name)
        )
        if declared.keys is not None:
            return False
        path = self._path(rule.scope, rule.name)
        await asyncio.to_thread(self._data.keep_keys, path, keys.primary, keys.secondary)
        return True

    def _path(self, scope: str | None, rule_name: str) -> str:
        return "/".join([self.definition.name, *([scope] if scope else []), rule_name])

    def _declared(self) -> list[tuple[str | None, RuleDefinition]]:
        return [
            *((None, rule) for rule in self.definition.rules),
            *((queue.name, rule) for queue in self.definition.queues for rule in queue.rules),
            *((topic.name, rule) for topic in self.definition.topics for rule in topic.rules),
        ]
