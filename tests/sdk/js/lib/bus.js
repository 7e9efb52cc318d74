// The bus of this run and what tests share.

import assert from "node:assert/strict";
import { ServiceBusAdministrationClient, ServiceBusClient } from "@azure/service-bus";
import WebSocket from "ws";
import "./coverage.js";

export const SECOND = 1_000;
export const SOON = { maxWaitTimeInMs: 300 };
export const LONG = { maxWaitTimeInMs: 20 * SECOND };

const { POSTBUS_EMULATOR, POSTBUS_TLS, POSTBUS_HOST, POSTBUS_KEEPER } = process.env;
const { POSTBUS_CONTROL, POSTBUS_CONTROL_TOKEN } = process.env;
export const host = POSTBUS_HOST;
export const emulator = POSTBUS_EMULATOR;
export const tls = POSTBUS_TLS;

export function keyed(rule, key, rest = "") {
  return `Endpoint=sb://${host};SharedAccessKeyName=${rule};SharedAccessKey=${key}${rest}`;
}

const retryOptions = { maxRetries: 0, timeoutInMs: 20 * SECOND };

/** A client over the transport of this run: POSTBUS_TRANSPORT is "tls" or "websocket". */
export function connect(connectionString = tls, options = {}) {
  const webSocketOptions =
    process.env.POSTBUS_TRANSPORT === "websocket" ? { webSocket: WebSocket } : undefined;
  return new ServiceBusClient(connectionString, { retryOptions, webSocketOptions, ...options });
}

export function administer(connectionString = tls, options = {}) {
  return new ServiceBusAdministrationClient(connectionString, {
    retryOptions: { maxRetries: 0 },
    ...options,
  });
}

/** Ask the keeper of the bus: "restart?how=kill", "stop?how=stop", "start". */
export async function keeper(request) {
  const answer = await fetch(`${POSTBUS_KEEPER}/${request}`, { method: "POST" });
  assert.equal(answer.status, 200, await answer.text());
}

async function control(path, body) {
  const answer = await fetch(`${POSTBUS_CONTROL}/v1/${path}`, {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${POSTBUS_CONTROL_TOKEN}` },
    body: JSON.stringify(body),
  });
  assert.equal(answer.status, 200, await answer.text());
}

/** Let time pass for messages, at once. */
export const advance = (duration) => control("clock/advance", { duration });

/** Take all locks of an entity away, as the failure of its broker would. */
export const loseLocks = (entity) => control("faults/lose-locks", { entity });

/** Receive exactly so many messages; a receive may return earlier with fewer. */
export async function receive(receiver, count) {
  const found = [];
  while (found.length < count) {
    const more = await receiver.receiveMessages(count - found.length, LONG);
    assert.notEqual(more.length, 0, `${found.length} of ${count} messages came`);
    found.push(...more);
  }
  return found;
}

export async function receiveOne(receiver) {
  return (await receive(receiver, 1))[0];
}

export async function assertEmpty(receiver) {
  assert.deepEqual(bodies(await receiver.receiveMessages(1, SOON)), []);
}

export const bodies = (messages) => messages.map((each) => each.body);

/** Collect what an asynchronous iterator gives. */
export async function collect(iterator, count = Infinity) {
  const found = [];
  for await (const each of iterator) {
    found.push(each);
    if (found.length >= count) break;
  }
  return found;
}
