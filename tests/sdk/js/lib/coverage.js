// Notes which public methods of the SDK were called and which of them succeeded.
//
// The list comes from the SDK's own declarations, the calls from its prototypes, which are wrapped
// when the first object of a class is seen. Each process writes a file into POSTBUS_COVERAGE:
// {"methods": {"Class.method": {"tried": n, "worked": n}}}

import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";
import * as sdk from "@azure/service-bus";

const require = createRequire(import.meta.url);
const folder = path.dirname(require.resolve("@azure/service-bus/package.json"));
const declarations = readFileSync(path.join(folder, "types/latest/service-bus.d.ts"), "utf8")
  .replaceAll("\r\n", "\n");

/** Declared with methods, but not called by users of the SDK. */
const OTHERS = new Set([
  "HttpHeadersLike", // of raw responses
  "MessageHandlers", // implemented by users
  "ServiceBusError",
]);

/** What a method gives back whose calls are counted too. */
const MAKES = {
  createSender: "ServiceBusSender",
  createReceiver: "ServiceBusReceiver",
  acceptSession: "ServiceBusSessionReceiver",
  acceptNextSession: "ServiceBusSessionReceiver",
  createRuleManager: "ServiceBusRuleManager",
  createMessageBatch: "ServiceBusMessageBatch",
};

function declaredClasses() {
  const found = {};
  const shape = /^export declare (?:class|interface) (\w+)(?: extends (\w+))? \{\n([^]*?)^\}/gm;
  for (const [, name, parent, body] of declarations.matchAll(shape)) {
    const methods = new Set(found[parent] ?? []);
    for (const [, method] of body.matchAll(/^ {4}(?!private|constructor)(\w+)\(/gm)) {
      methods.add(method);
    }
    if (methods.size > 0 && !OTHERS.has(name)) found[name] = methods;
  }
  for (const [, name] of declarations.matchAll(/^export declare function (\w+)\(/gm)) {
    (found.functions ??= new Set()).add(name);
  }
  return found;
}

const classes = declaredClasses();
const methods = {};
for (const [name, all] of Object.entries(classes)) {
  for (const method of all) methods[`${name}.${method}`] = { tried: 0, worked: 0 };
}

function counted(key, original, made) {
  const count = methods[key];
  return function (...given) {
    count.tried += 1;
    const result = original.apply(this, given);
    if (typeof result?.then !== "function") {
      count.worked += 1;
      if (made) watch(made, Object.getPrototypeOf(result));
      return result;
    }
    return result.then((value) => {
      count.worked += 1;
      if (made) watch(made, Object.getPrototypeOf(value));
      return value;
    });
  };
}

const watched = new Set();

function watch(name, prototype) {
  if (watched.has(name)) return;
  watched.add(name);
  for (const method of classes[name]) {
    const original = prototype[method];
    if (typeof original !== "function") throw new Error(`${name}.${method} is declared only`);
    prototype[method] = counted(`${name}.${method}`, original, MAKES[method]);
  }
}

watch("ServiceBusClient", sdk.ServiceBusClient.prototype);
watch("ServiceBusAdministrationClient", sdk.ServiceBusAdministrationClient.prototype);

export const isServiceBusError = counted("functions.isServiceBusError", sdk.isServiceBusError);
export const parseServiceBusConnectionString = counted(
  "functions.parseServiceBusConnectionString",
  sdk.parseServiceBusConnectionString,
);

process.on("exit", () => {
  const target = process.env.POSTBUS_COVERAGE;
  if (!target) return;
  mkdirSync(target, { recursive: true });
  writeFileSync(path.join(target, `js-${process.pid}.json`), JSON.stringify({ methods }));
});
