"""The status of a queue, topic or subscription, computed whole from one look and the former one.

Pure. What a look has not found out stays as it was; counts stay until they mean something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from postbus.contract.control import (
    CountDetails,
    EntityFacts,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)
from postbus.contract.control_counts import EntityCounts
from postbus_operator.annotations import RECREATE_REQUESTED_AT
from postbus_operator.bus.count_changes import has_moved, numbers_in, numbers_of
from postbus_operator.conditions import Conditions, ConditionStatus, timestamp
from postbus_operator.crds import KINDS
from postbus_operator.entities.idle import policy_of
from postbus_operator.objects import Resource
from postbus_operator.status import EntityStatus

NO_MESSAGES: Final = CountDetails(
    active_message_count=0,
    dead_letter_message_count=0,
    scheduled_message_count=0,
    transfer_message_count=0,
    transfer_dead_letter_message_count=0,
)
_COUNTS: Final = ("countDetails", "messageCount", "sizeInBytes", "subscriptionCount", "ruleCount")
_MODELS: Final = {kind.name: kind.status for kind in KINDS}


class StatusDraft:
    """The status in the making: begin with the former one, note what is found, `finish`."""

    def __init__(self, resource: Resource, now: datetime) -> None:
        self._resource = resource
        self._model = _MODELS[resource.key.kind]
        names = {field.alias or name for name, field in self._model.model_fields.items()}
        self._fields: dict[str, Any] = {
            name: value for name, value in resource.status.items() if name in names
        }
        self._former = {each["type"]: each for each in resource.status.get("conditions", ())}
        self._conditions = Conditions(tuple(self._former.values()), resource.generation, now)

    # --- conditions -----------------------------------------------------------------------------

    def set(self, type: str, status: ConditionStatus, reason: str, message: str) -> None:
        """Set a condition; the last one of a type counts."""
        self._conditions.set(type, status, reason, message)

    def keep(self, *types: str) -> None:
        """Set conditions as they were, for this generation; those that were not set are unknown."""
        for type in types:
            former = self._former.get(type)
            if former is None:
                self.set(type, "Unknown", "Unknown", "not looked at yet")
            else:
                self.set(type, former["status"], former["reason"], former["message"])

    def keep_shown(self, type: str) -> None:
        """Set a condition as it was, if it was."""
        if type in self._former:
            self.keep(type)

    def keep_all(self) -> None:
        """Set all former conditions again."""
        self.keep(*self._former)

    def was(self, type: str) -> ConditionStatus | None:
        """Return the former status of a condition."""
        former = self._former.get(type)
        return None if former is None else former["status"]

    # --- fields ---------------------------------------------------------------------------------

    def forget_entity(self) -> None:
        """Drop everything about an entity: there is none, or that of another bus."""
        kept = ("binding", "observedSecretVersion", "recreateRequestedAt", "ownerUid")
        self._fields = {name: self._fields[name] for name in kept if name in self._fields}

    def note_gone(self) -> None:
        """Drop what is only true of an entity that exists; the rest tells which one is gone."""
        for name in (*_COUNTS, "status"):
            self._fields.pop(name, None)

    def note_owner(self, uid: str) -> None:
        """Note the owner; a status under another one says nothing about this one."""
        if self._fields.get("ownerUid") not in (None, uid):
            self.forget_entity()
        self._fields["ownerUid"] = uid

    def note_entity(self, entity_id: int, applied_hash: str) -> None:
        """Note the incarnation and the hash that the bus answered; a new one has no messages."""
        if self._fields.get("entityId") not in (None, str(entity_id)):
            self.forget_entity()
        self._fields |= {"entityId": str(entity_id), "appliedHash": applied_hash}

    def needs_facts(self, entity_id: int, applied_hash: str) -> bool:
        """Return whether the entity has to be asked for what the feed does not say."""
        return (
            self._fields.get("createdAt") is None
            or self._fields.get("entityId") != str(entity_id)
            or self._fields.get("appliedHash") != applied_hash
        )

    def note_facts(self, facts: EntityFacts) -> None:
        """Note what the bus says of the entity."""
        assert isinstance(facts, QueueDescription | TopicDescription | SubscriptionDescription)
        self._note(
            createdAt=timestamp(facts.created_at),
            updatedAt=timestamp(facts.updated_at),
            status=facts.properties.status.value,
            partitioned=facts.is_partitioned,
        )
        if isinstance(facts, SubscriptionDescription):
            self._note(ruleCount=len(facts.properties.rules or ()))

    def note_counts(self, counts: EntityCounts) -> None:
        """Note counts if they mean something else than those shown."""
        found = numbers_in(counts)
        if not has_moved(self._shown_numbers(), found) or counts.count_details is None:
            return
        self._note_messages(counts.count_details, counts.size_in_bytes, counts.accessed_at)

    def note_no_messages(self) -> None:
        """Note the counts of an entity that was just made."""
        self._note_messages(NO_MESSAGES, 0, None)

    def note_subscriptions(self, count: int) -> None:
        """Note the number of subscriptions of a topic."""
        self._note(subscriptionCount=count)

    def note_keys(self, binding: Any, secret_version: str | None) -> None:
        """Note what is shown of keys."""
        self._fields |= {"binding": binding, "observedSecretVersion": secret_version}

    def finish(self) -> EntityStatus:
        """Return the complete status."""
        annotations: Mapping[str, str] = self._resource.annotations
        self._note(
            onAutoDelete=policy_of(self._resource),
            recreateRequestedAt=annotations.get(RECREATE_REQUESTED_AT),
        )
        fields = {name: value for name, value in self._fields.items() if value is not None}
        made = self._model.model_validate(
            {
                **fields,
                "observedGeneration": self._resource.generation,
                "conditions": self._conditions.all(),
            }
        )
        assert isinstance(made, EntityStatus)
        return made

    def _note(self, **fields: Any) -> None:
        names = {field.alias or name for name, field in self._model.model_fields.items()}
        self._fields |= {name: value for name, value in fields.items() if name in names}

    def _note_messages(
        self, details: CountDetails, size_bytes: int | None, accessed_at: datetime | None
    ) -> None:
        shown = details.model_dump(by_alias=True)
        self._note(countDetails=shown, messageCount=sum(shown.values()), sizeInBytes=size_bytes)
        if accessed_at is not None:
            self._note(accessedAt=timestamp(accessed_at))

    def _shown_numbers(self) -> tuple[int, ...] | None:
        shown = self._fields.get("countDetails")
        if shown is None:
            return None
        return numbers_of(CountDetails.model_validate(shown), self._fields.get("sizeInBytes"))
