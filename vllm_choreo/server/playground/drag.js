// SPDX-License-Identifier: Apache-2.0
// Messages dragged into the list of a call, and inside it.

const TYPE = "application/x-choreo";
let dragged = null;

// `what` is handed to `dropped` of the list on which the item is let go.
export function makeDraggable(item, what) {
  item.draggable = true;
  item.addEventListener("dragstart", (event) => {
    dragged = what;
    event.dataTransfer.setData(TYPE, "message");
    event.dataTransfer.effectAllowed = "copyMove";
  });
  item.addEventListener("dragend", () => { dragged = null; });
}

// Calls `dropped(what, index)`: before which of its items something was let go.
export function acceptDrops(list, dropped) {
  const isOurs = (event) => dragged !== null && event.dataTransfer.types.includes(TYPE);
  list.addEventListener("dragover", (event) => {
    if (!isOurs(event)) return;
    event.preventDefault();
    list.classList.add("over");
  });
  list.addEventListener("dragleave", () => list.classList.remove("over"));
  list.addEventListener("drop", (event) => {
    if (!isOurs(event)) return;
    event.preventDefault();
    list.classList.remove("over");
    const middles = [...list.children].map((item) => {
      const box = item.getBoundingClientRect();
      return box.top + box.height / 2;
    });
    dropped(dragged, middles.filter((middle) => middle < event.clientY).length);
    dragged = null;
  });
}
