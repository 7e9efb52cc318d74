"""Reconciler of queues, topics and subscriptions: looks at one of them and does the next steps.

Decisions are made by `entity_plan`, `release` and `idle`; here they meet the bus.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from postbus.client.control import RequestRefused
from postbus.contract.control import Applied, DeletionPolicy, EntityFacts, ProblemType
from postbus_operator.bus.marks import mark_of, read_mark
from postbus_operator.bus.refusals import has_moved_on, spec_invalid
from postbus_operator.bus.session import BusSession
from postbus_operator.bus.synced_keys import KeysResult
from postbus_operator.context import Context
from postbus_operator.entities.definitions import differences, path_of, targets_of
from postbus_operator.entities.inputs import inputs_of, is_current
from postbus_operator.entities.memory import memory_of
from postbus_operator.entities.owners import NoOwner, Owner, owner_of
from postbus_operator.entities.plan import (
    Adopt,
    Idle,
    Nothing,
    Observe,
    Put,
    Refuse,
    Restore,
    Sight,
    Step,
    plan,
)
from postbus_operator.entities.releasing import release_entity
from postbus_operator.entities.status import StatusDraft
from postbus_operator.finalizers import is_held, is_left
from postbus_operator.keys.leaving import leave_secrets
from postbus_operator.keys.sync import keys_of_subscription, sync_keys
from postbus_operator.objects import Resource
from postbus_operator.outcome import BackendUnavailable, Event, Outcome, SpecInvalid

STEPS: Final = 6
"""Steps of one look; each may find that somebody else was faster."""

PARTIAL_RETRY_S: Final = 2.0
WAITING_RETRY_S: Final = 30.0
"""Looks without an event at what waits for another resource; it is woken by that one."""


async def reconcile_entity(context: Context, resource: Resource) -> Outcome:
    """Look once at a Queue, Topic or Subscription."""
    if is_left(resource):
        await leave_secrets(context, resource)
    if resource.is_deleting:
        return await release_entity(context, resource)
    draft = StatusDraft(resource, context.now())
    if resource.is_paused:
        draft.keep_all()
        draft.set("Ready", draft.was("Ready") or "Unknown", "Paused", "the resource is paused")
        draft.set("Reconciling", "False", "Paused", "")
        return _outcome(resource, draft)
    owner = owner_of(resource, context.cache.get, context.cache.labels_of_namespace)
    if isinstance(owner, NoOwner):
        return _waiting(resource, draft, owner)
    draft.set("OwnerResolved", "True", "Resolved", f"belongs to {owner.direct.key}")
    session = await context.buses.of(owner.bus)
    if session is None or session.trouble is not None:
        raise context.buses.failure_of(owner.bus)
    winner = _winner(session, owner, _claims(context, resource))
    if winner.key != resource.key:
        text = f"{winner.key} has the entity: set another entityName, or delete one"
        return _taken(resource, draft, text)
    return await _Look(context, resource, owner, session, draft).run()


def _winner(session: BusSession, owner: Owner, claims: Sequence[Resource]) -> Resource:
    """Return the claim that has the entity on the bus; if none has it, the oldest one.

    An older one may be admitted later: the entity stays with the resource whose mark it has.
    """
    topic = owner.direct.entity_name if claims[0].key.kind == "Subscription" else ""
    live = session.view.find(path_of(claims[0], topic).name)
    mark = None if live is None else live.mark
    return min(claims, key=lambda each: (mark_of(each) != mark, each.created_at, each.uid))


def _claims(context: Context, resource: Resource) -> list[Resource]:
    """Return the resources that stand for the same entity and that the bus admits."""
    cache = context.cache
    return [
        each
        for each in cache.claimants(resource)
        if isinstance(owner_of(each, cache.get, cache.labels_of_namespace), Owner)
    ]


# --- outcomes -----------------------------------------------------------------------------------


def _outcome(
    resource: Resource,
    draft: StatusDraft,
    *events: Event,
    retry_s: float | None = None,
    delete_resource: bool = False,
) -> Outcome:
    return Outcome(
        draft.finish(),
        has_finalizer=is_held(resource),
        delete_resource=delete_resource,
        retry_s=retry_s,
        events=events,
    )


def _waiting(resource: Resource, draft: StatusDraft, owner: NoOwner) -> Outcome:
    draft.set("OwnerResolved", "False", owner.reason, owner.message)
    draft.set("Ready", "False", "OwnerNotReady", owner.message)
    draft.set("Reconciling", "True", "WaitingForOwner", owner.message)
    draft.set("Programmed", "Unknown", "Unknown", "there is no bus to look at")
    draft.keep("Valid", "ForwardTargetsResolved")
    draft.keep_shown("SecretsSynced")
    return _outcome(resource, draft, retry_s=WAITING_RETRY_S)


def _taken(resource: Resource, draft: StatusDraft, text: str) -> Outcome:
    draft.forget_entity()
    draft.set("Ready", "False", "OwnedByOther", text)
    draft.set("Programmed", "False", "Unknown", text)
    draft.keep("Valid", "ForwardTargetsResolved")
    return _outcome(resource, draft)


class _Look:
    """One look at a resource whose bus answers."""

    def __init__(
        self,
        context: Context,
        resource: Resource,
        owner: Owner,
        session: BusSession,
        draft: StatusDraft,
    ) -> None:
        topic = owner.direct.entity_name if resource.key.kind == "Subscription" else ""
        self._context = context
        self._resource = resource
        self._owner = owner
        self._session = session
        self._draft = draft
        self._path = path_of(resource, topic)
        self._mark = mark_of(resource)
        self._memory = memory_of(resource, owner.direct.uid)
        self._events: list[Event] = []
        self._restored: Applied | None = None
        self._is_new = False
        self._facts: EntityFacts | None = None
        self._inputs = inputs_of(context.cache, session, resource, owner)
        self._is_lost = False  # nothing that a deletion has left can be restored
        self._left_out: frozenset[str] = frozenset()
        """Forwarding fields that the last put had not, even if their target exists by now."""

    async def run(self) -> Outcome:
        """Do steps until nothing is left to do, or something must be waited for."""
        if self._resource.key.kind == "Subscription" and not self._has_topic():
            return self._wait_for_topic()
        self._draft.note_owner(self._owner.direct.uid)
        try:
            for _ in range(STEPS):
                done = await self._do(plan(self._sight()))
                if done is not None:
                    return done
        except SpecInvalid as error:
            return self._invalid(error)
        raise BackendUnavailable("the entity is being changed by somebody else; trying again")

    def _sight(self) -> Sight:
        view, live = self._session.view, self._session.view.find(self._path.name)
        stones = view.tombstones(self._path)
        if self._is_lost:
            stones = [each._replace(restorable_until=None) for each in stones]
        return Sight(
            self._resource,
            self._path,
            self._memory,
            live,
            stones,
            self._missing(),
            self._is_claimed,
        )

    def _missing(self) -> frozenset[str]:
        """Return the forwarding fields whose target does not exist."""
        found = {
            name: self._session.view.find(target)
            for name, target in targets_of(self._resource).items()
        }
        own = self._path.name.lower()
        return frozenset(
            name
            for name, live in found.items()
            if (live is None or live.kind == "subscription")
            and targets_of(self._resource)[name].lower() != own
        )

    def _is_claimed(self, text: str) -> bool:
        """Return whether the resource that a mark names exists."""
        mark = read_mark(text)
        found = None if mark is None else self._context.cache.get(mark.key)
        return found is not None and mark is not None and found.uid == mark.uid

    def _has_topic(self) -> bool:
        topic = self._owner.direct
        live = self._session.view.find(topic.entity_name)
        if live is None or live.kind != "topic":
            return False
        is_observed = (topic.spec.get("operatorSpec") or {}).get("reconcilePolicy") == "Observe"
        return is_observed or live.mark == mark_of(topic)

    # --- steps ----------------------------------------------------------------------------------

    async def _do(self, step: Step) -> Outcome | None:
        """Do a step; None: look again."""
        match step:
            case Nothing():
                return await self._complete()
            case Put():
                return await self._put(step)
            case Restore():
                return await self._restore(step)
            case Adopt():
                return await self._adopt(step)
            case Observe():
                return await self._observe(step)
            case Refuse():
                if step.is_other_kind:
                    raise SpecInvalid("InvalidSpec", step.message)
                return _taken(self._resource, self._draft, step.message)
            case Idle():
                return self._idle(step)

    async def _put(self, step: Put) -> Outcome | None:
        former = self._session.view.find(self._path.name)
        try:
            answer = await self._put_body(step)
        except RequestRefused as error:
            if has_moved_on(error):
                await self._session.catch_up()
                return None
            if self._restored is not None and error.type is ProblemType.IMMUTABLE:
                await self._undo_restore(error)
            raise spec_invalid(error) from error
        self._session.note_put(self._path, answer, self._mark)
        self._note_put(step, answer)
        if answer.created:
            self._is_new = True
            self._wake_dependents()
        elif former is not None and former.version != answer.version and self._is_drift(former):
            self._events.append(
                Event("Normal", "DriftCorrected", "somebody changed the entity on the bus; it is"
                      " as the resource says again")
            )  # fmt: skip
        return await self._complete(answer)

    async def _put_body(self, step: Put) -> Applied:
        try:
            return await self._put_one(step.body, step.version)
        except RequestRefused as error:
            if step.fallback is None or error.type is not ProblemType.INVALID:
                raise
        return await self._put_one(step.fallback, step.version)

    async def _put_one(self, body: Mapping[str, Any], version: int | None) -> Applied:
        self._left_out = frozenset(targets_of(self._resource)) - frozenset(body)
        return await self._session.control.put(self._path, body, self._mark, version)

    def _is_drift(self, former: Any) -> bool:
        """Return whether the entity was as this generation says, and moved since."""
        memory = self._memory
        return (
            memory.programmed == self._resource.generation
            and former.mark == self._mark
            and memory.applied_hash != former.applied_hash
        )

    def _note_put(self, step: Put, answer: Applied) -> None:
        if step.lost is not None:
            are_kept = step.lost.restorable_until is not None
            text = (
                f"somebody deleted the entity {step.lost.entity_id} on the bus; it was made again,"
                f" {'without its messages' if are_kept else 'and its messages are lost'}"
            )
            self._events.append(Event("Warning", "EntityLost", text))
        elif self._memory.was_idle and answer.created:
            self._events.append(Event("Normal", "Recreated", "made again after idle deletion"))
        elif not answer.created and step.version is not None and self._restored is None:
            live = self._memory.entity_id
            if live is None and answer.version != step.version:
                text = f"took the entity {answer.entity_id}, which existed already"
                self._events.append(Event("Normal", "Adopted", text))

    async def _restore(self, step: Restore) -> Outcome | None:
        stone = step.stone
        try:
            answer = await self._session.control.restore(stone.entity_id)
        except RequestRefused as error:
            if error.type is ProblemType.ALREADY_EXISTS:
                await self._session.catch_up()
                return None
            if error.type is ProblemType.INVALID and self._missing():
                return self._wait_for_targets()
            if error.type not in (ProblemType.NOT_FOUND, ProblemType.IMMUTABLE):
                raise spec_invalid(error) from error
            self._is_lost = True  # its retention has ended, or it went with its topic
            return None
        self._restored = answer
        self._session.note_put(self._path, answer, stone.mark)
        self._events.append(
            Event("Normal", "Restored", f"restored the entity {stone.entity_id} with its messages")
        )
        await self._session.catch_up()  # a topic brings its subscriptions along
        self._wake_dependents()
        return None

    async def _undo_restore(self, error: RequestRefused) -> None:
        """Delete again what cannot become what the resource says; raise SpecInvalid."""
        assert self._restored is not None
        version = self._restored.version
        await self._session.control.delete(self._path, DeletionPolicy.RETAIN, version)
        await self._session.catch_up()
        raise SpecInvalid(
            "ImmutableFieldChanged",
            f"the deleted entity cannot be restored as the resource says ({error.detail}): set the"
            " field as it was, or the annotation postbus.dev/start-empty=true to begin without its"
            " messages",
        ) from error

    async def _adopt(self, step: Adopt) -> Outcome | None:
        facts = await self._describe()
        if facts is None:
            return None
        found = differences(self._path, step.body, facts)
        if not found:
            return await self._put(Put(step.body, step.live.version))
        text = (
            f"{step.live.name} exists already and is not the same ({'; '.join(found)}): set"
            " operatorSpec.adopt to Always to take it as the resource says, or delete it"
        )
        return _taken(self._resource, self._draft, text)

    async def _observe(self, step: Observe) -> Outcome | None:
        draft = self._draft
        draft.set("Valid", "Unknown", "Unknown", "observed only")
        self._set_targets()
        if step.live is None:
            text = f"there is no {self._path.kind} {self._path.name} on the bus: observed only"
            draft.forget_entity()
            draft.set("Programmed", "False", "Unknown", text)
            draft.set("Drifted", "True", "ObserveOnly", text)
            draft.set("Ready", "False", "Provisioning", text)
            return _outcome(self._resource, draft)
        facts = await self._describe()
        if facts is None:
            return None
        found = differences(self._path, step.body, facts)
        draft.set("Programmed", "Unknown", "Unknown", "observed only")
        draft.set("Ready", "True", "Ready", "exists; observed only")
        if found:
            text = f"the bus differs: {'; '.join(found)}; reconcilePolicy Observe changes nothing"
            draft.set("Drifted", "True", "ObserveOnly", text)
        draft.note_entity(facts.entity_id, facts.applied_hash)
        draft.note_facts(facts)
        self._note_counts(facts.entity_id)
        return _outcome(self._resource, draft)

    def _idle(self, step: Idle) -> Outcome:
        draft = self._draft
        text = "deleted because it was idle (autoDeleteOnIdle)"
        if step.deletes_resource:
            draft.set("Ready", "Unknown", "AutoDeletedOnIdle", text)
            event = Event("Normal", "AutoDeletedOnIdle", f"the entity was {text}")
            return _outcome(self._resource, draft, event, delete_resource=True)
        advice = (
            f"{text}: change the spec, or set the annotation postbus.dev/recreate-requested-at, to"
            " have it again"
        )
        draft.set("Ready", "Unknown", "AutoDeletedOnIdle", advice)
        draft.note_gone()
        draft.set("Programmed", "False", "Unknown", text)
        draft.keep("Valid", "ForwardTargetsResolved")
        events = [] if self._memory.was_idle else [Event("Normal", "AutoDeletedOnIdle", advice)]
        return _outcome(self._resource, draft, *events)

    # --- the end of a look ----------------------------------------------------------------------

    async def _complete(self, answer: Applied | None = None) -> Outcome | None:
        """Return the outcome for an entity that is as the resource says."""
        live = self._session.view.find(self._path.name)
        assert live is not None
        draft = self._draft
        if answer is not None or draft.needs_facts(live.entity_id, live.applied_hash):
            facts = self._facts or await self._describe()
            if facts is None:
                return None
            draft.note_entity(live.entity_id, live.applied_hash)
            draft.note_facts(facts)
            self._set_valid(facts.warnings)
        else:
            draft.keep("Valid")
        if self._is_new:
            draft.note_no_messages()
        self._note_counts(live.entity_id)
        self._set_targets()
        behind = _partitions_behind(answer)
        if behind:
            text = f"partitions {behind} do not have the definition yet"
            draft.set("Programmed", "False", "PartiallyApplied", text)
            draft.set("Reconciling", "True", "Updating", text)
            draft.set("Ready", "False", "Updating", text)
            return _outcome(self._resource, draft, *self._events, retry_s=PARTIAL_RETRY_S)
        draft.set("Programmed", "True", "Applied", "all partitions have the definition")
        self._set_ready()
        keys = await self._keys()
        if keys.condition is not None:
            draft.set("SecretsSynced", *keys.condition)
        draft.note_keys(keys.binding, keys.observed_secret_version)
        done = _outcome(self._resource, draft, *self._events, *keys.events, retry_s=keys.retry_s)
        if answer is not None or self._facts is not None or self._inputs is None:
            return done
        cache, buses = self._context.cache, self._context.buses
        check = partial(is_current, cache, buses, self._resource.key, self._inputs)
        return replace(done, is_current=check)

    def _set_ready(self) -> None:
        """Set Ready; what is new waits for its bus, and is not changed with it later."""
        bus = self._owner.bus
        found = {each["type"]: each for each in bus.status.get("conditions", ())}
        is_usable = found.get("Ready", {}).get("status") != "False"
        if is_usable or self._draft.was("Ready") == "True":
            text = "the entity is in use as the resource says"
            self._draft.set("Ready", "True", "Ready", text)
            return
        text = f"{bus.key} is not ready yet: {found['Ready']['message']}"
        self._draft.set("Ready", "False", "OwnerNotReady", text)
        self._draft.set("Reconciling", "True", "WaitingForOwner", text)

    async def _keys(self) -> KeysResult:
        if self._path.kind == "subscription":
            return keys_of_subscription(self._resource, self._owner.direct)
        return await sync_keys(
            self._context, self._session, self._owner.bus, self._resource, is_new=self._is_new
        )

    async def _describe(self) -> EntityFacts | None:
        """Return what the bus says of the entity; None: it is gone, look again."""
        try:
            self._facts = await self._session.control.describe(self._path)
        except RequestRefused as error:
            if error.status != 404:
                raise
            await self._session.catch_up()
            return None
        return self._facts

    def _set_valid(self, warnings: tuple[str, ...]) -> None:
        text = "; ".join(warnings)
        if "loop" in text or "return to this entity" in text:
            text = f"accepted, but {text}: change the target of one of them"
            self._draft.set("Valid", "True", "ForwardCycle", text)
        else:
            self._draft.set("Valid", "True", "Accepted", text or "the bus accepts the spec")

    def _set_targets(self) -> None:
        targets = targets_of(self._resource)
        missing = sorted({targets[name] for name in self._missing() | self._left_out})
        draft = self._draft
        if missing:
            text = (
                f"there is no queue or topic {', '.join(missing)}: create it; until then messages"
                " are not forwarded"
            )
            draft.set("ForwardTargetsResolved", "False", "TargetNotFound", text)
            return
        disabled = sorted(name for name in targets.values() if self._is_disabled(name))
        if disabled:
            text = f"{', '.join(disabled)} takes no messages: set its status to Active"
            draft.set("ForwardTargetsResolved", "False", "TargetDisabled", text)
            return
        text = f"forwards to {', '.join(sorted(set(targets.values())))}" if targets else "none"
        draft.set("ForwardTargetsResolved", "True", "Resolved", text)

    def _is_disabled(self, name: str) -> bool:
        found = self._context.cache.named(self._owner.bus.key, name)
        return any(each.spec.get("status") in ("Disabled", "SendDisabled") for each in found)

    def _note_counts(self, entity_id: int) -> None:
        counts = self._session.counts_of(entity_id)
        if counts is not None:
            self._draft.note_counts(counts)
        if self._path.kind == "topic":
            count = self._session.view.subscription_count(self._path.name)
            self._draft.note_subscriptions(count)

    def _wake_dependents(self) -> None:
        """Wake what waits for this entity: the feed does not report own changes."""
        found = self._context.cache.forwarders_to(self._resource)
        if self._path.kind == "topic":
            found = [*found, *self._context.cache.owned_by(self._resource.key)]
        for each in found:
            self._context.wake(each.key, 0)

    # --- waiting and refusals -------------------------------------------------------------------

    def _wait_for_topic(self) -> Outcome:
        text = f"{self._owner.direct.key} is not on the bus yet"
        waiting = NoOwner("NotFound", text)
        done = _waiting(self._resource, self._draft, waiting)
        assert done.status is not None
        return replace(done, retry_s=WAITING_RETRY_S)

    def _wait_for_targets(self) -> Outcome:
        draft = self._draft
        self._set_targets()
        text = (
            "the deleted entity is restored with its messages when its forwarding targets exist:"
            " create them, or set the annotation postbus.dev/start-empty=true to begin without"
        )
        draft.set("Programmed", "False", "Unknown", text)
        draft.set("Ready", "False", "Provisioning", text)
        draft.set("Reconciling", "True", "Creating", text)
        draft.keep("Valid")
        return _outcome(self._resource, draft, retry_s=WAITING_RETRY_S)

    def _invalid(self, error: SpecInvalid) -> Outcome:
        draft, text = self._draft, str(error)
        valid = "InvalidSpec" if error.reason == "ImmutableFieldChanged" else error.reason
        draft.set("Valid", "False", valid, text)
        draft.set("Ready", "False", "Invalid", text)
        draft.set("Stalled", "True", error.reason, text)
        draft.keep_shown("SecretsSynced")
        live = self._session.view.find(self._path.name)
        is_own = live is not None and live.mark == self._mark
        kept = "the bus keeps the former definition" if is_own else "nothing was made"
        draft.set("Programmed", "False", "Unknown", kept)
        self._set_targets()
        if live is not None and is_own:
            self._note_counts(live.entity_id)
        was_shown = draft.was("Stalled") == "True"
        events = [] if was_shown else [Event("Warning", error.reason, text)]
        return _outcome(self._resource, draft, *self._events, *events)


def _partitions_behind(answer: Applied | None) -> str:
    if answer is None:
        return ""
    behind = [number for number, at in answer.acknowledged.items() if at < answer.version]
    return ", ".join(map(str, sorted(behind)))
