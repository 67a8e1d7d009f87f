// SPDX-License-Identifier: Apache-2.0
// The page of one key's session: messages, calls of them, and the same calls as text.
// Whatever comes from the server or the user is set as text, never as markup.

import { Refused, forgetKey, nameOf, request, stream, useKey } from "./api.js";
import { acceptDrops, makeDraggable } from "./drag.js";
import { draw } from "./graph.js";

const MODES = ["choreo", "baseline"];
const TITLES = { choreo: "choreographed", baseline: "as text" };
const SESSIONS = "choreo-sessions";

const $ = (id) => document.getElementById(id);
let sessions = null;   // the id of a session for each mode, and the next number of a name
let messages = [];     // of the choreographed session, as the API answers them
let parents = [];      // names, in the order of the call
let numRuns = 0;
let running = null;    // aborts the calls that run

// -- what the user is told ---------------------------------------------------------------------

function say(text) {
  $("status").textContent = text;
}

function tell(error) {
  if (error instanceof Refused && error.status === 401) {
    forgetKey();
    $("key-form").hidden = false;
    $("key").focus();
    $("error").textContent = "The server wants an API key: this one is none of its own, or none was sent.";
    return;
  }
  $("error").textContent = error.name === "AbortError" ? "" : error.message;
  say(error.name === "AbortError" ? "Stopped." : "");
}

// Runs what a button asks for; an error is told, and nothing else can be pressed meanwhile.
async function act(work) {
  $("error").textContent = "";
  document.body.toggleAttribute("data-busy", true);
  for (const button of document.querySelectorAll("main form button[type=submit]")) {
    if (!button.closest("#key-form")) button.disabled = true;
  }
  try {
    await work();
  } catch (error) {
    tell(error);
  } finally {
    for (const button of document.querySelectorAll("main form button")) button.disabled = false;
    $("stop").disabled = true;
    document.body.toggleAttribute("data-busy", false);
  }
}

