"""Authorization rules of a resource on its bus, and the Secrets of their keys.

A change goes to the bus first and into Secrets afterwards, so that a Secret never names a key that
the bus does not know. No text of an error, event or condition contains a key.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from postbus.client.control import RequestRefused, part
from postbus_operator.annotations import COMPONENT_LABEL, RESOURCE, ROTATE
from postbus_operator.bus.entity_paths import EntityPath, EntityWord
from postbus_operator.bus.marks import mark_of
from postbus_operator.bus.session import BusSession
from postbus_operator.bus.synced_keys import KeysResult, SyncedKeys
from postbus_operator.conditions import ConditionStatus, timestamp
from postbus_operator.context import Context
from postbus_operator.keys.contents import (
    COMPONENT,
    HIDDEN_ANNOTATION,
    HIDDEN_SINCE_ANNOTATION,
    RULE_ANNOTATION,
    Endpoint,
    RuleKeys,
    WantedSecret,
    chosen_names,
    hidden_since,
    secret_name,
    wanted_secrets,
)
from postbus_operator.keys.rules import (
    FoundRule,
    Problem,
    RotationStep,
    RulePlan,
    SourceKeys,
    former_keys,
    plan_rules,
    read_source,
    rotation_step,
    wanted_rules,
)
from postbus_operator.kube.api import Conflict, NotFound
from postbus_operator.kube.cache import Cache, owners_of
from postbus_operator.kube.resource_types import RESOURCES, SECRETS
from postbus_operator.kube.slimming import value_digest
from postbus_operator.names import child_name
from postbus_operator.objects import Resource
from postbus_operator.outcome import BackendUnavailable, Event
from postbus_operator.status import Binding

ENTITY_WORDS: Final[Mapping[str, EntityWord]] = {"Queue": "queue", "Topic": "topic"}
KEY_BYTES: Final = 32
REFUSED_S: Final = 30.0
"""Pause after a refused change of a rotation."""

LOOK_AGAIN: Final = timedelta(minutes=30)
"""Pause between two looks at rules that nothing suggests have changed. The feed of a bus does not
report rules, but each change of one makes another version of the catalog: those of a Namespace are
looked at after each version, of an entity not, for there are many."""


async def sync_keys(
    context: Context,
    session: BusSession,
    bus: Resource,
    resource: Resource,
    *,
    is_new: bool = False,
) -> KeysResult:
    """Make rules and Secrets those that a Namespace, Queue, Topic or Pipeline wants.

    Rules of a Pipeline are of its bus, since its key is for several entities.

    The entity exists; `is_new`: it was just created, without rules. Raises `BackendUnavailable`,
    `LeadershipLost` and `ApiError`.
    """
    if not has_keys(context.cache, resource, is_new=is_new):
        return KeysResult()
    sync = _KeySync(context, session, bus, resource)
    remembered = session.synced_keys.get(resource.key)
    inputs = await sync.read_inputs()
    if remembered is not None and sync.is_unchanged(remembered, inputs):
        return remembered.result
    session.synced_keys.pop(resource.key, None)
    _forget_gone(context, session)
    result = await sync.run()
    if not sync.has_rotated and (result.condition is None or result.condition[1] == "Synced"):
        until = context.now() + LOOK_AGAIN
        session.synced_keys[resource.key] = SyncedKeys(
            inputs, sync.digests, until, replace(result, events=())
        )
    return result


def _forget_gone(context: Context, session: BusSession) -> None:
    """Drop what is remembered of resources that are gone, once there are more than exist."""
    known = session.synced_keys
    if len(known) > sum(map(context.cache.count, ("Namespace", "Pipeline", *ENTITY_WORDS))):
        for key in [each for each in known if context.cache.get(each) is None]:
            del known[key]


def keys_of_subscription(subscription: Resource, topic: Resource) -> KeysResult:
    """Return what to show of the keys of a subscription, which are those of its topic."""
    condition: tuple[ConditionStatus, str, str] | None = None
    if subscription.spec.get("operatorSpec", {}).get("secrets"):
        text = "a subscription has no keys of its own: set operatorSpec.secrets of its topic"
        condition = ("False", "SourceMissing", text)
    name = topic.status.get("binding", {}).get("name")
    is_near = topic.key.namespace == subscription.key.namespace
    return KeysResult(condition, Binding(name=name) if name and is_near else None)


def has_keys(cache: Cache, resource: Resource, *, is_new: bool = False) -> bool:
    """Return whether the resource has rules or Secrets, or may have had them before."""
    spec = resource.spec.get("operatorSpec", {})
    if wanted_rules(resource) or spec.get("secrets") or ROTATE in resource.annotations:
        return True
    if cache.secrets_owned_by(resource.key):
        return True
    shown = {each["type"] for each in resource.status.get("conditions", ())}
    observed = resource.status.get("observedGeneration")
    return not is_new and ("SecretsSynced" in shown or observed != resource.generation)


class _KeySync:
    """One pass over the keys of one resource."""

    def __init__(
        self, context: Context, session: BusSession, bus: Resource, resource: Resource
    ) -> None:
        self.has_rotated = False
        self.digests: dict[str, Mapping[str, str]] = {}
        self._context = context
        self._session = session
        self._bus = bus
        self._resource = resource
        self._mark = mark_of(resource)
        self._wanted = wanted_rules(resource)
        self._requested = resource.annotations.get(ROTATE)
        self._sources: dict[str, SourceKeys | Problem] = {}
        self._versions: dict[str, str] = {}
        self._problems: list[Problem] = []
        self._events: list[Event] = []
        word = ENTITY_WORDS.get(resource.key.kind)
        path = "/v1" if word is None else EntityPath(word, resource.entity_name).url
        self._url = f"{path}/authorization-rules"

    # --- what is there --------------------------------------------------------------------------

    async def read_inputs(self) -> tuple[object, ...]:
        """Read the user's Secrets; return all that the result depends on, without keys."""
        namespace = self._resource.key.namespace
        for rule in self._wanted:
            if rule.secret_name is None:
                continue
            try:
                found = await self._context.api.get(SECRETS, namespace, rule.secret_name)
            except NotFound:
                found = None
            else:
                assert found is not None
                self._versions[rule.secret_name] = found["metadata"]["resourceVersion"]
            self._sources[rule.name] = read_source(rule.name, rule.secret_name, found)
        view, entity = self._session.view, None
        is_of_bus = self._resource.key.kind == "Namespace"
        if not is_of_bus:
            entity = view.find(self._resource.entity_name)
        return (
            self._resource.uid,
            self._resource.generation,
            self._requested,
            self._session.list_count,
            view.version if is_of_bus else None,
            None if entity is None else entity.entity_id,
            self._bus.spec.get("operatorSpec", {}).get("tls"),
            self._ca_digest(),
            tuple(sorted(self._versions.items())),
        )

    def is_unchanged(self, remembered: SyncedKeys, inputs: tuple[object, ...]) -> bool:
        """Return whether a result is valid still, and its Secrets are as they were written."""
        if remembered.inputs != inputs or self._context.now() >= remembered.until:
            return False
        shown = self._own_secrets()
        return shown.keys() == remembered.digests.keys() and all(
            shown[name].get("data") == digests for name, digests in remembered.digests.items()
        )

    def _own_secrets(self) -> dict[str, Mapping[str, Any]]:
        found = self._context.cache.secrets_owned_by(self._resource.key)
        return {
            each["metadata"]["name"]: each
            for each in found
            if (each["metadata"].get("labels") or {}).get(COMPONENT_LABEL) == COMPONENT
        }

    async def _rules(self) -> list[FoundRule]:
        answer = await self._session.control.ask("GET", self._url, query={"keys": "true"})
        try:
            return [FoundRule.from_answer(item) for item in answer["items"]]
        except (KeyError, TypeError, ValueError):  # no text of it: it has keys
            raise BackendUnavailable("the operator cannot read the rules of the bus") from None

    def _ca_secret(self) -> str:
        tls = self._bus.spec.get("operatorSpec", {}).get("tls", {})
        name = child_name(self._bus.key.name)
        if tls.get("secretName"):
            return str(tls["secretName"])
        return f"{name}-issued-tls" if tls.get("issuerRef") else f"{name}-ca"

    def _ca_digest(self) -> str | None:
        found = self._context.cache.find(SECRETS, self._bus.key.namespace, self._ca_secret())
        digest: str | None = None if found is None else found["data"].get("ca.crt")
        return digest

    async def _endpoint(self) -> Endpoint:
        namespace = self._bus.key.namespace
        domain = self._context.settings.cluster_domain
        host = f"{child_name(self._bus.key.name)}.{namespace}.svc.{domain}"
        try:
            found = await self._context.api.get(SECRETS, namespace, self._ca_secret())
        except NotFound:
            return Endpoint(host, None)
        packed = (found.get("data") or {}).get("ca.crt")
        return Endpoint(host, base64.b64decode(packed) if packed else None)

    # --- the pass -------------------------------------------------------------------------------

    async def run(self) -> KeysResult:
        """Change rules, write Secrets, and return what to show."""
        step, since = self._rotation()
        try:
            rules, step = await self._change_rules(step)
        except RequestRefused as error:
            self._problems.append(Problem("Refused", f"the bus refuses: {error.detail}"))
            return self._result((), step)
        found, problems = wanted_secrets(self._resource, await self._endpoint(), rules, since)
        self._problems += problems
        written = [each for each in found if await self._write(each)]
        names = {each.name for each in written}
        for name, known in self._own_secrets().items():
            if name not in names:
                await self._delete(name, known)
        return self._result(written, step)

    def _rotation(self) -> tuple[RotationStep, datetime]:
        """Return the step of a rotation, and since when its key is hidden."""
        now = self._context.now().replace(microsecond=0)
        since = self._hidden_since()
        pause = timedelta(seconds=self._context.settings.rotation_s)
        step = rotation_step(self._requested, since, now, pause)
        if isinstance(step, Problem):
            self._problems.append(step)
            step = RotationStep()
        return step, since or now

    def _hidden_since(self) -> datetime | None:
        """Return since when every Secret of rules with made keys hides the requested one."""
        if self._requested is None:
            return None
        names = {
            secret_name(self._resource.key, rule.name)
            for rule in self._wanted
            if rule.secret_name is None
        }
        if self._wanted and self._wanted[0].secret_name is None:
            names |= chosen_names(self._resource)
        found = []
        for name, known in self._own_secrets().items():
            if name in names:
                since = hidden_since(known, self._requested)
                if since is None:
                    return None
                found.append(since)
        return max(found, default=None)

    async def _change_rules(self, step: RotationStep) -> tuple[list[RuleKeys], RotationStep]:
        """Return the rules whose Secrets are to be written, after all changes of the bus."""
        found = await self._rules()
        sources = self._sources | await self._former_keys(found)
        plan = plan_rules(self._wanted, found, sources, self._mark, step.renewed, new_key)
        self._problems += plan.problems
        control = self._session.control
        for name in plan.deletes:
            await control.ask("DELETE", f"{self._url}/{part(name)}")
            self._note("AuthorizationRuleDeleted", f"deleted the authorization rule {name}")
        for put in plan.puts:
            query = {"managed-by": self._mark}
            await control.ask("PUT", f"{self._url}/{part(put.name)}", put.body(), query)
        self._note_puts(plan, found, step)
        if step.hidden is not None and (step.renewed is not None or not self._rotating(plan)):
            await self._end_rotation(plan, step)
            step = RotationStep()
        if plan.puts or plan.deletes:
            found = await self._rules()
        by_name = {rule.name: rule for rule in found}
        hidden = dict.fromkeys(self._rotating(plan), step.hidden)
        kept = [by_name[name] for name in plan.kept if name in by_name]
        return [RuleKeys(rule.name, rule.keys, hidden.get(rule.name)) for rule in kept], step

    async def _former_keys(self, found: Sequence[FoundRule]) -> dict[str, SourceKeys]:
        """Return the keys of own Secrets whose rules the bus has lost, as with its entity.

        Clients go on with their connection strings once the entity has been made again.
        """
        known = {rule.name for rule in found}
        chosen = chosen_names(self._resource)  # the user says what is below which key in these
        own = self._own_secrets()
        former: dict[str, SourceKeys] = {}
        for rule in self._wanted:
            name = secret_name(self._resource.key, rule.name)
            if rule.name in known or rule.secret_name or name in chosen or name not in own:
                continue
            try:
                secret = await self._context.api.get(SECRETS, self._resource.key.namespace, name)
            except NotFound:
                continue
            notes = secret["metadata"].get("annotations") or {}
            if self._is_own(secret) and notes.get(RULE_ANNOTATION) == rule.name:
                keys = former_keys(secret, rule.name, notes.get(HIDDEN_ANNOTATION))
                if keys is not None:
                    former[rule.name] = keys
        return former

    def _rotating(self, plan: RulePlan) -> list[str]:
        made = {rule.name for rule in self._wanted if rule.secret_name is None}
        return [name for name in plan.kept if name in made]

    async def _end_rotation(self, plan: RulePlan, step: RotationStep) -> None:
        """Remove the annotation, unless somebody has changed the resource meanwhile."""
        self.has_rotated = True
        names = self._rotating(plan)
        if names:
            text = f"the {step.hidden} key of {', '.join(names)} has a new value"
            self._events.append(Event("Normal", "KeysRotated", text))
        else:
            text = "there is no rule whose keys the bus makes: change the keys in their Secrets"
            self._events.append(Event("Warning", "NothingToRotate", text))
        key = self._resource.key
        change = {
            "metadata": {
                "resourceVersion": self._resource.resource_version,
                "annotations": {ROTATE: None},
            }
        }
        try:
            await self._context.api.patch(RESOURCES[key.kind], key.namespace, key.name, change)
        except (Conflict, NotFound):
            return  # the next look finds the annotation, or that it is gone

    # --- Secrets --------------------------------------------------------------------------------

    async def _write(self, wanted: WantedSecret) -> bool:
        """Apply a Secret unless it is as wanted; return whether the name is the resource's."""
        manifest = wanted.manifest(self._resource)
        digests = {key: value_digest(value) for key, value in manifest["data"].items()}
        namespace = self._resource.key.namespace
        known = self._context.cache.find(SECRETS, namespace, wanted.name)
        is_watched = known is not None
        if known is None:
            try:
                known = await self._context.api.get(SECRETS, namespace, wanted.name)
            except NotFound:
                known = None
        if known is not None and not self._is_own(known):
            self._problems.append(
                Problem(
                    "NameTaken",
                    f"the Secret {wanted.name} belongs to somebody else: delete it, or choose"
                    " another name",
                )
            )
            return False
        self.digests[wanted.name] = digests
        if known is not None and known.get("type") != wanted.type:
            await self._delete(wanted.name, known)  # the type of a Secret cannot be changed
            is_watched = False
        if known is None or not is_watched or not self._is_as(known, manifest, digests):
            await self._context.api.apply(manifest)
        return True

    def _is_own(self, known: Mapping[str, Any]) -> bool:
        """Return whether a Secret is the resource's, or was left by a former one of its name."""
        labels = known["metadata"].get("labels") or {}
        is_of_keys = labels.get(COMPONENT_LABEL) == COMPONENT
        return is_of_keys and self._resource.key in owners_of(known)

    def _is_as(
        self, known: Mapping[str, Any], manifest: Mapping[str, Any], digests: Mapping[str, str]
    ) -> bool:
        """Return whether a Secret of the cache is what an apply would make."""
        metadata, wanted = known["metadata"], manifest["metadata"]
        notes = {
            name: text
            for name, text in (metadata.get("annotations") or {}).items()
            if name in (RESOURCE, RULE_ANNOTATION, HIDDEN_ANNOTATION, HIDDEN_SINCE_ANNOTATION)
        }
        return (
            known.get("data") == digests
            and wanted["labels"].items() <= (metadata.get("labels") or {}).items()
            and notes == wanted["annotations"]
            and any(
                each["uid"] == self._resource.uid for each in metadata.get("ownerReferences", ())
            )
            == ("ownerReferences" in wanted)
        )

    async def _delete(self, name: str, known: Mapping[str, Any]) -> None:
        uid = known["metadata"]["uid"]
        await self._context.api.delete(SECRETS, self._resource.key.namespace, name, uid=uid)

    # --- what to show ---------------------------------------------------------------------------

    def _note(self, reason: str, text: str) -> None:
        self._events.append(Event("Normal", reason, text))

    def _note_puts(self, plan: RulePlan, found: Sequence[FoundRule], step: RotationStep) -> None:
        before = {rule.name: rule for rule in found}
        for put in plan.puts:
            known = before.get(put.name)
            if known is None:
                self._note("AuthorizationRuleCreated", f"created the authorization rule {put.name}")
            elif step.renewed is None and (put.primary, put.secondary) != (
                known.keys.primary,
                known.keys.secondary,
            ):
                self._note("KeysChanged", f"the rule {put.name} has the keys of its Secret")

    def _result(self, written: Sequence[WantedSecret], step: RotationStep) -> KeysResult:
        names = [each.name for each in written]
        condition: tuple[ConditionStatus, str, str] | None = None
        retry_s = None
        if self._problems:
            texts = "; ".join(each.message for each in self._problems)
            condition = ("False", self._problems[0].reason, texts)
        elif step.until is not None:
            text = (
                f"Secrets name the other key only, until {timestamp(step.until)}; then the"
                f" {step.hidden} key gets a new value"
            )
            condition = ("True", "Rotating", text)
        elif names:
            condition = ("True", "Synced", f"written: {', '.join(names)}")
        if step.until is not None:
            left_s = (step.until - self._context.now()).total_seconds()
            retry_s = left_s if left_s > 0 else REFUSED_S
        bound = next((each.name for each in written if RULE_ANNOTATION in each.annotations), None)
        return KeysResult(
            condition,
            None if bound is None else Binding(name=bound),
            ",".join(self._versions.values()) or None,
            tuple(self._events),
            retry_s,
        )


def new_key() -> str:
    """Return a random key, as the bus makes them."""
    return base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()
