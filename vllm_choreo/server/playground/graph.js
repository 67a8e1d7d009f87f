// SPDX-License-Identifier: Apache-2.0
// Who read whom, as a drawing and as a list; a message stands to the right of all that it reads.

import { nameOf } from "./api.js";

const WIDTH = 150, HEIGHT = 30, GAP_X = 60, GAP_Y = 14, MAX_CHARS = 18;

function element(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Where each message stands; parents come before their children.
function places(messages) {
  const rows = [], found = new Map();
  for (const message of messages) {
    const above = message.parents.map((parent) => found.get(parent.id)?.column ?? -1);
    const column = Math.max(-1, ...above) + 1;
    const row = (rows[column] ?? 0);
    rows[column] = row + 1;
    found.set(message.id, { column, x: column * (WIDTH + GAP_X) + 2, y: row * (HEIGHT + GAP_Y) + 2 });
  }
  return found;
}

export function draw(svg, list, messages) {
  const found = places(messages);
  const edges = [], nodes = [];
  for (const message of messages) {
    const { x, y } = found.get(message.id);
    for (const parent of message.parents) {
      const from = found.get(parent.id);
      if (!from) continue;
      const [x1, y1, y2] = [from.x + WIDTH, from.y + HEIGHT / 2, y + HEIGHT / 2];
      const bend = GAP_X / 2;
      edges.push(element("path", {
        d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x - bend} ${y2} ${x} ${y2}`,
        "data-from": nameOf(parent.id), "data-to": nameOf(message.id),
      }));
    }
    const name = nameOf(message.id);
    const shown = name.length > MAX_CHARS ? `${name.slice(0, MAX_CHARS - 1)}…` : name;
    const group = element("g", { "data-message": name });
    group.append(
      element("rect", { x, y, width: WIDTH, height: HEIGHT, rx: 6 }),
      element("text", { x: x + 8, y: y + 20 }, shown),
    );
    nodes.push(group);
  }
  const all = [...found.values()];
  svg.setAttribute("width", Math.max(0, ...all.map((place) => place.x)) + WIDTH + 4);
  svg.setAttribute("height", Math.max(0, ...all.map((place) => place.y)) + HEIGHT + 4);
  svg.replaceChildren(...edges, ...nodes);
  list.replaceChildren(...messages.map((message) => {
    const item = document.createElement("li");
    const read = message.parents.map((parent) => nameOf(parent.id)).join(", ");
    item.textContent = `${nameOf(message.id)} ${read ? `read ${read}` : "read no other"}`;
    return item;
  }));
}
