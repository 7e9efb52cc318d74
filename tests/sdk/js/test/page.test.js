import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { test } from "node:test";

test("the first steps of docs/clients.md run as they stand", () => {
  const { status, stdout, stderr } = spawnSync(
    process.execPath,
    ["--input-type=module", "--eval", process.env.POSTBUS_FIRST_STEPS],
    { encoding: "utf8", timeout: 60_000 },
  );
  assert.deepEqual({ status, stdout }, { status: 0, stdout: "hello\n" }, stderr);
});