function make(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// Its label begins with what is seen, so that who speaks to the browser can say it.
function button(text, name, pressed) {
  const made = make("button", text, { type: "button", "aria-label": `${text}: ${name}` });
  made.addEventListener("click", pressed);
  return made;
}

// -- sessions ----------------------------------------------------------------------------------

const path = (mode, rest = "") => `sessions/${encodeURIComponent(sessions[mode])}${rest}`;

async function openSessions() {
  const opened = { next: 1 };
  for (const mode of MODES) opened[mode] = (await request("POST", "sessions", { mode })).id;
  sessions = opened;
  remember();
}

function remember() {
  sessionStorage.setItem(SESSIONS, JSON.stringify(sessions));
}

// A name that neither session has had: those of freed messages stay taken.
function newName(letter) {
  sessions.next += 1;
  remember();
  return `${letter}${sessions.next - 1}`;
}

// Makes a message in both sessions, or in none.
async function inBoth(name, order, work) {
  const done = [];
  try {
    for (const mode of order) {
      await work(mode);
      done.push(mode);
    }
  } catch (error) {
    for (const mode of done) {
      await request("DELETE", path(mode, `/messages/${encodeURIComponent(name)}`)).catch(() => undefined);
    }
    throw error;
  }
}

async function connect() {
  sessions = JSON.parse(sessionStorage.getItem(SESSIONS) ?? "null");
  let described = null;
  if (sessions !== null) {
    try {
      await request("GET", path("baseline"));
      described = await request("GET", path("choreo"));
    } catch (error) {
      if (!(error instanceof Refused) || error.status !== 404) throw error;
    }
  }
  if (described === null) {
    await openSessions();
    described = await request("GET", path("choreo"));
  }
  $("key-form").hidden = true;
  $("facts").textContent =
    `${described.model}, up to ${described.max_model_len.toLocaleString("en")} tokens a call`;
  const { data } = await request("GET", path("choreo", "/messages"));
  messages = await Promise.all(data.map((message) =>
    request("GET", path("choreo", `/messages/${encodeURIComponent(nameOf(message.id))}`))));
  await show();
  say("Ready.");
}

async function restart() {
  if (sessions !== null) {
    for (const mode of MODES) await request("DELETE", path(mode)).catch(() => undefined);
  }
  sessionStorage.removeItem(SESSIONS);
  parents = [];
  await connect();
}

// -- what there is -----------------------------------------------------------------------------

async function show() {
  showMessages();
  showParents();
  draw($("graph"), $("readings"), messages);
  showBlocks(await request("GET", path("choreo", "/blocks")));
}

function showMessages() {
  $("messages").replaceChildren(...messages.map((message) => {
    const name = nameOf(message.id);
    const item = make("li", undefined, { "data-message": name });
    item.append(
      make("b", name), ` (${message.num_tokens} tokens)`,
      make("span", message.text, { class: "body" }),
      button("Add to the call", name, () => add(name, parents.length)),
    );
    makeDraggable(item, { name });
    return item;
  }));
}

function showParents(focused) {
  const items = parents.map((name, index) => {
    const item = make("li", undefined, { "data-parent": name, tabindex: "0" });
    item.setAttribute("aria-label", `${name}, ${index + 1} of ${parents.length}`);
    item.append(
      make("b", name), " ",
      button("Up", name, () => move(index, index - 1)),
      button("Down", name, () => move(index, index + 1)),
      button("Remove", name, () => remove(index)),
    );
    item.addEventListener("keydown", (event) => {
      if (event.target !== item) return;
      const does = {
        ArrowUp: () => move(index, index - 1),
        ArrowDown: () => move(index, index + 1),
        Delete: () => remove(index),
      }[event.key];
      if (does === undefined) return;
      event.preventDefault();
      does();
    });
    makeDraggable(item, { name, index });
    return item;
  });
  $("parents").replaceChildren(...items);
  items[focused]?.focus();
}

function add(name, index) {
  parents.splice(index, 0, name);
  showParents();
  say(`${name} is number ${index + 1} of the call.`);
}

function move(from, to) {
  if (to < 0 || to >= parents.length) return;
  const [name] = parents.splice(from, 1);
  parents.splice(to, 0, name);
  showParents(to);
  say(`${name} is number ${to + 1} of the call.`);
}

function remove(index) {
  const [name] = parents.splice(index, 1);
  showParents(Math.min(index, parents.length - 1));
  say(`${name} is no longer in the call.`);
}

function drop(what, index) {
  if (what.index === undefined) add(what.name, index);
  else move(what.index, index > what.index ? index - 1 : index);
}

function showBlocks(answer) {
  const all = answer.data.flatMap((message) => message.blocks.map((block) => block.block_id));
  $("blocks-note").textContent =
    `${answer.data.length} messages in ${new Set(all).size} blocks of ${answer.block_size} tokens; ` +
    "behind × the number of its holders.";
  $("blocks").replaceChildren(...answer.data.map((message) => {
    const row = make("tr");
    const cells = make("td");
    for (const block of message.blocks) {
      cells.append(make("span", `${block.block_id} ×${block.ref_cnt}`, {
        class: "block", title: `${block.num_valid_slots} tokens from position ${block.position}`,
      }));
    }
    if (!message.blocks.length) cells.textContent = "evicted";
    const name = nameOf(message.id) + (message.is_copy ? " (copy)" : "");
    row.append(make("th", name, { scope: "row" }), make("td", message.num_tokens), cells);
    return row;
  }));
}

// -- calls -------------------------------------------------------------------------------------

async function encode() {
  const call = { type: "prefill", content: $("message-text").value };
  call.save_as = $("message-name").value || newName("m");
  let made = null;
  await inBoth(call.save_as, MODES, async (mode) => {
    const message = await request("POST", path(mode, "/messages"), call);
    if (mode === "choreo") made = message;
  });
  messages.push(made);
  $("message-form").reset();
  await show();
  say(`${call.save_as} is encoded.`);
}

async function run() {
  const call = {
    type: "decode",
    content: $("header").value,
    parents,
    save_as: $("call-name").value || newName("a"),
    sampling_params: { temperature: 0, max_tokens: $("max-tokens").valueAsNumber },
  };
  for (const mode of MODES) clear(mode);
  // Neither is always the first: the other one finds the machine warm.
  const order = numRuns % 2 ? [...MODES].reverse() : MODES;
  numRuns += 1;
  running = new AbortController();
  $("stop").disabled = false;
  const told = [];
  let made = null;
  await inBoth(call.save_as, order, async (mode) => {
    say(`Running ${TITLES[mode]} …`);
    const { message, seconds } = await answer(mode, call, running.signal);
    if (mode === "choreo") made = message;
    told.push(`${TITLES[mode]}: first token after ${milliseconds(seconds)}`);
  });
  messages.push(made);
  $("call-name").value = "";
  await show();
  say(`${call.save_as} is answered. ${told.join("; ")}.`);
}

function part(mode, selector) {
  return document.querySelector(`[data-mode="${mode}"] ${selector}`);
}

function clear(mode) {
  part(mode, ".answer").replaceChildren();
  part(mode, "dl").replaceChildren();
}

// Shows an answer as it comes, a span for each piece, and its numbers at the end.
async function answer(mode, call, signal) {
  const shown = part(mode, ".answer");
  const began = performance.now();
  let seconds = null;
  for await (const event of stream(path(mode, "/messages"), call, signal)) {
    if (event.object === "choreo.message.chunk") {
      seconds ??= (performance.now() - began) / 1000;
      shown.append(make("span", event.text, { "data-token-ids": event.token_ids.join(" ") }));
      shown.scrollTop = shown.scrollHeight;
      continue;
    }
    seconds ??= (performance.now() - began) / 1000;
    if (shown.textContent !== event.generated_text) {
      throw new Error(`the pieces of ${TITLES[mode]} are not its answer; please report this`);
    }
    showNumbers(mode, event, seconds);
    return { message: event, seconds };
  }
  throw new Refused(0, "the answer ended without its message");
}

const milliseconds = (seconds) => `${Math.round(seconds * 1000).toLocaleString("en")} ms`;

function showNumbers(mode, message, seconds) {
  const { usage, metrics } = message;
  const rows = {
    "First token, here": milliseconds(seconds),
    "First token, in the server": milliseconds(metrics.ttft),
    "Whole answer": milliseconds(metrics.latency),
    "Tokens read from the cache": usage.reused_tokens.toLocaleString("en"),
    "Tokens computed": usage.encoded_tokens.toLocaleString("en"),
    "Tokens generated": usage.completion_tokens.toLocaleString("en"),
    "The answer of plain text": usage.exact ? "yes, exactly" : "not necessarily",
  };
  part(mode, "dl").replaceChildren(...Object.entries(rows).flatMap(
    ([name, value]) => [make("dt", name), make("dd", value)]));
}

// -- the beginning -----------------------------------------------------------------------------

function onSubmit(id, work) {
  $(id).addEventListener("submit", (event) => {
    event.preventDefault();
    act(work);
  });
}

onSubmit("key-form", () => {
  useKey($("key").value);
  $("key-form").reset();
  return connect();
});
onSubmit("message-form", encode);
onSubmit("call-form", run);
$("stop").addEventListener("click", () => running?.abort());
$("restart").addEventListener("click", () => act(restart));
acceptDrops($("parents"), drop);
act(connect);
