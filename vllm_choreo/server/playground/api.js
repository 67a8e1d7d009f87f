// SPDX-License-Identifier: Apache-2.0
// The HTTP API of this server (docs/http.md), with the key of this tab.

const KEY = "choreo-key";
const ROOT = new URL("../v1/choreo/", document.baseURI);

// An answer that is no success; `status` is that of HTTP.
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function forgetKey() {
  sessionStorage.removeItem(KEY);
}

async function send(method, path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(new URL(path, ROOT), {
    method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!answer.ok) throw new Refused(answer.status, await reason(answer));
  return answer;
}

async function reason(answer) {
  const text = await answer.text();
  try {
    const { error } = JSON.parse(text);
    if (typeof error === "string") return error;
    const given = error.value === null ? "" : ` (given: ${JSON.stringify(error.value)})`;
    return `${error.param || error.type}: ${error.message}${given}`;
  } catch {
    return text || `HTTP ${answer.status}`;
  }
}

export async function request(method, path, body) {
  return (await send(method, path, body)).json();
}

// Events of a call as they come: pieces, then its message; an event that is an error is thrown.
export async function* stream(path, body, signal) {
  const answer = await send("POST", path, { ...body, stream: true }, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused(0, "the answer broke off");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice("data: ".length));
      if (event.object === "error") throw new Refused(event.error.code, event.error.message);
      yield event;
    }
  }
}

export function nameOf(id) {
  return id.slice(id.indexOf("/") + 1);
}
