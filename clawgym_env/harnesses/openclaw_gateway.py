"""OpenClaw's gateway for one rollout: started inside its sandbox, given the task, and ended once all is quiet.

Invariant: a gateway serves one rollout and is reached from its sandbox alone. One for several rollouts would be
cheaper, but it runs the commands of every agent that it serves: they could reach one another's files and processes.

Sub-agents need it: a child runs in a session of its own, and its result comes back as another turn of its parent, after
the first turn has ended. So the run is over when no session is active any more, not when the first turn is.
"""

from __future__ import annotations

#: How long no session may be active before a run with sub-agents is over: between a child's end and its parent's next
#: turn there is none.
QUIET_S = 3.0

#: A module for Node. Its arguments: OpenClaw's program, ``QUIET_S``, more for the gateway; the task is on stdin. It
#: speaks the gateway's own protocol, as a trusted local client: OpenClaw's own would load thousands of modules again.
SUPERVISOR = """
import { spawn } from "node:child_process";
import { randomUUID } from "node:crypto";
import { createServer } from "node:net";
import { buffer } from "node:stream/consumers";

const [program, quiet, ...more] = process.argv.slice(1);
const token = randomUUID();
const task = (await buffer(process.stdin)).toString();
const port = await new Promise((done) => {
  const probe = createServer().listen(0, "127.0.0.1", () => {
    const { port } = probe.address();
    probe.close(() => done(port));
  });
});
const gateway = spawn(
  process.execPath,
  [...process.execArgv.filter((x) => x.startsWith("--disable-warning")), program, "gateway", "run",
   "--bind", "loopback", "--port", String(port), "--auth", "token", ...more],
  { env: { ...process.env, OPENCLAW_GATEWAY_TOKEN: token }, stdio: ["ignore", 2, 2] },
);
const finish = (ok, message) => {
  gateway.removeAllListeners();
  gateway.kill("SIGKILL");
  const error = ok ? {} : { error: { message } };
  const said = JSON.stringify({ ok, status: ok ? "ok" : "error", ...error });
  process.stdout.write(said + "\\n", () => process.exit(ok ? 0 : 1));
};
gateway.on("exit", (code, signal) => finish(false, `the gateway ended early (${signal ?? code})`));
const pause = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));
const connect = () => new Promise((resolve, reject) => {  // refused until the gateway has started
  const socket = new WebSocket(`ws://127.0.0.1:${port}`);
  const waiting = new Map();
  const ask = (method, params) => new Promise((resolve, reject) => {
    const id = randomUUID();
    waiting.set(id, { resolve, reject });
    socket.send(JSON.stringify({ type: "req", id, method, params }));
  });
  socket.onclose = socket.onerror = () => {
    const error = new Error("the gateway hung up");
    waiting.forEach(({ reject }) => reject(error));
    reject(error);
  };
  socket.onmessage = ({ data }) => {
    const frame = JSON.parse(data);
    if (frame.type === "event" && frame.event === "connect.challenge")
      ask("connect", {
        minProtocol: 4, maxProtocol: 4, role: "operator",
        scopes: ["operator.admin", "operator.read", "operator.write"], caps: [], auth: { token },
        client: { id: "gateway-client", version: "1", platform: "linux", mode: "backend" },
      }).then(() => resolve(ask), reject);
    if (frame.type !== "res" || frame.payload?.status === "accepted") return;  // the end of the turn is to come
    const { resolve: answer, reject: refuse } = waiting.get(frame.id);
    waiting.delete(frame.id);
    if (frame.ok) answer(frame.payload);
    else refuse(new Error(frame.error?.message ?? "refused"));
  };
});

let ask;
while (!ask) ask = await connect().catch(() => pause(0.2));
try {
  const done = await ask("agent", {
    message: task, agentId: "main", sessionKey: "agent:main:task", idempotencyKey: randomUUID(), deliver: false,
    timeout: 0,
  });
  const { meta = {}, payloads = [] } = done.result ?? {};
  const bad = payloads.find((payload) => payload.isError);
  const failed = done.status !== "ok" || meta.error || meta.aborted || meta.stopReason === "error" || bad;
  if (failed) finish(false, meta.error?.message ?? bad?.text ?? done.summary ?? done.status);
  else {
    const { sessions } = await ask("sessions.list", {});
    if (sessions.some(({ key }) => key.includes(":subagent:")))
      for (let calm = 0; calm < Number(quiet); calm += 0.25) {
        await pause(0.25);
        if ((await ask("sessions.list", { activeOnly: true })).sessions.length) calm = 0;
      }
    finish(true);
  }
} catch (error) {
  finish(false, error.message);
}
"""
